"""Cells and codes: IVF looks at a few cells of k-means only, product quantisation stores a vector in a few bytes.

IVF, an inverted file: the `lists` centres of k-means cut the space into cells, and a query reads the `probe` cells
whose centres are nearest. probe = lists is exact. Work: D · (lists + probe · n / lists), least near lists = √n.

PQ (Jégou, Douze, Schmid 2011, TPAMI 33(1)): cut a vector into `parts`, replace each piece by the number of the nearest
of 2^bits learnt pieces: parts · bits / 8 bytes in place of 4 D. The query stays whole ("asymmetric"): its distances to
all pieces form a table [parts, 2^bits], and the distance to a code is a sum of `parts` entries of it. IVF-PQ encodes
what is left after the cell's centre, which is smaller than the vector, and needs a table for each cell.
"""

from __future__ import annotations

import numpy as np

from llmstack.execution.retrieval.exact import checked, checked_k, checked_stored, nearest, squared, stacked


def kmeans(x: np.ndarray, k: int, seed: int = 0, steps: int = 25) -> np.ndarray:
    """Lloyd's centres [..., k, D] of x [..., n, D], each leading index by itself.

    The start is k of the vectors; a cell that loses all its own gets a vector from among those farthest from theirs.
    """
    n, D = x.shape[-2:]
    if not isinstance(k, int | np.integer) or not 1 <= k <= n:
        raise ValueError(f"k = {k} centres of {n} vectors: take from 1 to {n}, better n / 30 or fewer")
    flat = x.reshape(-1, n, D)
    rng = np.random.default_rng(seed)
    centres = np.stack([part[rng.permutation(n)[:k]] for part in flat])  # [parts, k, D]
    for _ in range(steps):
        distances = squared(flat, centres)  # [parts, n, k]
        for part, own, moved in zip(flat, distances, centres):
            mine = own.argmin(-1)
            size = np.bincount(mine, minlength=k)
            order = np.argsort(mine, kind="stable")
            full = np.flatnonzero(size)
            starts = np.concatenate([[0], np.cumsum(size[full])[:-1]])
            moved[full] = np.add.reduceat(part[order], starts, dtype=np.float64) / size[full, None]
            empty = np.flatnonzero(size == 0)
            moved[empty] = part[np.argsort(-own.min(-1), kind="stable")[: len(empty)]]
    return centres.reshape(*x.shape[:-2], k, D)


class PQ:
    """A product quantiser learnt from x [n, D]. `.bytes` a vector as it would be packed; codes here are uint8 each."""

    def __init__(self, x: np.ndarray, parts: int, bits: int = 8, seed: int = 0):
        D = (x := checked_stored(x)).shape[1]
        if parts < 1 or D % parts:
            raise ValueError(f"parts = {parts} must divide the width {D}, as {[p for p in (8, 16, 48) if D % p == 0]}")
        if not 1 <= bits <= 8 or 2**bits > len(x):
            raise ValueError(f"bits = {bits}: from 1 to 8, and 2^bits pieces need as many vectors, here {len(x)}")
        self.parts, self.bytes = parts, parts * bits / 8
        self.pieces = kmeans(self._cut(x), 2**bits, seed)  # [parts, 2^bits, D / parts]

    def _cut(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), self.parts, x.shape[1] // self.parts).swapaxes(0, 1)  # [parts, n, D / parts]

    def encode(self, x: np.ndarray) -> np.ndarray:
        x = checked(x, self.parts * self.pieces.shape[-1])
        return squared(self._cut(x), self.pieces).argmin(-1).T.astype(np.uint8)  # [n, parts]

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return np.concatenate([piece[code] for piece, code in zip(self.pieces, codes.T)], -1)  # [n, D]

    def table(self, query: np.ndarray) -> np.ndarray:
        """Squared distances of a query's [D] pieces to all learnt ones, [parts, 2^bits]."""
        return squared(self._cut(query[None]), self.pieces)[:, 0]

    def distances(self, table: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Squared distances [m] to codes [m, parts], by adding up table entries."""
        return table[np.arange(self.parts), codes].sum(-1)


class IVF:
    """An inverted file over x [n, D] with whole vectors. `.visited` [Q] counts the vectors that a query read."""

    def __init__(self, vectors: np.ndarray, lists: int, seed: int = 0, steps: int = 25):
        self.x = checked_stored(vectors)
        self.centres = kmeans(self.x, lists, seed, steps)  # [lists, D]
        self.cell = squared(self.x, self.centres).argmin(-1)  # [n]
        self.members = [np.flatnonzero(self.cell == i) for i in range(lists)]
        self.visited = np.zeros(0, int)

    def _distances(self, query: np.ndarray, cell: int) -> np.ndarray:
        return squared(query[None], self.x[self.members[cell]])[0]

    def search(self, queries: np.ndarray, k: int = 10, probe: int = 1) -> tuple[np.ndarray, np.ndarray]:
        queries, k = checked(queries, self.centres.shape[1], "queries"), checked_k(k, len(self.cell))
        if not 1 <= probe <= len(self.centres):
            raise ValueError(f"probe = {probe} cells of {len(self.centres)}: from 1 (fast) to all (exact)")
        full = [len(members) > 0 for members in self.members]  # where copies make equal centres, one has them all
        away = np.where(full, squared(queries, self.centres), np.inf)
        cells = np.argsort(away, axis=-1, kind="stable")[:, :probe]  # [Q, probe]
        rows, self.visited = [], np.array([sum(len(self.members[c]) for c in near) for near in cells])
        for query, near in zip(queries, cells):
            ids = np.concatenate([self.members[c] for c in near])
            rows.append(nearest(np.concatenate([self._distances(query, c) for c in near]), ids, k))
        return stacked(rows, k)


class IVFPQ(IVF):
    """An inverted file whose vectors are kept as PQ codes of their residuals; the vectors themselves are let go."""

    def __init__(self, vectors: np.ndarray, lists: int, parts: int, bits: int = 8, seed: int = 0, steps: int = 25):
        super().__init__(vectors, lists, seed, steps)
        residuals = self.x - self.centres[self.cell]
        self.pq = PQ(residuals, parts, bits, seed)
        self.codes = self.pq.encode(residuals)  # [n, parts]
        del self.x

    def _distances(self, query: np.ndarray, cell: int) -> np.ndarray:
        return self.pq.distances(self.pq.table(query - self.centres[cell]), self.codes[self.members[cell]])
