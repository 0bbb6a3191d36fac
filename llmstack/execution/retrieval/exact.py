"""Exact search, the oracle that approximate indexes are held against, and what all of them check.

A query costs n distances of D multiply-adds: 2 n D operations on 4 n D bytes read. Everything else in this package is a
way to look at fewer vectors (cells, graphs) or at fewer bytes of each (codes), at the price of recall.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from llmstack import facts

LARGEST = 1e16  # of a component: its square times any width that there is stays within fp32


def checked(vectors: Any, width: int = 0, what: str = "vectors") -> np.ndarray:
    """Vectors as fp32 [n, D]. Raises ValueError for another shape or width, NaN, infinity, and over LARGEST."""
    x = np.asarray(vectors)
    if x.ndim != 2 or not x.shape[1] or x.dtype.kind not in "fiu":
        raise ValueError(f"{what} must be numbers [n, D], got {x.dtype} {list(x.shape)}; one vector is x[None]")
    if width and x.shape[1] != width:
        raise ValueError(f"{what} have width {x.shape[1]}, but the index holds {width}: embed both with one model")
    if bad := np.flatnonzero(~(np.abs(x) <= LARGEST).all(1)).tolist():
        kinds = f"NaN or infinity in rows {bad[:5]}, or values over {LARGEST:g}, whose squares overflow"
        raise ValueError(f"{what} hold {kinds}; drop those rows, or look at what made them")
    return np.ascontiguousarray(x, np.float32)


def checked_stored(vectors: Any) -> np.ndarray:
    """What an index is made of: `checked`, and at least one."""
    if not len(x := checked(vectors)):
        raise ValueError("an index needs one vector at least, got none; was the corpus empty?")
    return x


def checked_k(k: int, n: int) -> int:
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= n:
        raise ValueError(f"k = {k!r}, but it must be a whole number from 1 to {n}, as many as the index holds")
    return int(k)


def squared(queries: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Squared distances [..., Q, n] of queries [..., Q, D] to x [..., n, D]: |q|² + |x|² - 2 q·x, one product.

    In double precision: far from 0 this is a small difference of large numbers. Two fp32 vectors that differ are at
    least (2^-24 |x|)² ≈ 3.6e-15 |x|² apart, and fp64 loses 1.1e-16 |x|² at a step; fp32 would lose 6e-8 |x|².
    """
    queries, x = queries.astype(np.float64), x.astype(np.float64)
    norms = (queries**2).sum(-1)[..., :, None] + (x**2).sum(-1)[..., None, :]
    return np.maximum(norms - 2 * queries @ x.swapaxes(-1, -2), 0)


def nearest(distances: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest of one query's candidates [m] in order, filled up with id -1 at inf; ties by the lower id."""
    if len(ids) > 4 * k:
        kept = np.flatnonzero(distances <= np.partition(distances, k - 1)[k - 1])
        distances, ids = distances[kept], ids[kept]
    order = np.lexsort((ids, distances))[:k]
    short = (0, k - len(order))
    return np.pad(distances[order], short, constant_values=np.inf), np.pad(ids[order], short, constant_values=-1)


def stacked(rows: list[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers of single queries as distances [Q, k] and ids [Q, k]."""
    distances = np.array([d for d, _ in rows], np.float32).reshape(-1, k)
    return distances, np.array([i for _, i in rows], np.int64).reshape(-1, k)


def distinct(x: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """The different vectors [m, D] of x [n, D] in order, and for each the ids of its copies.

    A graph needs this: a vector with a hundred copies would have them for all its neighbours, and no way out.
    """
    _, first, group = np.unique(x, axis=0, return_index=True, return_inverse=True)
    group = first[group.reshape(-1)]  # the id of each one's first copy
    by_group = np.argsort(group, kind="stable")
    first = np.sort(first)
    return x[first], np.split(by_group, np.searchsorted(group[by_group], first[1:]))


def nearest_copies(distances: list[float], nodes: list[int], copies: list[np.ndarray], k: int):
    """`nearest` of candidates that are distinct vectors, each standing for all its copies."""
    ids = [copies[node] for node in nodes]
    return nearest(np.repeat(distances, [len(own) for own in ids]), np.concatenate(ids), k)


class Flat:
    """Exact nearest neighbours of x [n, D]."""

    def __init__(self, vectors: np.ndarray):
        self.x = checked_stored(vectors)

    def search(self, queries: np.ndarray, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
        queries, k = checked(queries, self.x.shape[1], "queries"), checked_k(k, len(self.x))
        every = np.arange(len(self.x))
        return stacked([nearest(row, every, k) for row in squared(queries, self.x)], k)


def recall(found: np.ndarray, truth: np.ndarray) -> float:
    """The share of the true neighbours [Q, k] that are among those found [Q, k], in any order: recall@k."""
    if np.shape(found) != np.shape(truth):
        raise ValueError(f"found {np.shape(found)} and truth {np.shape(truth)} must have one shape [Q, k]")
    return float(np.mean([np.isin(t, f).mean() for f, t in zip(found, truth)]))


class Verses(NamedTuple):
    vectors: np.ndarray  # [n, 384] of unit length
    texts: list[str]  # n verses
    chapters: list[str]  # where they stand
    queries: np.ndarray  # [110, 384]: a hundred verses that are not among the texts, then ten plain questions
    asked: list[str]  # their texts


def verses(n: int = 0) -> Verses:
    """Sentence vectors of all-MiniLM-L6-v2, as data/retrieval/embed.py made them; the first n, or all 1,890."""
    if n < 0:
        raise ValueError(f"n = {n} verses, but it must be 1 or more, or 0 for all")
    with np.load(facts.data_path() / "retrieval" / "verses.npz") as file:
        lines = {name: file[name].tobytes().decode().split("\n") for name in ("texts", "chapters", "asked")}
        kept = slice(n or None)
        vectors, queries = (file[name].astype(np.float32) for name in ("vectors", "queries"))
    return Verses(vectors[kept], lines["texts"][kept], lines["chapters"][kept], queries, lines["asked"])
