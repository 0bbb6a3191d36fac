"""Who may look at whom, as functions that compose: a mask is a predicate over positions of queries and of keys.

    near = window(64) & causal()                 sliding window             Mistral, 2310.06825
    near | sinks(4) & causal()                   with attention sinks       StreamingLLM, 2309.17453
    window(33, ahead=32) | hubs([0])             with global tokens         Longformer, 2004.05150
    strided(16)                                  local and column           Sparse Transformer, 1904.10509
    big_bird(512, 32)                            window, global, random     Big Bird, 2007.14062
    parallel_windows([40, 40], task=20)          side by side               PCW, 2212.10947
    dilated(64, 4)                               every 4th in segments      LongNet, 2307.02486

print(mask) draws its corner; matrix(T) is the table and nnz(T) its work. In code & binds tighter than |. Queries are
the last T of S positions, as everywhere. A query that sees no key gets zeros from ops.attention; `blind` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """allows(query positions [T, 1], key positions [S]) -> bool, broadcastable to [T, S]; True where it may look."""

    allows: Callable[[Tensor, Tensor], Tensor]
    name: str = "mask"

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.allows(query, key).expand(torch.broadcast_shapes(query.shape, key.shape))

    def __and__(self, other: Mask) -> Mask:
        return Mask(lambda q, k: self.allows(q, k) & other.allows(q, k), f"({self.name} & {other.name})")

    def __or__(self, other: Mask) -> Mask:
        return Mask(lambda q, k: self.allows(q, k) | other.allows(q, k), f"({self.name} | {other.name})")

    def __invert__(self) -> Mask:
        return Mask(lambda q, k: ~self.allows(q, k), f"~{self.name}")

    def rows(self, T: int, S: int = 0, block: int = 1024) -> Iterator[Tensor]:
        """The table in pieces [up to block, S], so that a long one never stands in memory."""
        S = S or T
        if T < 1 or S < T:
            raise ValueError(f"T = {T} queries are the last of S = {S} positions: 1 <= T <= S")
        for start in range(S - T, S, block):
            yield self(torch.arange(start, min(start + block, S))[:, None], torch.arange(S))

    def matrix(self, T: int, S: int = 0) -> Tensor:
        """[T, S] bool."""
        return torch.cat(list(self.rows(T, S)))

    def nnz(self, T: int, S: int = 0) -> int:
        """Pairs that may look: each costs 4 Dh operations a head in attention."""
        return sum(int(part.sum()) for part in self.rows(T, S))

    def blind(self, T: int, S: int = 0) -> Tensor:
        """The queries, counted from 0, that see no key at all."""
        return (~torch.cat([part.any(-1) for part in self.rows(T, S)])).nonzero().flatten()

    def blocks(self, T: int, block: int) -> Tensor:
        """[T / block, T / block] bool: the squares with any pair in them. Raises ValueError where block cuts one."""
        if block < 1 or T % block:
            raise ValueError(f"block = {block} does not divide T = {T}: pad the sequence, or choose one that does")
        return torch.cat([part.unflatten(1, (-1, block)).any(-1).any(0)[None] for part in self.rows(T, 0, block)])

    def __str__(self) -> str:
        lines = ("".join("■" if seen else "·" for seen in row) for row in self.matrix(24).tolist())
        return "\n".join([self.name, *lines])


def everything() -> Mask:
    return Mask(lambda q, k: (q >= 0) & (k >= 0), "everything")


def causal() -> Mask:
    return Mask(lambda q, k: k <= q, "causal")


def window(width: int, ahead: int = 0) -> Mask:
    """The last `width` positions, the query's own among them, and `ahead` later ones."""
    if width < 1 or ahead < 0:
        raise ValueError(f"window = {width}, ahead = {ahead}: a query sees itself, so a window is 1 or more")
    return Mask(lambda q, k: (q - k < width) & (k - q <= ahead), f"window({width})")


def sinks(n: int) -> Mask:
    """The first n positions, for every query; & causal() in a decoder."""
    return Mask(lambda q, k: (k < n) & (q >= 0), f"sinks({n})")


def hubs(tokens: Iterable[int]) -> Mask:
    """Global tokens: each sees all and is seen by all."""
    at = torch.tensor(sorted(set(tokens)), dtype=torch.long)
    return Mask(lambda q, k: torch.isin(q, at.to(q.device)) | torch.isin(k, at.to(k.device)), f"hubs({at.tolist()})")


def column(stride: int) -> Mask:
    """Keys a whole number of strides back, the query's own position among them."""
    if stride < 1:
        raise ValueError(f"stride = {stride}, but it counts positions: 1 or more; √T is usual")
    return Mask(lambda q, k: (k <= q) & ((q - k) % stride == 0), f"column({stride})")


def strided(stride: int) -> Mask:
    """The Sparse Transformer's two kinds of head, merged: a local one and a column one; section 4.3."""
    return Mask((window(stride) | column(stride)).allows, f"strided({stride})")


def dilated(segment: int, rate: int, offset: int = 0) -> Mask:
    """Within segments, the positions offset, offset + rate, … see each other; the rest see nothing."""
    if segment < 1 or rate < 1 or segment % rate:
        raise ValueError(f"segment = {segment}, rate = {rate}: the rate must divide the segment")
    chosen = lambda x: x % rate == offset % rate
    return Mask(lambda q, k: (q // segment == k // segment) & chosen(q) & chosen(k), f"dilated({segment}, {rate})")


def from_blocks(layout: Tensor, block: int) -> Mask:
    """layout [N, N] bool says which squares of `block` positions are open."""
    return Mask(lambda q, k: layout.to(q.device)[q // block, k // block], f"blocks({block})")


def big_bird(length: int, block: int, near: int = 3, random: int = 2, seed: int = 0) -> Mask:
    """Squares: the first and the last block global, `near` around the query's, and `random` others for each."""
    if block < 1 or length % block:
        raise ValueError(
            f"block = {block} does not divide length = {length}: pad the sequence, or choose one that does"
        )
    n = length // block
    i = torch.arange(n)
    layout = (i[:, None] - i).abs() <= near // 2
    layout[[0, -1]] = layout[:, [0, -1]] = True
    free = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)).masked_fill(layout, -1)
    drawn = free.topk(min(random, n)).indices
    return Mask(from_blocks(layout.scatter(1, drawn, True), block).allows, f"big_bird({length}, {block})")


def parallel_windows(lengths: Sequence[int], task: int) -> Mask:
    """Context windows of these lengths that do not see each other, then `task` tokens that see all; causal."""
    of = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, task]))
    part = lambda x: of.to(x.device)[x]
    sees = lambda q, k: (k <= q) & ((part(q) == part(k)) | (part(q) == len(lengths)))
    return Mask(sees, f"parallel_windows({list(lengths)})")


def parallel_positions(lengths: Sequence[int], task: int) -> Tensor:
    """Position ids to go with parallel_windows: each window starts at 0, the task follows the longest."""
    parts = [torch.arange(n) for n in lengths]
    return torch.cat([*parts, max(lengths, default=0) + torch.arange(task)])


def hops(mask: Tensor) -> Tensor:
    """[T, T] steps on the shortest path by which key j reaches query i, one step a layer; −1 where none does."""
    T = len(mask)
    steps, seen = torch.full((T, T), -1), torch.eye(T, dtype=torch.bool)
    for step in range(T):
        steps[seen & (steps < 0)] = step
        wider = seen | (mask.float() @ seen.float() > 0)
        if torch.equal(wider, seen):
            break
        seen = wider
    return steps
