"""DiskANN: a graph that is searched from disk (Subramanya et al. 2019, NeurIPS; algorithms 1 to 3, section 3).

Vamana has one layer. Its nodes link with α > 1, which keeps some long links beside the short ones, so that a search
needs few hops; a hop is what costs when each is a read. On disk a node's record is vector, degree and links:

    sector of 4,096 bytes = ⌊4096 / (4 D + 4 + 4 R)⌋ records, none across a boundary

so one read brings the vector and the next candidates at once. In memory stay the PQ codes of all vectors: they guide
the walk, and the whole vectors that came with the reads give the final order. `.reads` counts sectors, `.rounds` the
waits: `beam` reads are asked for together.
"""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

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
from llmstack.execution.retrieval.hnsw import best_first, distances_to, diversify
from llmstack.execution.retrieval.ivf import PQ

SECTOR = 4096


def vamana(vectors: np.ndarray, R: int = 24, L: int = 40, alpha: float = 1.2, seed: int = 0):
    """The links of each node (at most R) and the entry, the vector nearest the mean. Two passes, with 1 and then α.

    Nodes are the distinct vectors, in the order of their first copies.
    """
    x, _ = distinct(checked_stored(vectors))
    n, seen = len(x), np.zeros(len(x), bool)
    if R < 1 or L < 1 or alpha < 1:
        raise ValueError(f"R = {R}, L = {L}, alpha = {alpha}: R and L are 1 or more, alpha 1 or more (1.2 is usual)")
    rng = np.random.default_rng(seed)
    links = [np.setdiff1d(rng.choice(n, min(R, n), replace=False), [i]) for i in range(n)]
    entry = int(squared(x.mean(0, dtype=np.float64)[None], x).argmin())

    def prune(node: int, ids: np.ndarray, a: float) -> np.ndarray:
        ids = np.unique(ids[ids != node])
        return ids[diversify(squared(x[node][None], x[ids])[0], x[ids], R, a)] if len(ids) else ids

    for a in dict.fromkeys((1.0, alpha)):
        for node in rng.permutation(n).tolist():
            path = []
            best_first([entry], L, distances_to(x[node], x), links.__getitem__, seen, path)
            links[node] = prune(node, np.concatenate([np.array(path, int), links[node]]), a)
            for other in links[node].tolist():
                if node not in links[other]:
                    both = np.append(links[other], node)
                    links[other] = both if len(both) <= R else prune(other, both, a)
    return links, entry


def _record(width: int, R: int) -> np.dtype:
    record = np.dtype([("vector", "<f4", (width,)), ("degree", "<i4"), ("links", "<i4", (R,))])
    if record.itemsize > SECTOR:
        raise ValueError(f"width {width} and {R} links take {record.itemsize} bytes, over one sector's {SECTOR}")
    return record


def write_disk_index(path: str | Path, vectors: np.ndarray, links: list[np.ndarray], entry: int, pq: PQ) -> None:
    """Records in sectors as `path`, and what is kept in memory as `path`.npz."""
    (x, copies), R = distinct(checked_stored(vectors)), max(1, *map(len, links))
    if len(links) != len(x):
        raise ValueError(f"links of {len(links)} nodes do not fit {len(x)} vectors: build the graph on these vectors")
    node_of = np.zeros(len(vectors), np.int64)  # [n]: the node of each vector
    for node, ids in enumerate(copies):
        node_of[ids] = node
    if not all(0 <= node < len(x) for node in (entry, *np.concatenate(links).tolist())):
        raise ValueError(f"entry = {entry} and all links must be among the {len(x)} vectors: those of vamana() are")
    record = _record(x.shape[1], R)
    each = SECTOR // record.itemsize
    rows = np.zeros(-(-len(x) // each) * each, record)
    rows["vector"][: len(x)] = x
    for row, own in zip(rows, links):
        row["degree"], row["links"][: len(own)] = len(own), own
    file = np.memmap(path, np.uint8, "w+", shape=(len(rows) // each, SECTOR))
    file[:, : each * record.itemsize] = rows.view(np.uint8).reshape(len(file), -1)
    file.flush()
    shape = np.array([len(x), x.shape[1], R, entry])
    np.savez(f"{path}.npz", codes=pq.encode(x), pieces=pq.pieces, bytes=pq.bytes, shape=shape, nodes=node_of)


class DiskIndex:
    """An index in a file: `.reads` and `.rounds` [Q] are the sectors and the waits of the last search's queries."""

    def __init__(self, path: str | Path):
        if not Path(path).is_file() or not Path(f"{path}.npz").is_file():
            raise FileNotFoundError(f"no index {path} with {path}.npz beside it; write_disk_index makes both")
        again = "write it again with write_disk_index"
        self.pq = PQ.__new__(PQ)
        try:
            with np.load(f"{path}.npz") as kept:
                self.codes, (self.n, self.width, R, self.entry) = kept["codes"], kept["shape"].tolist()
                self.pq.pieces, self.pq.bytes = kept["pieces"], float(kept["bytes"])
                nodes = kept["nodes"]
        except (ValueError, KeyError, EOFError, BadZipFile) as error:
            raise ValueError(f"{path}.npz is damaged or another program's ({error}); {again}") from None
        self.pq.parts, self.record = self.codes.shape[1], _record(self.width, R)
        size, wanted = Path(path).stat().st_size, -(-self.n // (SECTOR // self.record.itemsize)) * SECTOR
        if size != wanted or len(self.codes) != self.n or not 0 <= self.entry < self.n:
            told = f"{path} has {size:,} bytes, but {path}.npz describes {self.n} vectors in {wanted:,}"
            raise ValueError(f"{told}: one is cut short or another index's; {again}")
        if len(np.unique(nodes)) != self.n or nodes.min() != 0 or nodes.max() != self.n - 1:
            raise ValueError(f"{path}.npz does not say which vectors are copies; {again}")
        self.copies = np.split(np.argsort(nodes, kind="stable"), np.cumsum(np.bincount(nodes))[:-1])
        self.file = np.memmap(path, np.uint8, "r").reshape(-1, SECTOR)
        self.reads, self.rounds = np.zeros(0, int), np.zeros(0, int)

    @property
    def sectors(self) -> int:
        return len(self.file)

    def _read(self, node: int) -> np.void:
        """One sector from the file, and the node's record out of it."""
        sector, place = divmod(node, SECTOR // self.record.itemsize)
        return np.frombuffer(self.file[sector].tobytes(), self.record, 1, place * self.record.itemsize)[0]

    def _walk(self, query: np.ndarray, L: int, beam: int) -> tuple[dict[int, float], int]:
        """Nodes read with their exact distances, and the rounds that it took."""
        table, exact, rounds = self.pq.table(query), {}, 0
        ids = np.array([self.entry])
        guess = self.pq.distances(table, self.codes[ids])
        while todo := [node for node in ids.tolist() if node not in exact][:beam]:
            records = [self._read(node) for node in todo]
            rounds += 1
            for r in records:
                if not 0 <= r["degree"] <= len(r["links"]) or not (0 <= r["links"]).all() & (r["links"] < self.n).all():
                    raise ValueError(f"a record among {todo} is damaged; write the index again with write_disk_index")
            exact |= {node: float(((r["vector"] - query) ** 2).sum()) for node, r in zip(todo, records)}
            new = np.setdiff1d(np.concatenate([r["links"][: r["degree"]] for r in records]), ids)
            ids = np.append(ids, new)
            guess = np.append(guess, self.pq.distances(table, self.codes[new]))
            order = np.argsort(guess, kind="stable")[:L]  # what falls off comes back only as a link, too far
            ids, guess = ids[order], guess[order]
        return exact, rounds

    def search(self, queries: np.ndarray, k: int = 10, L: int = 40, beam: int = 4) -> tuple[np.ndarray, np.ndarray]:
        queries, k = checked(queries, self.width, "queries"), checked_k(k, sum(map(len, self.copies)))
        if L < k or beam < 1:
            raise ValueError(f"L = {L}, beam = {beam}: a list of L must hold k = {k}, and a beam one read at least")
        walks = [self._walk(query, L, beam) for query in queries]
        self.reads = np.array([len(exact) for exact, _ in walks], int)
        self.rounds = np.array([rounds for _, rounds in walks], int)
        return stacked([nearest_copies(list(e.values()), list(e), self.copies, k) for e, _ in walks], k)
