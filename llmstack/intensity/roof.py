"""The roofline (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785): what a machine can make of an
operation, from its intensity alone.

    attainable(I) = min(peak, bandwidth · I)          operations a second at I operations a byte
    ridge = peak / bandwidth                          below it an operation is memory-bound, from it on compute-bound
    time = max(operations / peak, bytes / bandwidth)  if loading and computing overlap perfectly

    roofline(accelerator, points) -> Roofline         .ridge .attainable(I) .seconds(point) .bound(point)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmstack.facts import Accelerator


@dataclass(frozen=True)
class Point:
    """Something that runs: operations, bytes, and where it was measured the seconds that it took."""

    label: str
    flops: float
    bytes: float
    seconds: float | None = None

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def rate(self) -> float | None:
        """Measured operations a second."""
        return self.flops / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Roofline:
    """Two ceilings and the points under them."""

    name: str
    peak: float  # operations a second
    bandwidth: float  # bytes a second
    points: tuple[Point, ...] = ()

    def __post_init__(self):
        if not (self.peak > 0 and self.bandwidth > 0):
            raise ValueError(f"{self.name}: ceilings are positive, got {self.peak} and {self.bandwidth} a second")

    @property
    def ridge(self) -> float:
        """Operations a byte at which both ceilings meet."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: float) -> float:
        return min(self.peak, self.bandwidth * intensity)

    def seconds(self, point: Point) -> float:
        """The least time that the ceilings allow."""
        return max(point.flops / self.peak, point.bytes / self.bandwidth)

    def bound(self, point: Point) -> str:
        """What limits a point: "memory" below the ridge, "compute" from it on."""
        return "memory" if point.flops < self.ridge * point.bytes else "compute"


def roofline(accelerator: Accelerator, points: Iterable = (), dtype: str = "") -> Roofline:
    """An accelerator's dense peak in `dtype` and its bandwidth, with points: Points, Terms, or anything that has
    `flops`, `bytes` and perhaps a `label`, `name` or `part`.

    Raises ValueError when the accelerator has no stated bandwidth, or a point moves no bytes; KeyError on a dtype
    without a stated peak.
    """
    accelerator.ridge(dtype)
    kept = []
    for p in points:
        if not p.bytes > 0:
            raise ValueError(f"{p}: a point under a roof moves bytes; this one has none")
        label = next((text for key in ("label", "name", "part") if (text := getattr(p, key, ""))), "")
        kept.append(Point(label, p.flops, p.bytes, getattr(p, "seconds", None)))
    return Roofline(accelerator.title, accelerator.peak(dtype), accelerator.bandwidth, tuple(kept))
