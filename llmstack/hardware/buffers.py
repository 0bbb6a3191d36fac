"""Loading the next tile while this one is multiplied: a pipeline of two stages with a few buffers between them.

n tiles, each loaded in l seconds by one copy engine and then multiplied in c seconds by one matrix unit, b buffers:

    b = 1     n (l + c)                                 a buffer is not free before its tile is multiplied
    b ≥ 2     l + (n − 1) max(l, c) + c                 first load, then the slower of both, and the last multiplication

"First load + n max(l, c)" is the second line where multiplying is slower, and max(l, c) − c too much where loading is.
With times that do not vary two buffers are enough; more take up what varies from tile to tile. On GPUs b is num_stages.

    pipeline(loads, computes, buffers) -> Timeline      .load_start .compute_start .seconds .stalled

`thin_seconds` is the time of a few rows times a weight by each kernel of ops/matmul.py, and `modelled` what its
`choose` looks up.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from llmstack.facts import accelerator
from llmstack.ops.matmul import KINDS, inflections, padded

PROFILED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 65, 96, 128, 192, 256, 512)  # rows M of a modelled profile


@dataclass(frozen=True)
class Timeline:
    """When each load and each multiplication began, and when the last one ended; seconds."""

    load_start: tuple[float, ...]
    compute_start: tuple[float, ...]
    seconds: float
    computing: float

    @property
    def stalled(self) -> float:
        """Share of the time in which the matrix unit waits."""
        return 1 - self.computing / self.seconds if self.seconds else 0.0


def pipeline(loads: Sequence[float], computes: Sequence[float], buffers: int = 2) -> Timeline:
    """Simulate it, event by event; each tile has its times. Raises ValueError on no buffer or times that do not fit."""
    if buffers < 1 or len(loads) != len(computes):
        raise ValueError(f"one load a multiplication, and a buffer: got {len(loads)}, {len(computes)} and {buffers}")
    if not all(t >= 0 for t in (*loads, *computes)):
        raise ValueError(f"times are 0 or more seconds, got {list(loads)} and {list(computes)}")
    load_start, compute_start, ready = [], [], 0
    free, loading, computing, now = buffers, False, False, 0.0
    events: list[tuple[float, str]] = []  # what ends, and when
    while True:
        if not loading and free and len(load_start) < len(loads):
            heapq.heappush(events, (now + loads[len(load_start)], "load"))
            load_start.append(now)
            loading, free = True, free - 1
        if not computing and ready:
            heapq.heappush(events, (now + computes[len(compute_start)], "compute"))
            compute_start.append(now)
            computing, ready = True, ready - 1
        if not events:
            return Timeline(tuple(load_start), tuple(compute_start), now, float(sum(computes)))
        now, ended = heapq.heappop(events)
        if ended == "load":
            loading, ready = False, ready + 1
        else:
            computing, free = False, free + 1


def pipeline_seconds(n: int, load: float, compute: float, buffers: int = 2) -> float:
    """The closed form for n ≥ 1 equal tiles."""
    return n * (load + compute) if buffers == 1 else load + (n - 1) * max(load, compute) + compute


def thin_seconds(
    kind: str, M: int, N: int, K: int, device: str = "a100-sxm-80gb", buffers: int = 2, pad: int = 8, value_bytes=2
) -> float:
    """x [M, K] wᵀ, w [N, K]: the greater of loading and multiplying, their sum with one buffer. Many tiles: n → ∞.

    gemv runs once a row, flat reads w once for 64 rows and fills them to `pad`, gemm (128 rows a tile, grouped) once.
    A cache answers all but the first read of x. Operations at the device's 16-bit matrix peak.
    """
    rows = {"gemv": M, "flat": padded(M, pad), "gemm": -(-M // 128) * 128}[kind]
    passes = {"gemv": M, "flat": -(-M // 64), "gemm": 1}[kind]
    chip = accelerator(device)
    load = value_bytes * (passes * N * K + M * K + M * N) / chip.bandwidth
    compute = 2 * rows * N * K / chip.peak()
    return load + compute if buffers == 1 else max(load, compute)


def modelled(N: int, K: int, device: str = "a100-sxm-80gb", buffers: int = 2) -> tuple[int, int]:
    """M1 and M2 of ops/matmul.py's choose, from modelled times."""
    profile = {kind: {M: thin_seconds(kind, M, N, K, device, buffers) for M in PROFILED} for kind in KINDS}
    return inflections(profile)
