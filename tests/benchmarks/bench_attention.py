"""Time and peak memory of attention against the length, with the exponents of both: one head of 64, fp32, one thread.

Each point runs in a process of its own, forked after the imports: CPU seconds of the best of some runs, and how far its
largest resident size rose above where it began. The exponents are slopes of the last points on log-log paper.
Writes results/bench_attention.json.
"""

import os

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from side_by_side import write  # noqa: E402

from llmstack.architectures.efficient_attention.blocks import dilated_attention, window_attention  # noqa: E402
from llmstack.ops.attention import attention_formula, attention_torch, causal_mask  # noqa: E402
from llmstack.ops.linear_attention import elu_features, linear_attention_torch  # noqa: E402
from llmstack.ops.scan import scan_torch  # noqa: E402

DH, STATES = 64, 16
LENGTHS = [2**n for n in range(10, 16)]
FORMS = {
    "dense, scores written": lambda q, k, v: attention_formula(q, k, v, causal_mask(q.shape[2], q.shape[2])),
    "dense, fused": lambda q, k, v: attention_torch(q, k, v, causal=True),
    "window 256": lambda q, k, v: window_attention(q, k, v, 257),
    "dilated": lambda q, k, v: dilated_attention(q, k, v, [(256, 1), (1024, 4), (4096, 16)], causal=True),
    "linear": lambda q, k, v: linear_attention_torch(elu_features(q), elu_features(k), v, causal=True),
    "scan": lambda q, k, v: selective(q[0]),
}
# the greatest exponent of (time, memory) that the paper's claim allows, and the least of what it compares with
MOST = {"window 256": (1.3, 1.2), "dilated": (1.3, 1.2), "linear": (1.3, 1.2), "scan": (1.3, 1.2)}
LEAST = {"dense, scores written": (1.7, 1.8), "dense, fused": (1.7, 0.0)}
TOO_LARGE = {"dense, scores written": 16384}  # 32 Ki would write three tables of 4 GiB


def selective(x):
    T = x.shape[1]
    a, b = -torch.arange(1.0, STATES + 1).expand(DH, -1), torch.ones(1, T, STATES)
    return scan_torch(x, torch.full_like(x, 0.1), a, b, b, torch.ones(DH))[0]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def point(form: str, T: int, runs: int, pipe) -> None:
    with torch.inference_mode():
        q, k, v = (torch.randn(1, 1, T, DH) for _ in range(3))
        FORMS[form](q[:, :, :64], k[:, :, :64], v[:, :, :64])  # warm: libraries, not memory
        before, seconds = resident_bytes(), []
        for _ in range(runs):
            start = time.process_time()
            FORMS[form](q, k, v)
            seconds.append(time.process_time() - start)
    pipe.send((min(seconds), max(1, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)))


def main(longest: int) -> None:
    torch.set_num_threads(int(THREADS))
    context, results, failed = multiprocessing.get_context("fork"), {}, []
    for form in FORMS:
        lengths = [T for T in LENGTHS if T <= min(longest, TOO_LARGE.get(form, longest))]
        found = []
        for T in lengths:
            mine, theirs = context.Pipe()
            process = context.Process(target=point, args=(form, T, 5 if T <= 4096 else 2, theirs))
            process.start()
            found.append(mine.recv())
            process.join()
        seconds, peak = (list(x) for x in zip(*found))
        slope = lambda y: float(np.polyfit(np.log(lengths[-3:]), np.log(y[-3:]), 1)[0])
        exponents = slope(seconds), slope(peak)
        results[form] = dict(tokens=lengths, cpu_s=seconds, peak_bytes=peak, exponents=exponents)
        last = f"at {lengths[-1]} tokens {seconds[-1]:.3g} s, {peak[-1] / 2**20:.0f} MiB"
        print(f"{form:<22} time ~ T^{exponents[0]:.2f}, memory ~ T^{exponents[1]:.2f}   {last}", flush=True)
        if any(e > most for e, most in zip(exponents, MOST.get(form, (9, 9)))):
            failed.append(f"{form}: exponents {exponents}, at most {MOST[form]}")
        if any(e < least for e, least in zip(exponents, LEAST.get(form, (0, 0)))):
            failed.append(f"{form}: exponents {exponents}, at least {LEAST[form]}")
    write("bench_attention", {"threads": int(THREADS), "head": DH, "results": results})
    if failed and longest == LENGTHS[-1]:
        sys.exit("not as it must be: " + "; ".join(failed))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else LENGTHS[-1])
