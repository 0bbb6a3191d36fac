"""What counting costs, and how well a roof predicts: Llama-3.1-405B by its dials and by a trace, and a model's times.

    symbolic        every operation of a training pass of Llama-3.1-405B priced, best of 20: under 5 ms
    traced          build it on the meta device and trace a forward pass, in a process of its own: under 10 s of that
                    process's time and 2 GiB at its peak (its imports included)
    predicted       each operation of SmolLM2-135M's first six layers, measured over what this machine's measured roof
                    allows, as quantiles; large ones are those with 20 µs or more predicted

Of the last only an order is asserted: that large operations are predicted better than small ones. A roof that is
measured while something else runs is too low, and the quotients with it. Writes results/bench_counts.json.
"""

import os

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")

import json  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

from side_by_side import write  # noqa: E402

LIMITS = {"symbolic_ms": 5.0, "traced_s": 10.0, "traced_GiB": 2.0}
AT = (0.1, 0.25, 0.5, 0.75, 0.9)
CHILD = """
import json, resource, sys, time
from llmstack import preset
from llmstack.intensity.trace import traced

began, cpu = time.perf_counter(), time.process_time()
trace = traced(preset("llama3.1-405b"), 1, 2048)
spent = time.perf_counter() - began, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([trace.flops, *spent, peak]))
"""


def symbolic() -> dict[str, float]:
    from llmstack import preset
    from llmstack.intensity import terms

    config, times = preset("llama3.1-405b"), []
    for _ in range(20):
        began = time.perf_counter()
        terms(config, 1, 2048, "train")
        times.append(1e3 * (time.perf_counter() - began))
    return {"symbolic_ms": min(times)}


def traced() -> dict[str, float]:
    from llmstack import preset
    from llmstack.intensity import flops

    child = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True)
    counted, wall, cpu, peak = json.loads(child.stdout)
    assert counted == flops(preset("llama3.1-405b"), 1, 2048), "the trace and the dials disagree"
    return {"traced_s": cpu, "traced_wall_s": wall, "traced_GiB": peak / 2**30}


def predicted() -> dict[str, dict]:
    import torch

    from llmstack import preset
    from llmstack.intensity import measure, roofline
    from llmstack.intensity.timing import predict, timed

    torch.set_num_threads(int(THREADS))
    roof = roofline(measure(int(THREADS)).accelerator(), dtype="fp32")
    config, found = preset("smollm2-135m").with_(n_layers=6), {}
    for phase in ("forward", "decode"):
        timing = timed(config, 1, 128, phase)
        ratios = predict(timing.rows, roof)
        large = [(row, x) for row, x in ratios if roof.seconds(row.point) >= 2e-5]
        groups = {kind: [x for row, x in ratios if row.kind == kind] for kind in ("linear", "attention", "other")}
        groups["large"], groups["small"] = [x for _, x in large], [x for r, x in ratios if (r, x) not in large]
        share = sum(row.seconds for row, _ in large) / timing.seconds
        whole = timing.seconds / sum(roof.seconds(row.point) for row, _ in ratios)
        found[phase] = {name: quantiles(values) for name, values in groups.items() if len(values) > 1}
        found[phase] |= {"whole pass": whole, "time in large": share}
    return {"roof": {"GFLOP/s": roof.peak / 1e9, "GB/s": roof.bandwidth / 1e9}, "measured / predicted": found}


def quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"n": len(values)} | {f"{q:.0%}": cuts[round(20 * q) - 1] for q in AT}


def main() -> None:
    results = symbolic() | traced() | predicted()
    for name, limit in LIMITS.items():
        print(f"{name}: {results[name]:.3g} (limit {limit:g})")
    print("roof:", ", ".join(f"{value:.1f} {unit}" for unit, value in results["roof"].items()))
    for phase, groups in results["measured / predicted"].items():
        print(
            f"{phase}: whole pass {groups['whole pass']:.2f}, {groups['time in large']:.0%} of the time in large ones"
        )
        for name, row in groups.items():
            if isinstance(row, dict):
                print(f"  {name:>9} {row['n']:>4}:", "  ".join(f"{q} {row[q]:.2f}" for q in row if q != "n"))
    write("bench_counts", results)
    failed = [name for name, limit in LIMITS.items() if results[name] > limit]
    decode = results["measured / predicted"]["decode"]
    if decode["large"]["50%"] > decode["small"]["50%"]:
        failed.append("in decode, large operations are predicted no better than small ones")
    if failed:
        sys.exit(f"over the limit: {', '.join(failed)}")


if __name__ == "__main__":
    main()
