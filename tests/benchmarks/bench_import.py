"""`import llmstack` over a bare Python: medians of alternating runs of both, in seconds."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path


def seconds(program: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    pairs = [(seconds("pass"), seconds("import llmstack")) for _ in range(21)]
    bare, ours = (statistics.median(times) for times in zip(*pairs))
    print(f"import llmstack: {ours - bare:.3f} s over bare Python ({bare:.3f} s)")
    results = Path(__file__).parents[2] / "results"
    results.mkdir(exist_ok=True)
    (results / "bench_import.json").write_text(json.dumps({"bare_s": bare, "llmstack_s": ours}), encoding="utf-8")
