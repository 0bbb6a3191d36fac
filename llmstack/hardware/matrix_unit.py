"""A matrix unit: hardware that multiplies one tile of a fixed shape at a time, as Cambricon's Matrix Function Unit.

    cycles = ⌈M / m⌉ ⌈N / n⌉ ⌈K / k⌉ · cycles of a tile          utilisation = M N K / (cycles · multiply-adds a cycle)

It computes whole tiles: what sticks out of the matrix is filled with zeros and multiplied all the same, so odd shapes
waste it. This MFU and its utilisation are not model FLOPs utilisation, which has the same letters: that one compares a
whole training step with the peak of the machine (intensity/utilisation.py). (Cambricon: Liu et al. 2016, ISCA,
doi:10.1109/ISCA.2016.42, whose matrix function unit works on tiles from a scratchpad under software's control.)

The scratchpad is small, so a program has to choose tiles that fit: `planned` finds the tile that moves least.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from llmstack.ops.matmul import matmul_bytes


@dataclass(frozen=True)
class Run:
    """A product, the cycles that it took, and the share of the unit's multiply-adds that were asked for."""

    c: np.ndarray
    cycles: int
    utilisation: float


@dataclass(frozen=True)
class MatrixUnit:
    """A unit for tiles [m, k] × [k, n], one every `tile_cycles`. By default 16 × 16 × 16 a cycle."""

    m: int = 16
    n: int = 16
    k: int = 16
    tile_cycles: int = 1

    def __post_init__(self):
        if min(self.m, self.n, self.k, self.tile_cycles) < 1:
            raise ValueError(f"{self}: sides of a tile and its cycles are 1 or more")

    @property
    def peak(self) -> float:
        """Multiply-adds a cycle."""
        return self.m * self.n * self.k / self.tile_cycles

    def cycles(self, M: int, N: int, K: int) -> int:
        return -(-M // self.m) * -(-N // self.n) * -(-K // self.k) * self.tile_cycles

    def utilisation(self, M: int, N: int, K: int) -> float:
        return M * N * K / (self.cycles(M, N, K) * self.peak) if M * N * K else 0.0

    def run(self, a: np.ndarray, b: np.ndarray) -> Run:
        """a [M, K] b [K, N], tile by tile. Raises ValueError where they do not meet."""
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
            raise ValueError(f"a [M, K] meets b [K, N], got {list(a.shape)} and {list(b.shape)}")
        (M, K), N = a.shape, b.shape[1]
        fill = lambda x, rows, cols: np.pad(x, [(0, -x.shape[0] % rows), (0, -x.shape[1] % cols)])
        a, b = fill(a, self.m, self.k), fill(b, self.k, self.n)
        c, cycles = np.zeros((a.shape[0], b.shape[1]), np.result_type(a, b)), 0
        steps = product(range(0, len(c), self.m), range(0, c.shape[1], self.n), range(0, a.shape[1], self.k))
        for i, j, p in steps:
            c[i : i + self.m, j : j + self.n] += a[i : i + self.m, p : p + self.k] @ b[p : p + self.k, j : j + self.n]
            cycles += self.tile_cycles
        return Run(c[:M, :N], cycles, M * N * K / (cycles * self.peak) if cycles else 0.0)


def tile_bytes(tile: tuple[int, int, int], value_bytes: int = 2, buffers: int = 2) -> int:
    """What a tile (BM, BN, BK) needs: strips of both operands in each buffer, and the sum in fp32."""
    BM, BN, BK = tile
    return buffers * value_bytes * (BM * BK + BK * BN) + 4 * BM * BN


def planned(M: int, N: int, K: int, capacity: float, value_bytes: int = 2, buffers: int = 2) -> tuple[int, int, int]:
    """The tile, of powers of two from 16, that fits `capacity` bytes and moves the fewest; the deepest of equals.

    Raises ValueError where not even 16 × 16 × 16 fits.
    """
    sides = [[2**e for e in range(4, max(5, (side - 1).bit_length() + 1))] for side in (M, N, K)]
    fitting = [tile for tile in product(*sides) if tile_bytes(tile, value_bytes, buffers) <= capacity]
    if not fitting:
        least = tile_bytes((16, 16, 16), value_bytes, buffers)
        raise ValueError(f"a tile needs at least {least} bytes with {buffers} buffers, got {capacity:g}")
    return min(fitting, key=lambda tile: (sum(matmul_bytes(M, N, K, tile, value_bytes)), -tile[2]))
