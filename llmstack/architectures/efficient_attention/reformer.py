"""The Reformer: attention within buckets of similar vectors, and layers that need no stored activations.
Kitaev et al. 2020, arXiv:2001.04451.

Queries and keys are the same vectors, keys at unit length. A random rotation R throws similar vectors into the same
bucket, argmax [xR; −xR]. Sorted by bucket and cut into chunks, a query looks within its bucket in its own chunk and the
one before. Work: rounds × T × 2 chunk pairs, a sort, and the rotations, as much as rounds × T × n_buckets / 4 pairs:
for very many buckets the paper makes a bucket's number of two smaller hashes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmstack.ops.merge import attention_lse, merge_torch

SELF = -1e5  # a token looks at itself only where it may see nothing else


def lsh_buckets(x: Tensor, n_buckets: int, rounds: int = 1, seed: int = 0) -> Tensor:
    """x [B, H, T, Dh] -> bucket numbers [rounds, B, H, T]. Raises ValueError on an odd number: they are ± pairs."""
    if n_buckets < 1 or rounds < 1 or (n_buckets > 1 and n_buckets % 2):
        raise ValueError(
            f"n_buckets = {n_buckets}, rounds = {rounds}: 1 or an even number of buckets, 1 or more rounds"
        )
    rng = torch.Generator().manual_seed(seed)
    R = torch.randn(rounds, x.shape[-1], n_buckets // 2, generator=rng).to(x)  # [rounds, Dh, n_buckets / 2]
    turned = x @ R[:, None, None]  # [rounds, B, H, T, n_buckets / 2]
    return torch.cat([turned, -turned], -1).argmax(-1) if n_buckets > 1 else turned.new_zeros(turned.shape[:-1]).long()


def shared_buckets(buckets: Tensor) -> Tensor:
    """[B, H, T, T]: the pairs that share a bucket in one round or more."""
    return (buckets[..., :, None] == buckets[..., None, :]).any(0)


def recall(qk: Tensor, seen: Tensor, top: int, causal: bool = True) -> float:
    """Share of each query's `top` heaviest keys, itself apart, that are among those seen [B, H, T, T]."""
    scores = qk @ nn.functional.normalize(qk, dim=-1).transpose(-1, -2)  # [B, H, T, T]
    T = scores.shape[-1]
    scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(-1 if causal else T), -torch.inf)
    scores = scores.masked_fill(torch.eye(T, dtype=torch.bool), -torch.inf)
    heaviest = scores.topk(top)
    wanted = heaviest.values > -torch.inf
    return float(seen.gather(-1, heaviest.indices)[wanted].float().mean())


def lsh_attention(
    qk: Tensor, v: Tensor, n_buckets: int, rounds: int = 1, chunk: int = 0, causal: bool = False, seed: int = 0
) -> Tensor:
    """Attention of shared queries and keys qk [B, H, T, Dh] over v within buckets, [B, H, T, Dh].

    chunk 0: two mean buckets, as in the paper. A pair that meets in several rounds counts once (equation 6), so
    that the result is softmax over all keys met. Raises ValueError where chunk does not divide T.
    """
    T = qk.shape[2]
    chunk = chunk or min(T, max(1, 2 * T // n_buckets))
    if chunk < 1 or T % chunk:
        raise ValueError(f"chunk = {chunk} does not divide T = {T}: pad the sequence, or choose one that does")
    k, n = nn.functional.normalize(qk, dim=-1), T // chunk
    buckets = lsh_buckets(qk, n_buckets, rounds, seed)  # [rounds, B, H, T]
    orders = torch.argsort(buckets, dim=-1, stable=True)  # by bucket, then by position
    places = torch.argsort(orders, -1) // chunk  # the chunk of each token in each round
    parts = []
    for r, order in enumerate(orders):  # [B, H, T]
        rows = lambda x: x.gather(2, order[..., None].expand(x.shape)).unflatten(2, (n, chunk))
        pair = lambda x: torch.cat([x.roll(1, 2), x], 3) if n > 1 else x  # with the chunk before
        at = order.unflatten(-1, (n, chunk))  # [B, H, n, chunk]: positions
        query, key = at[..., :, None], pair(at)[..., None, :]  # [B, H, n, chunk, 1], [B, H, n, 1, 2 chunk]
        meets = torch.stack([_meet(query, key, *tags) for tags in zip(buckets, places)])  # [rounds, ...]
        seen = meets[r] & (key <= query) if causal else meets[r]
        bias = SELF * (query == key) - meets.sum(0).clamp(min=1).log()
        parts.append(_undo(order, *attention_lse(rows(qk), pair(rows(k)), pair(rows(v)), seen, bias)))
    return merge_torch(*zip(*parts))


def _meet(query: Tensor, key: Tensor, bucket: Tensor, place: Tensor) -> Tensor:
    """Which pairs of positions share a round's bucket, the key in the query's chunk or the one before."""
    tag = lambda x, at: x.gather(2, at.flatten(2)).view(at.shape)
    behind = tag(place, query) - tag(place, key)
    return (tag(bucket, query) == tag(bucket, key)) & ((behind == 0) | (behind == 1))


def _undo(order: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """From sorted chunks back to positions."""
    back = torch.argsort(order, -1)
    out, lse = out.flatten(2, 3), lse.flatten(2, 3)
    return out.gather(2, back[..., None].expand(out.shape)), lse.gather(2, back)


class Reversible(nn.Module):
    """Layers y1 = x1 + f(x2), y2 = x2 + g(y1) whose backward recovers the inputs from the outputs, last layer first:
    x2 = y2 − g(y1), x1 = y1 − f(x2). So a stack of any depth keeps two activations (section 3), for one forward more.

    pairs: modules (f, g), such as attention and FFN, without randomness of their own. x1, x2 [..., D] -> y1, y2.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module]]):
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        return _Reverse.apply(x1, x2, self.pairs, *self.pairs.parameters())

    def inverse(self, y1: Tensor, y2: Tensor) -> tuple[Tensor, Tensor]:
        for f, g in reversed(self.pairs):
            y2 = y2 - g(y1)
            y1 = y1 - f(y2)
        return y1, y2


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x1: Tensor, x2: Tensor, layers: nn.ModuleList, *parameters: Tensor):
        for f, g in layers:  # autograd records nothing in here
            x1 = x1 + f(x2)
            x2 = x2 + g(x1)
        ctx.layers, ctx.parameters = layers, parameters
        ctx.save_for_backward(x1, x2)
        return x1, x2

    @staticmethod
    def backward(ctx, d1: Tensor, d2: Tensor):
        y1, y2 = ctx.saved_tensors
        total = {id(p): torch.zeros_like(p) for p in ctx.parameters}

        def back(f: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
            """f(x), and the gradient of x; those of f's parameters are added up."""
            own = [p for p in f.parameters() if p.requires_grad]
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = f(x)
            dx, *rest = torch.autograd.grad(y, [x, *own], dy, materialize_grads=True)
            for p, grad in zip(own, rest):
                total[id(p)] += grad
            return y.detach(), dx

        for f, g in reversed(ctx.layers):
            y, dx = back(g, y1, d2)
            y2, d1 = y2 - y, d1 + dx
            y, dx = back(f, y2, d1)
            y1, d2 = y1 - y, d2 + dx
        return d1, d2, None, *(total[id(p)] for p in ctx.parameters)
