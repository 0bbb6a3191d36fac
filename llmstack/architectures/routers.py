"""Which experts compute a token: the index set I and the gates g of M(x) = Σ_{i ∈ I(x)} g_i(x) f_i(x).

Every selection takes a router's logits h [G, N, E] and returns a Routing. G groups of N tokens are routed apart: where
experts have a capacity, tokens compete within a group, as they do within a device's batch.

    top_k          the k largest of p = softmax(h); Mixtral, DeepSeek, and with k = 1 and a capacity Switch
    noisy_top_k    with noise of learnt size on the logits                     Shazeer 2017, arXiv:1701.06538
    gshard         two experts, the second one drawn by its gate               Lepikh 2020, arXiv:2006.16668
    expert_choice  each expert takes the tokens that fit it best               Zhou 2022, arXiv:2202.09368
    base           the best assignment among the even ones                     Lewis 2021, arXiv:2103.16716
    hashed         a fixed table from token ids to experts                     Roller 2021, arXiv:2106.04426

What pulls the load even: a loss (`balance_loss`, `importance_loss`, `load_loss`), the selection itself (expert_choice,
base, hashed), or a correction of the scores that learns from the load alone (`rebalance`).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Routing:
    """M assignments of N tokens (all groups in one row) to E experts."""

    token: Tensor  # [M]
    expert: Tensor  # [M]
    gate: Tensor  # [M]
    wanted: Tensor  # [M + drops]: the experts of all assignments, before a capacity cut some
    scores: Tensor  # [N, E]: what the gates were taken from
    chance: Tensor | None = None  # [N, E]: of an expert to be among the top k under fresh noise

    @property
    def load(self) -> Tensor:
        """Tokens that each expert computes, [E]."""
        return self.expert.bincount(minlength=self.scores.shape[1])

    @property
    def asked(self) -> Tensor:
        """Tokens that wanted each expert, [E]."""
        return self.wanted.bincount(minlength=self.scores.shape[1])

    @property
    def dropped(self) -> float:
        """The share of the wanted assignments that found no room."""
        return 1 - len(self.token) / len(self.wanted) if len(self.wanted) else 0.0

    def matrix(self) -> Tensor:
        """The gates as [N, E], zero where a token does not go."""
        return torch.zeros_like(self.scores).index_put((self.token, self.expert), self.gate, accumulate=True)


def capacity_for(tokens: int, experts: int, k: int, factor: float) -> int:
    """Room of an expert: its even share of k · tokens assignments times a capacity factor, rounded up."""
    return math.ceil(round(factor * k * tokens / experts, 9))  # 1.1 · 100 / 10 is 11, not 11.000000000000002


def top_k(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    normalise: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    capacity: int | None = None,
    by_score: bool = False,
    keep: Tensor | None = None,
) -> Routing:
    """The k experts with the largest scores, gated by them.

    normalise: a token's gates sum to `scale`. bias [E] counts when experts are chosen and not in the gates
    (arXiv:2412.19437, eq. 16). groups: experts come only from the best `groups_kept` (ranked by their best expert, or
    with sigmoid scores by their best two; arXiv:2405.04434, section 2.2.2). by_score: those with the largest gates are
    placed first (V-MoE's batch priority, arXiv:2106.05974, section 4.1). keep [G, N]: tokens that are False, such as
    padding, go to no expert.
    """
    E = logits.shape[-1]
    if logits.ndim != 3 or not logits.is_floating_point():
        raise ValueError(f"logits are numbers [G, N, E], got {logits.dtype} {list(logits.shape)}; one group is x[None]")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score = {score!r}, but it must be 'softmax' or 'sigmoid'")
    if not 1 <= groups_kept <= groups or E % groups or E // groups * groups_kept < k <= E:
        raise ValueError(f"groups = {groups}, groups_kept = {groups_kept}: {E} experts divide, those kept hold k = {k}")
    if not 1 <= k <= E:
        raise ValueError(f"top_k = {k} experts a token, but there are {E}; choose 1 to {E}, or add experts")
    p = logits.softmax(-1) if score == "softmax" else logits.sigmoid()  # [G, N, E]
    wanted = p if bias is None else p + bias
    if groups > 1:
        grouped = wanted.unflatten(-1, (groups, -1))  # [G, N, groups, E / groups]
        best = grouped.topk(1 if score == "softmax" else min(2, E // groups)).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(groups_kept).indices, True)
        wanted = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    gate, expert = wanted.topk(k)  # [G, N, k]
    if wanted is not p:
        gate = p.gather(-1, expert)
    if normalise:
        gate = gate / (gate.sum(-1, keepdim=True) + 1e-20)
    if scale != 1.0:
        gate = gate * scale
    return place(p, expert, gate, capacity, by_score, None if keep is None else keep[..., None].expand_as(expert))


def place(
    scores: Tensor,
    expert: Tensor,
    gate: Tensor,
    capacity: int | None = None,
    by_score: bool = False,
    keep: Tensor | None = None,
) -> Routing:
    """Put choices [G, N, k] into experts with room for `capacity` tokens of a group; None: room for all.

    All first choices go before all second ones, tokens in their order or by_score. keep: False withdraws a choice.
    """
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity = {capacity}, but an expert has room for 0 tokens (all are dropped) or more")
    G, N, E = scores.shape
    token = torch.arange(G * N, device=scores.device)
    if capacity is None and keep is None:
        expert = expert.reshape(-1)
        return Routing(token.repeat_interleave(gate.shape[-1]), expert, gate.reshape(-1), expert, scores.flatten(0, 1))
    token = token.view(G, N, 1).expand_as(expert)
    if by_score:
        first = gate.max(-1, keepdim=True).values.argsort(dim=1, descending=True, stable=True).expand_as(expert)
        token, expert, gate = (y.gather(1, first) for y in (token, expert, gate))
        keep = None if keep is None else keep.gather(1, first)
    row = lambda y: y.movedim(-1, 0).reshape(-1)  # [k · G · N]
    token, expert, gate = row(token), row(expert), row(gate)
    if keep is not None:
        token, expert, gate = (y[row(keep)] for y in (token, expert, gate))
    wanted = expert
    if capacity is not None:
        fits = _rank_in(token.div(N, rounding_mode="floor") * E + expert, G * E) < capacity
        token, expert, gate = token[fits], expert[fits], gate[fits]
    return Routing(token, expert, gate, wanted, scores.flatten(0, 1))


def _rank_in(bins: Tensor, n: int) -> Tensor:
    """How many of bins [M] came into the same bin before."""
    order, counts = bins.argsort(stable=True), bins.bincount(minlength=n)
    start = counts.cumsum(0) - counts
    rank = torch.empty_like(bins)
    rank[order] = torch.arange(len(bins), device=bins.device) - start[bins[order]]
    return rank


def noisy_top_k(logits: Tensor, k: int, rng: torch.Generator | None = None, training: bool = True) -> Routing:
    """Top k of h + ε · softplus(s), ε standard normal. logits [G, N, 2 E] hold h and s (arXiv:1701.06538, eq. 3-5)."""
    clean, spread = logits.chunk(2, -1)
    spread = torch.nn.functional.softplus(spread)
    noise = torch.randn(clean.shape, generator=rng, dtype=clean.dtype).to(clean.device)
    noisy = clean + noise * spread if training else clean
    routing = top_k(noisy, k)
    routing.chance = chance_of_top_k(clean, noisy, spread, k).flatten(0, 1)
    return routing


def chance_of_top_k(clean: Tensor, noisy: Tensor, spread: Tensor, k: int) -> Tensor:
    """P(expert i is among the top k | the others' noise stays), smooth in the logits (arXiv:1701.06538, eq. 8-9)."""
    if k == clean.shape[-1]:
        return torch.ones_like(clean)
    best = noisy.topk(k + 1).values
    inside = (
        noisy >= best[..., k - 1 : k]
    )  # those have to stay above the first one outside, the others to pass the k-th
    bar = torch.where(inside, best[..., k : k + 1], best[..., k - 1 : k])
    return torch.special.ndtr((clean - bar) / spread)


def gshard(logits: Tensor, capacity: int | None = None, rng: torch.Generator | None = None) -> Routing:
    """Top 2; with an rng the second is kept with chance min(1, 2 g₂), as a light one is seldom worth its room
    (arXiv:2006.16668, algorithm 1)."""
    p = logits.softmax(-1)
    value, expert = p.topk(2)
    gate = value / value.sum(-1, keepdim=True)
    keep = None
    if rng is not None:
        keep = torch.rand(gate.shape, generator=rng).to(gate) < torch.stack(
            [torch.ones_like(value[..., 0]), 2 * gate[..., 1]], -1
        )
    return place(p, expert, gate, capacity, keep=keep)


def expert_choice(logits: Tensor, capacity: int) -> Routing:
    """Each expert takes the `capacity` tokens of a group with its largest softmax scores: even by construction.

    A token may get no expert or several, and its choice depends on the tokens after it, so no decoder can use it as is.
    """
    if capacity < 0:
        raise ValueError(f"capacity = {capacity}, but an expert takes 0 tokens (all are dropped) or more")
    G, N, E = logits.shape
    p = logits.softmax(-1)
    gate, token = p.transpose(1, 2).topk(min(capacity, N))  # [G, E, capacity]
    token = token + N * torch.arange(G, device=p.device)[:, None, None]
    expert = torch.arange(E, device=p.device)[:, None].expand_as(token).reshape(-1)
    return Routing(token.reshape(-1), expert, gate.reshape(-1), expert, p.flatten(0, 1))


def base(logits: Tensor, training: bool = True) -> Routing:
    """One expert a token with the largest Σ h among assignments that give no expert more than ⌈N / E⌉ tokens; gates
    are sigmoid(h). Outside of training each token takes its best (arXiv:2103.16716, section 3)."""
    from scipy.optimize import linear_sum_assignment

    G, N, E = logits.shape
    if not training:
        expert = logits.argmax(-1, keepdim=True)
    else:
        copies = -(-N // E)
        price = -np.repeat(logits.detach().double().cpu().numpy(), copies, axis=-1)  # [G, N, E · copies]
        slots = np.array([linear_sum_assignment(p)[1] for p in price], int).reshape(G, N)
        expert = torch.from_numpy(slots // copies).to(logits.device)[..., None]
    return place(logits.sigmoid(), expert, logits.sigmoid().gather(-1, expert))


def hashed(logits: Tensor, ids: Tensor, table: Tensor) -> Routing:
    """The expert that table [V] gives each of ids [G, N], whatever the logits say; gates are 1."""
    expert, E = table[ids][..., None], logits.shape[-1]
    if ids.shape != logits.shape[:-1] or ((expert < 0) | (expert >= E)).any():
        raise ValueError(f"ids {list(ids.shape)} must be {list(logits.shape[:-1])}, table hold experts 0 to {E - 1}")
    return place(torch.ones_like(logits) / logits.shape[-1], expert, torch.ones_like(expert, dtype=logits.dtype))


def balanced_table(counts: Tensor, experts: int) -> Tensor:
    """A hash table [V] for words with those counts: from the most frequent on, each to the emptiest expert
    (arXiv:2106.04426, section 3.1)."""
    heap = [(0.0, e) for e in range(experts)]
    table = torch.empty(len(counts), dtype=torch.long)
    for word in counts.argsort(descending=True, stable=True).tolist():
        load, expert = heap[0]
        table[word] = expert
        heapq.heapreplace(heap, (load + float(counts[word]), expert))
    return table


def balance_loss(routing: Routing) -> Tensor:
    """E Σ f_i P_i: the share of choices that fall on an expert, before drops, times its mean score. 1 when even; times
    α it is Switch's loss (arXiv:2101.03961, eq. 4)."""
    share = routing.asked / max(len(routing.wanted), 1)
    mean = (routing.scores / routing.scores.sum(-1, keepdim=True)).mean(0)
    return len(share) * (share * mean).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Mean of logsumexp(h)²: keeps logits small, where rounding hurts little (ST-MoE, arXiv:2202.08906, eq. 5)."""
    return logits.logsumexp(-1).square().mean()


def cv_squared(x: Tensor) -> Tensor:
    """(Standard deviation over mean)² of a load [E]: 0 when even."""
    return x.var(unbiased=False) / x.mean().square().clamp(min=torch.finfo(x.dtype).tiny)


def importance_loss(routing: Routing) -> Tensor:
    """How uneven the sums of the gates are (arXiv:1701.06538, eq. 6-7, without its weight)."""
    return cv_squared(routing.matrix().sum(0))


def load_loss(routing: Routing) -> Tensor:
    """How uneven the expected loads are, which noise makes smooth (arXiv:1701.06538, eq. 10-11)."""
    return cv_squared(routing.chance.sum(0))


@torch.no_grad()
def rebalance(bias: Tensor, load: Tensor, speed: float = 1e-3) -> Tensor:
    """Lower the correction of experts with more than the mean load and raise the others', in place; no gradient knows
    (arXiv:2412.19437, section 2.1.2)."""
    return bias.add_(torch.sign(load.float().mean() - load).to(bias), alpha=speed)
