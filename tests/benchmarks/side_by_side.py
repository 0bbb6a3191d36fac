"""What the benchmarks share: contestants that take turns, and where results go."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def median_s(contestants: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """CPU seconds of each contestant: all run once unmeasured, then in turns, so that a busy moment meets them all."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for run in range(runs + 1):  # the first warms up
        for name, call in contestants.items():
            start = time.process_time()
            call()
            if run:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def write(name: str, results: object) -> None:
    """results/<name>.json of the checkout."""
    to = Path(__file__).parents[2] / "results" / f"{name}.json"
    to.parent.mkdir(exist_ok=True)
    to.write_text(json.dumps(results, indent=2), encoding="utf-8")
