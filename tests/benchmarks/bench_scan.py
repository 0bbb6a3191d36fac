"""The recurrence in parallel against one step after the other, and the scan against attention by length.

First part: ops.scan's three orders on the same coefficients, fp32, by length and by the values of a step (B I N).
Parallel orders do more work in fewer, larger operations: they win where a step is small, and where there are many
processors; on one core a wide step is work enough, and there they lose.

Second part: a scan and causal attention of the same width, time against length, with the exponent of the fit: the
scan's time is linear, attention's quadratic at last. The scan takes 1,024 tokens at a time and hands its state over,
so that what it holds does not grow. Both alone, without projections. CPU seconds, contestants take turns.
Writes results/bench_scan.json.
"""

import os

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from side_by_side import median_s, write  # noqa: E402

from llmstack.ops.attention import attention_torch  # noqa: E402
from llmstack.ops.scan import RECURRENCES, scan_torch  # noqa: E402

WIDTHS = [(8, 4), (64, 16), (512, 16)]  # channels, states
RECURRENCE_LENGTHS = [256, 1024, 4096]
LENGTHS = [1024, 2048, 4096, 8192, 16384]
I, N, HEADS, DH = 64, 16, 1, 64  # both mixers 64 channels wide


def orders(runs: int) -> list[dict]:
    results = []
    for channels, states in WIDTHS:
        for T in RECURRENCE_LENGTHS:
            a, b = torch.rand(1, T, channels, states), torch.randn(1, T, channels, states)
            calls = {name: (lambda fn=fn: fn(a, b)) for name, fn in RECURRENCES.items()}
            want = calls["sequential"]()
            for name, call in calls.items():
                assert torch.allclose(call(), want, rtol=1e-4, atol=1e-4), f"{name} computes something else"
            s = median_s(calls, runs)
            ratios = {name: s["sequential"] / s[name] for name in s}
            results.append(
                {"values_a_step": channels * states, "tokens": T, "median_s": s, "sequential / this": ratios}
            )
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != "sequential")
            print(f"{channels * states:>5} values a step, {T:>5} steps: sequential / this = {shown}", flush=True)
    return results


def segments(x, delta, a, b, c, d, size: int = 1024) -> torch.Tensor:
    h, out = None, []
    for xs, deltas, bs, cs in zip(*(t.split(size, 1) for t in (x, delta, b, c))):
        y, h = scan_torch(xs, deltas, a, bs, cs, d, h)
        out.append(y)
    return torch.cat(out, 1)


def lengths(runs: int) -> dict:
    seconds: dict[str, list[float]] = {"scan": [], "attention": []}
    for T in LENGTHS:
        x, delta, b, c = torch.randn(1, T, I), torch.rand(1, T, I), torch.randn(1, T, N), torch.randn(1, T, N)
        a, d = -torch.rand(I, N), torch.ones(I)
        q, k, v = torch.randn(3, 1, HEADS, T, DH)
        calls = {
            "scan": lambda: segments(x, delta, a, b, c, d),
            "attention": lambda: attention_torch(q, k, v, causal=True),
        }
        s = median_s(calls, runs)
        for name in seconds:
            seconds[name].append(s[name])
        print(f"{T:>6} tokens: scan {s['scan']:.4f} s, attention {s['attention']:.4f} s", flush=True)
    fit = lambda y: float(np.polyfit(np.log(LENGTHS[1:]), np.log(y[1:]), 1)[0])
    exponents = {name: fit(y) for name, y in seconds.items()}
    print("exponent of time in length: " + ", ".join(f"{name} {e:.2f}" for name, e in exponents.items()))
    return {"tokens": LENGTHS, "median_s": seconds, "exponents": exponents}


def main(runs: int) -> None:
    torch.set_num_threads(int(THREADS))
    with torch.inference_mode():
        results = {"threads": int(THREADS), "orders": orders(runs), "lengths": lengths(runs)}
    write("bench_scan", results)
    found = results["lengths"]["exponents"]
    if found["scan"] > 1.3 or found["attention"] < 1.6:
        sys.exit(f"the scan's time should be linear in length and attention's quadratic, found {found}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
