"""The ceilings of the machine that this runs on, measured.

    copy     a[i] = b[i]                 2 values moved, no operation
    triad    a[i] = b[i] + s · c[i]      3 values moved, 2 operations        (STREAM: McCalpin 1995)
    gemm     C = A B, n³                 2 n³ operations, by dtype

Arrays are far larger than the caches, so that copy and triad wait for memory. Matrices are large enough that their n³
operations outweigh their 3 n² values, and no larger: a run of some milliseconds can end before another process is given
the core, a long one never does on a busy machine. Every kernel runs once unmeasured and then `repeats` times; a ceiling
is the best run, as STREAM reports it, and `spread` is how far the median lies below: on a shared machine, half is not
rare. Bytes are counted as moved by the program: a processor that first reads the line that it writes moves a third
more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from llmstack.facts import Accelerator

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Ceiling:
    """The best of some runs, in operations or bytes a second, and how far the median was below it (0 to 1)."""

    best: float
    spread: float


@dataclass(frozen=True)
class Machine:
    """What was measured, with `threads` threads."""

    threads: int
    copy: Ceiling
    triad: Ceiling
    gemm: dict[str, Ceiling] = field(hash=False)

    def accelerator(self) -> Accelerator:
        """As an entry of data/accelerators.toml: peaks of gemm, bandwidth of triad or copy, whichever is more."""
        peaks = {dtype: ceiling.best for dtype, ceiling in self.gemm.items()}
        bandwidth = max(self.copy.best, self.triad.best)
        title = f"this machine, {self.threads} thread{'s' * (self.threads > 1)}"
        return Accelerator("this-machine", title, peaks, "measured", time.strftime("%Y-%m-%d"), bandwidth)


@contextmanager
def threads(n: int):
    """torch with n threads, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_times(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times


def ceiling(amount: float, run: Callable[[], object], repeats: int) -> Ceiling:
    """`amount` operations or bytes over the seconds that `run` takes."""
    times = run_times(run, repeats)
    return Ceiling(amount / min(times), 1 - min(times) / statistics.median(times))


def measure(
    n_threads: int = 1, dtypes: tuple[str, ...] = ("fp32",), megabytes: int = 64, size: int = 512, repeats: int = 20
) -> Machine:
    """Measure this machine: a second or two by default. `megabytes` of each of three arrays, matrices [size, size].

    bf16 is measured on a small matrix: processors without its instructions are hundreds of times slower in it. Raises
    ValueError on an unknown dtype or a number below 1.
    """
    numbers = dict(n_threads=n_threads, megabytes=megabytes, size=size, repeats=repeats)
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}, but it must be a whole number, 1 or more")
    if unknown := sorted(set(dtypes) - set(DTYPES)):
        raise ValueError(f"dtypes: {', '.join(unknown)} is none of {', '.join(DTYPES)}")
    n = megabytes * 10**6 // 4
    with threads(n_threads), torch.no_grad():
        a, b, c = (torch.ones(n) for _ in range(3))
        copy = ceiling(8 * n, lambda: a.copy_(b), repeats)
        triad = ceiling(12 * n, lambda: torch.add(b, c, alpha=3.0, out=a), repeats)
        gemm = {}
        for name in dtypes:
            side = min(size, 128) if name == "bf16" else size
            x, y = (torch.ones(side, side, dtype=DTYPES[name]) for _ in range(2))
            gemm[name] = ceiling(2 * side**3, lambda: x @ y, repeats)
    return Machine(n_threads, copy, triad, gemm)


@cache
def this_machine(n_threads: int = 1) -> Machine:
    """`measure`, once a process."""
    return measure(n_threads)
