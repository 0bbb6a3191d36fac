"""What has been made of the expert layer: fewer layers for a token, shared or frozen routers, experts out of a trained
FFN or out of whole models, experts in the order in which a small chip wants them.

    MixtureOfDepths  tokens that a block passes over             Raposo 2024, arXiv:2404.02258
    share            one set of experts for all layers           WideNet, Xue 2021, arXiv:2107.11817
    StableRouter     learn the routing, then freeze it           StableMoE, Dai 2022, arXiv:2204.08396
    MoEfied          a trained ReLU FFN split into experts       Zhang 2021, arXiv:2110.01786
    Fusion           whole models as experts                     FoE, Wang 2023, arXiv:2310.01542
    TaskMoE, Buffer  a router a task; experts one after another  M³ViT, Fan 2022, arXiv:2210.14793
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from llmstack.architectures.moe import Experts, MoE
from llmstack.architectures.routers import Routing, place

if TYPE_CHECKING:
    from llmstack.architectures.layers import FeedForward, Pass


class MixtureOfDepths(nn.Module):
    """A block for the ⌈capacity · T⌉ tokens with the largest scores; the others pass unchanged. [B, T, D] -> [B, T, D].

    The block sees a shorter text, with the positions that its tokens had. gated: what it adds is multiplied by the
    score, which is how the router learns. Which tokens are chosen depends on the whole text, as with expert choice.
    """

    def __init__(self, block: nn.Module, d_model: int, capacity: float, gated: bool = True):
        super().__init__()
        if not 0 <= capacity <= 1:
            raise ValueError(f"capacity = {capacity}, but it is the share of tokens that take part, 0 to 1")
        self.block, self.capacity, self.gated = block, capacity, gated
        self.router = nn.Linear(d_model, 1, bias=False)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        if now.mask is not None or now.bias is not None or now.cache is not None:
            raise ValueError("mixture of depths takes whole texts without padding, bias or cache")
        B, T, D = x.shape
        score = self.router(x)[..., 0]  # [B, T]
        chosen = score.topk(math.ceil(self.capacity * T)).indices.sort().values  # [B, C]
        if not chosen.shape[1]:
            return x
        pick = lambda y: y.expand(B, -1, -1).gather(1, chosen[..., None].expand(-1, -1, y.shape[-1]))
        rotation = None if now.rotation is None else tuple(map(pick, now.rotation))
        part = pick(x)
        change = self.block(part, type(now)(causal=now.causal, rotation=rotation)) - part
        if self.gated:
            change = change * score.gather(1, chosen)[..., None]
        return x.scatter_add(1, chosen[..., None].expand_as(change), change)


def share(blocks: nn.ModuleList) -> None:
    """Let all blocks use the first one's attention and experts. Each keeps its norms, so that the same experts see, and
    route, every layer's tokens in its own way."""
    for block in list(blocks)[1:]:
        block.attention, block.ffn = blocks[0].attention, blocks[0].ffn


class StableRouter(nn.Module):
    """The `select` of a MoE in two stages. First tokens go to their best expert (train with balance_loss) while a small
    router, which sees only the word, learns to foretell it: add `distilling` to the loss. After freeze() the small one
    decides, so that a word's expert never changes again; gates, sigmoid(h), go on learning.

    Set `ids` [G, N] before each pass.
    """

    def __init__(self, vocab_size: int, experts: int, width: int = 16):
        super().__init__()
        self.words, self.centres = nn.Embedding(vocab_size, width), nn.Linear(width, experts, bias=False)
        self.frozen, self.ids, self.distilling = False, None, None

    def freeze(self) -> None:
        self.frozen = True
        self.requires_grad_(False)

    def forward(self, logits: Tensor) -> Routing:
        small, best = self.centres(self.words(self.ids)), logits.argmax(-1)
        if not self.frozen:
            self.distilling = nn.functional.cross_entropy(small.flatten(0, 1), best.flatten())
        expert = (small.argmax(-1) if self.frozen else best)[..., None]
        return place(logits.softmax(-1), expert, logits.sigmoid().gather(-1, expert))


def fluctuation(before: Routing, after: Routing) -> float:
    """The share of tokens whose experts are not the same in two routings of the same tokens."""
    return float(((before.matrix() != 0) != (after.matrix() != 0)).any(-1).float().mean())


def balanced_k_means(points: Tensor, n: int, rounds: int = 10, seed: int = 0) -> Tensor:
    """Labels [F] of points [F, D]: n clusters of F / n each, by assignment to the centres and new centres in turn."""
    from scipy.optimize import linear_sum_assignment

    if n < 1 or rounds < 1 or len(points) % n:
        raise ValueError(f"{len(points)} neurons do not divide into {n} experts; choose a divisor")
    size, rng = len(points) // n, torch.Generator().manual_seed(seed)
    centres = points[torch.randperm(len(points), generator=rng)[:n]]
    for _ in range(rounds):
        price = torch.cdist(points, centres).square().double().numpy()  # [F, n]
        label = torch.from_numpy(linear_sum_assignment(np.repeat(price, size, axis=1))[1] // size)
        centres = torch.stack([points[label == e].mean(0) for e in range(n)])
    return label


class MoEfied(MoE):
    """A trained ReLU FFN as n experts of which a token uses `k`: neurons that fire together on inputs `seen` [N, D], or
    without any, that have like weights, stand in one expert. With k = n it is the FFN. [..., D] -> [..., D].

    Until learn_router() the choice is the ideal one, the experts whose neurons fire most, which has to compute all
    neurons first. Then `predict`, one linear map [..., D] -> [..., n], chooses in its place and saves the work.
    Raises ValueError on other FFNs.
    """

    @torch.no_grad()
    def __init__(self, ffn: FeedForward, n: int, k: int, seen: Tensor | None = None, seed: int = 0):
        if ffn.gate is not None or ffn.act(torch.tensor(-1.0)) != 0:
            raise ValueError("MoEfication takes a plain ReLU FFN: of no other do silent neurons add nothing")
        if not 1 <= k <= n:
            raise ValueError(f"k = {k} experts a token, but there are {n}; choose 1 to {n}")
        width, d_model = ffn.up.weight.shape
        like = ffn.up.weight if seen is None else nn.functional.normalize(ffn.up(seen).relu().T)  # [F, D or N]
        order = balanced_k_means(like, n, seed=seed).argsort(stable=True)
        bias = ffn.up.weight.new_zeros(width) if ffn.up.bias is None else ffn.up.bias
        # the bias is the weight of a 1 behind x
        experts = Experts(n, d_model + 1, width // n, "relu").to(ffn.up.weight)
        experts.up.copy_(torch.cat([ffn.up.weight, bias[:, None]], 1)[order].unflatten(0, (n, -1)))
        experts.down = nn.Parameter(ffn.down.weight[:, order].unflatten(1, (n, -1)).transpose(0, 1).contiguous())
        super().__init__(experts, place)
        self.k, self.bias, self.router, self.predict = k, ffn.down.bias, None, None

    def activity(self, x: Tensor) -> Tensor:
        """How much each expert's neurons fire, [..., n]: Σ relu(x U + b)."""
        up = self.experts.up
        return (torch.einsum("...d,efd->...ef", x, up[..., :-1]) + up[..., -1]).relu().sum(-1)

    def learn_router(self, seen: Tensor, steps: int = 300, lr: float = 3e-3, batch: int = 512, seed: int = 0) -> None:
        """Train a router on inputs seen [N, D] to foretell each expert's share of the activity, by cross-entropy, with
        the experts as they are. It starts at the mean neuron of each expert."""
        with torch.no_grad():
            fired = self.activity(seen)  # [N, n]
            share = fired / fired.sum(-1, keepdim=True).clamp_min(torch.finfo(fired.dtype).tiny)
            centre = self.experts.up.mean(1)  # [n, D + 1], the bias behind the weights
            router = nn.Linear(seen.shape[-1], len(centre)).to(centre)
            router.weight.copy_(centre[:, :-1])
            router.bias.copy_(centre[:, -1])
        optimizer, rng = torch.optim.Adam(router.parameters(), lr), torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = torch.randint(len(seen), (batch,), generator=rng)
            optimizer.zero_grad()
            nn.functional.cross_entropy(router(seen[rows]), share[rows]).backward()
            optimizer.step()
        self.predict = router.requires_grad_(False)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [.., D] -> [.., D]. real is what a block hands to its experts: here padding takes no room from others."""
        rows = x.reshape(1, -1, x.shape[-1])  # [1, N, D]
        score = (self.predict or self.activity)(rows)
        expert = score.topk(self.k).indices
        self.last = place(score, expert, torch.ones_like(expert, dtype=x.dtype))
        out = self.dispatch(nn.functional.pad(rows[0], (0, 1), value=1.0), self.last).view_as(x)
        return out if self.bias is None else out + self.bias


class Fusion(nn.Module):
    """Models trained apart, each for a domain of its own, stay as they are; a small network sees all their outputs
    [B, C] side by side and gives the fused ones."""

    def __init__(self, experts: Sequence[Callable[[Tensor], Tensor]], classes: int, width: int = 64):
        super().__init__()
        self.experts = list(experts)
        self.fuser = nn.Sequential(nn.Linear(len(experts) * classes, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            each = torch.cat([expert(x).softmax(-1) for expert in self.experts], -1)  # [B, experts · C]
        return self.fuser(each)


class TaskMoE(MoE):
    """One set of experts, and a router for each task; `task` says which one is at work."""

    def __init__(self, experts: Experts, select: Callable[..., Routing], tasks: int):
        super().__init__(experts, select)
        self.routers, self.task = (
            nn.ModuleList(nn.Linear(*self.router.weight.shape[::-1], bias=False) for _ in range(tasks)),
            0,
        )
        self.router = None

    def logits(self, x: Tensor) -> Tensor:
        return self.routers[self.task](x)


class Buffer:
    """A chip with room for few experts: counts how often one has to be fetched, and how many it held at most."""

    def __init__(self, experts: Experts, room: int):
        self.experts, self.room, self.loads, self.peak = experts, room, 0, 0
        self.held: OrderedDict[int, None] = OrderedDict()

    def run(self, expert: int, x: Tensor) -> Tensor:
        if expert not in self.held:
            self.loads += 1
            if len(self.held) == self.room:
                self.held.popitem(last=False)
        self.held[expert] = None
        self.held.move_to_end(expert)
        self.peak = max(self.peak, len(self.held))
        return self.experts.run(x, *(m[expert] for m in self.experts.matrices()))

    def compute(self, x: Tensor, routing: Routing, by: str) -> Tensor:
        """What MoE.dispatch gives for x [N, D]: by "token", one after the other, or by "expert", each with all its
        tokens (the reordering of M³ViT)."""
        out, order = torch.zeros_like(x), (routing.token if by == "token" else routing.expert).argsort(stable=True)
        size = [1] * len(order) if by == "token" else [n for n in routing.load.tolist() if n]
        for part in order.split(size):
            token = routing.token[part]
            y = self.run(int(routing.expert[part[0]]), x[token]) * routing.gate[part, None]
            out = out.index_add(0, token, y)
        return out
