"""Mixtures of experts in place of a feed-forward network: M(x) = Σ_{i ∈ I(x)} g_i(x) f_i(x).

    MoE        the experts that a selection of routers.py names compute a token     Mixtral, Switch, DeepSeek …
    SoftMoE    each expert computes mixtures of all tokens                          Puigcerver 2023, arXiv:2308.00951
    MergedMoE  one expert a segment, whose matrices are mixtures of all experts'    Lory (Zhong 2024), arXiv:2405.03133

Operations: a token passes k experts whatever E is, and the router's 2 D E. Bytes: all E experts have to be stored, and
those that any token of a batch chose have to be read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from llmstack.architectures.routers import Routing, top_k
from llmstack.config import GATED_ACTIVATIONS, ModelConfig
from llmstack.ops.activations import ACTIVATIONS_TORCH
from llmstack.ops.glu import GLU_TORCH


class GroupedProduct(torch.autograd.Function):
    """Rows of x [M, D] times the matrix of their expert: spans holds (expert, first row, last row + 1), w is [E, F, D].
    -> [M, F].

    Autograd would make of the same loop a gradient of all experts for each one of them; here there is one for all.
    """

    @staticmethod
    def product(x: Tensor, w: Tensor, spans: list[tuple[int, int, int]]) -> Tensor:
        out = x.new_empty(len(x), w.shape[1])
        for e, start, stop in spans:
            torch.mm(x[start:stop], w[e].mT, out=out[start:stop])
        return out

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, spans: list[tuple[int, int, int]]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.spans = spans
        return GroupedProduct.product(x, w, spans)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        dx, dw = (torch.empty_like(y) if needed else None for y, needed in zip((x, w), ctx.needs_input_grad))
        if dw is not None:
            for idle in set(range(len(w))) - {e for e, *_ in ctx.spans}:
                dw[idle] = 0
        for e, start, stop in ctx.spans:
            if dx is not None:
                torch.mm(dout[start:stop], w[e], out=dx[start:stop])
            if dw is not None:
                torch.mm(dout[start:stop].mT, x[start:stop], out=dw[e])
        return dx, dw, None


class Experts(nn.Module):
    """E feed-forward networks D -> F -> D, stacked: up [E, F, D], down [E, D, F] and, where gated, gate [E, F, D]."""

    def __init__(self, n: int, d_model: int, width: int, activation: str = "swiglu"):
        super().__init__()
        gated = activation in GATED_ACTIVATIONS
        self.act = (GLU_TORCH if gated else ACTIVATIONS_TORCH)[activation]
        self.gate = nn.Parameter(torch.empty(n, width, d_model)) if gated else None
        self.up = nn.Parameter(torch.empty(n, width, d_model))
        self.down = nn.Parameter(torch.empty(n, d_model, width))
        for matrix in self.matrices():
            nn.init.normal_(matrix, std=matrix.shape[-1] ** -0.5)

    def matrices(self) -> list[Tensor]:
        return [m for m in (self.gate, self.up, self.down) if m is not None]

    def run(self, x: Tensor, *matrices: Tensor) -> Tensor:
        """One network on x [N, D], or one each on x [E, N, D]."""
        *into, down = matrices
        return self.act(*(x @ m.mT for m in into)) @ down.mT

    def forward(self, x: Tensor, load: Tensor) -> Tensor:
        """x [M, D]: the first load[0] rows are expert 0's, and so on. One product a matrix for each expert in use."""
        ends = load.cumsum(0).tolist()
        spans = [(e, start, stop) for e, (start, stop) in enumerate(zip([0, *ends], ends)) if start < stop]
        *into, down = self.matrices()
        product = GroupedProduct.apply if torch.is_grad_enabled() else GroupedProduct.product
        inner = self.act(*(product(x, m, spans) for m in into))  # [M, F]
        return product(inner, down, spans)

    def slots(self, x: Tensor) -> Tensor:
        """x [E, C, D]: as many rows for every expert. -> [E, C, D]."""
        return self.run(x, *self.matrices())

    def merged(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [G, N, D] through the network whose matrices are Σ_e weights[g, e] · expert e's. -> [G, N, D]."""
        return self.run(x, *(torch.einsum("ge,eij->gij", weights, m) for m in self.matrices()))


class MoE(nn.Module):
    """[B, T, D] -> [B, T, D]. `select(logits [B, T, E]) -> Routing` chooses; `shared` computes every token besides.

    A token that no expert takes gets zeros: its residual passes unchanged. `last` is the newest Routing, for losses and
    for looking at. outputs: logits for each expert (2 for noisy_top_k). correction: adds scores of its own when experts
    are chosen, moved by routers.rebalance and never by a gradient.
    """

    def __init__(
        self,
        experts: Experts,
        select: Callable[..., Routing],
        shared: nn.Module | None = None,
        outputs: int = 1,
        correction: bool = False,
        skips_padding: bool = False,
    ):
        super().__init__()
        n, _, d_model = experts.up.shape
        self.router = nn.Linear(d_model, n * outputs, bias=False)
        self.correction = nn.Parameter(torch.zeros(n), requires_grad=False) if correction else None
        self.experts, self.select, self.shared = experts, select, shared
        self.skips_padding = skips_padding
        self.last: Routing | None = None

    @classmethod
    def of(cls, config: ModelConfig, shared: nn.Module | None = None) -> MoE:
        """The layer that a config describes. A capacity counts within a sequence."""
        c = config
        how = dict(score=c.router_score, normalise=c.router_norm, scale=c.router_scale, groups=c.router_groups)
        how |= dict(groups_kept=c.router_groups_kept, capacity=c.expert_capacity or None)
        experts = Experts(c.n_experts, c.d_model, c.d_expert, c.activation)
        select = partial(top_k, k=c.top_k, **how)
        return cls(experts, select, shared, correction=c.router_bias, skips_padding=c.expert_capacity > 0)

    def __getstate__(self) -> dict:
        """For copies and pickle: `last` belongs to a batch, and after training holds its graph."""
        return {**super().__getstate__(), "last": None}

    def logits(self, x: Tensor) -> Tensor:
        """h [..., E] in fp32 at least: a rounded score sends a token elsewhere (arXiv:2101.03961, section 2.4)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return nn.functional.linear(x.to(wide), self.router.weight.to(wide))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """real [B, T] is False at padding, which takes no room where `skips_padding`: where `select` knows `keep`."""
        how = {} if self.correction is None else {"bias": self.correction}
        if real is not None and self.skips_padding:
            how["keep"] = real
        self.last = self.select(self.logits(x), **how)
        out = self.dispatch(x.reshape(-1, x.shape[-1]), self.last).view_as(x)
        return out if self.shared is None else out + self.shared(x)

    def dispatch(self, x: Tensor, routing: Routing) -> Tensor:
        """Rows of x [N, D] sorted by expert, computed, weighed, and added up where they came from."""
        order = routing.expert.argsort(stable=True)
        token, gate = routing.token[order], routing.gate[order].to(x.dtype)
        y = self.experts(x.index_select(0, token), routing.load) * gate[:, None]  # [M, D]
        return y.new_zeros(len(x), y.shape[1]).index_add(0, token, y)


class SoftMoE(nn.Module):
    """Every slot is a mean of all N tokens, every token gets a mean of all slots: nothing is dropped, nothing chosen.

        logits = X Φ [N, E · slots]; D = softmax over tokens; C = softmax over slots; Y = C f(Dᵀ X)

    [B, N, D] -> [B, N, D]. Each slot sees all tokens, so a causal model cannot use it.
    """

    def __init__(self, experts: Experts, slots: int = 1):
        super().__init__()
        n, _, d_model = experts.up.shape
        self.experts = experts
        self.phi = nn.Parameter(torch.randn(d_model, n, slots) * d_model**-0.5)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Dispatch and combination weights [B, N, E, slots]: the first sum to 1 over N, the second over E and slots."""
        logits = torch.einsum("bnd,des->bnes", x, self.phi)
        return logits.softmax(1), logits.flatten(2).softmax(-1).view_as(logits)

    def forward(self, x: Tensor) -> Tensor:
        dispatch, combine = self.weights(x)
        mixed = torch.einsum("bnes,bnd->ebsd", dispatch, x)  # [E, B, slots, D]
        y = self.experts.slots(mixed.flatten(1, 2)).view_as(mixed)
        return torch.einsum("bnes,ebsd->bnd", combine, y)


class MergedMoE(nn.Module):
    """Lory: the matrices for a segment are Σ_i p_i W_i, with p from the mean of the segment before it, so that no token
    is computed with what comes later. The first segment has only itself to look at; no gradient goes that way.

    [B, T, D] -> [B, T, D], T = any number of segments of `segment` tokens, the last one possibly shorter.
    """

    def __init__(self, experts: Experts, segment: int):
        super().__init__()
        n, _, d_model = experts.up.shape
        self.router = nn.Linear(d_model, n, bias=False)
        self.experts, self.segment = experts, segment

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        if not T:
            return x
        parts = nn.functional.pad(x, (0, 0, 0, -T % self.segment)).unflatten(1, (-1, self.segment))  # [B, n, seg, D]
        first = x[:, : self.segment].mean(1, keepdim=True).detach()
        before = torch.cat([first, parts[:, :-1].mean(2)], 1)  # [B, n, D]
        weights = self.router(before).softmax(-1)  # [B, n, E]
        y = self.experts.merged(parts.flatten(0, 1), weights.flatten(0, 1))
        return y.view_as(parts).flatten(1, 2)[:, :T]
