"""HNSW, a hierarchy of navigable small-world graphs (Malkov and Yashunin 2016, arXiv 1603.09320; algorithms 1 to 5).

Every vector is a node of layer 0; it also stands in layers 1 … l, where l is drawn with P(l ≥ i) = M^-i, so each layer
holds one in M of the nodes below it, as in a skip list. A search walks greedily from the single entry at the top, and
takes the node it ends at as the entry of the next layer; on layer 0 it keeps the `ef` best nodes seen in place of one.

`diversify` decides whom a node links to. It serves Vamana as well: with α = 1 it is algorithm 4 here, with α > 1 it is
RobustPrune there.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

import numpy as np

from llmstack.execution.retrieval.exact import (
    checked,
    checked_k,
    checked_stored,
    distinct,
    nearest_copies,
    squared,
    stacked,
)


def diversify(distances: np.ndarray, x: np.ndarray, most: int, alpha: float = 1.0) -> list[int]:
    """Which of m candidates x [m, D], at squared `distances` [m] from a node, it links to: at most `most` places in x.

    Take the nearest that is left, p; drop every c that is nearer to p than to the node, by the factor α:
    α |p - c| < |node - c|, for c can be reached by way of p. Repeat.
    """
    between = alpha**2 * squared(x, x)  # [m, m]
    left, taken = distances.astype(float), []
    while len(taken) < most:
        p = int(left.argmin())
        if left[p] == np.inf:
            break
        taken.append(p)
        left[between[p] < distances] = np.inf
        left[p] = np.inf
    return taken


def best_first(start: list[int], width: int, distance: Callable, links: Callable, seen: np.ndarray, trace=None):
    """Beam search on a graph: the `width` best (distance, node) found, nearest first, and how many were measured.

    From at most `width` nodes in `start`. `distance(nodes) -> [m]`, `links(node) -> nodes`, `seen` [n] bool, all False
    and left so. It ends when the nearest node not yet expanded is farther than all `width` kept ones; the nodes that it
    expanded, in order, go to the list `trace`.
    """
    touched, todo, kept = [np.array(start)], [], []
    seen[touched[0]] = True
    for d, node in zip(distance(touched[0]).tolist(), start):
        heappush(todo, (d, node))
        heappush(kept, (-d, -node))
    while todo:
        d, node = heappop(todo)
        if len(kept) == width and d > -kept[0][0]:
            break
        if trace is not None:
            trace.append(node)
        new = links(node)
        new = new[~seen[new]]
        seen[new] = True
        touched.append(new)
        for far, other in zip(distance(new).tolist(), new.tolist()):
            if len(kept) < width:
                heappush(kept, (-far, -other))
            elif far < -kept[0][0]:
                heapreplace(kept, (-far, -other))
            else:
                continue
            heappush(todo, (far, other))
    every = np.concatenate(touched)
    seen[every] = False
    return sorted((-d, -node) for d, node in kept), len(every)


def distances_to(query: np.ndarray, x: np.ndarray) -> Callable:
    """nodes [m] -> their squared distances [m] from a query [D], subtracted first: far from 0 no digit is lost."""

    def distances(nodes: np.ndarray) -> np.ndarray:
        away = x[nodes] - query
        return np.einsum("md,md->m", away, away)

    return distances


def draw_levels(n: int, M: int, rng: np.random.Generator) -> np.ndarray:
    """Top layers [n] = ⌊-ln(u) · mL⌋ with mL = 1 / ln M, so that P(level ≥ i) = M^-i."""
    return (-np.log(1 - rng.random(n)) / np.log(M)).astype(int)


class HNSW:
    """A graph over the distinct vectors `.x` [m, D] of n: up to M links a node, 2M on layer 0. Copies of a vector are
    one node, found together. `.visited` [Q]: distances that a query measured."""

    def __init__(self, vectors: np.ndarray, M: int = 16, ef_construction: int = 100, seed: int = 0):
        if M < 2 or ef_construction < 1:
            raise ValueError(
                f"M = {M}, ef_construction = {ef_construction}: M is 2 (better 5) to 48, the other M and on"
            )
        self.M, self.ef_construction = M, max(ef_construction, M)
        self.x, self.copies = distinct(checked_stored(vectors))
        self.levels = draw_levels(len(self.x), M, np.random.default_rng(seed))  # [n]
        self.links: list[dict[int, np.ndarray]] = [{} for _ in range(self.levels.max() + 1)]
        self.entry, self._seen, self.visited = -1, np.zeros(len(self.x), bool), np.zeros(0, int)
        for node in range(len(self.x)):
            self._insert(node)

    def _layer(self, query: np.ndarray, start: list[int], ef: int, layer: int, trace: list | None = None):
        return best_first(start, ef, distances_to(query, self.x), self.links[layer].__getitem__, self._seen, trace)

    def _insert(self, node: int) -> None:
        """Algorithm 1: go down to the node's top layer, then link it on that and each lower one, both ways."""
        query, top, start = self.x[node], int(self.levels[node]), [self.entry]
        layers = range(int(self.levels[self.entry]), -1, -1) if self.entry >= 0 else ()
        for layer in layers:
            found, _ = self._layer(query, start, self.ef_construction if layer <= top else 1, layer)
            start = [other for _, other in found]
            if layer <= top:
                near, ids = np.array([d for d, _ in found]), np.array(start)
                self.links[layer][node] = mine = ids[diversify(near, self.x[ids], self.M)]
                for other in mine.tolist():
                    self._link(other, node, layer)
        for layer in range(top + 1):
            self.links[layer].setdefault(node, np.zeros(0, int))
        if self.entry < 0 or top > self.levels[self.entry]:
            self.entry = node

    def _link(self, node: int, other: int, layer: int) -> None:
        ids, most = np.append(self.links[layer][node], other), self.M * (2 if layer == 0 else 1)
        if len(ids) > most:
            near = squared(self.x[node][None], self.x[ids])[0]
            ids = ids[diversify(near, self.x[ids], most)]
        self.links[layer][node] = ids

    def walk(self, query: np.ndarray, ef: int, trace: dict[int, list[int]] | None = None):
        """One query [D]: the ef best (distance, node), and distances measured. `trace` gets each layer's path."""
        start, visited = [self.entry], 0
        for layer in range(len(self.links) - 1, -1, -1):
            steps = None if trace is None else trace.setdefault(layer, [])
            found, seen = self._layer(query, start, ef if layer == 0 else 1, layer, steps)
            start, visited = [node for _, node in found], visited + seen
        return found, visited

    def search(self, queries: np.ndarray, k: int = 10, ef: int = 64) -> tuple[np.ndarray, np.ndarray]:
        queries, k = checked(queries, self.x.shape[1], "queries"), checked_k(k, sum(map(len, self.copies)))
        if ef < k:
            raise ValueError(f"ef = {ef} nodes kept cannot give k = {k} neighbours; take ef of k or more")
        rows, visited = [], []
        for query in queries:
            found, seen = self.walk(query, ef)
            rows.append(nearest_copies(*zip(*found), self.copies, k))
            visited.append(seen)
        self.visited = np.array(visited, int)
        return stacked(rows, k)
