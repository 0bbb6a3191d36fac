"""Adapters: small bottlenecks behind or beside the sublayers of a frozen model.

    serial      y = f(x);  y + A(y)          Houlsby et al. 2019, arXiv:1902.00751, figure 2
    parallel    f(x) + s A(x)                He et al. 2021, arXiv:2110.04366, table 1

with A(x) = U relu(D x + d) + u, D [m, h], U [h, m]. U and u start at zero, so the prepared model is the base model. Two
adapters a block hold 2 L (2 h m + m + h) parameters. Being nonlinear, they stay after training: nothing merges.
Houlsby et al. also train the norms; He et al. put the parallel one at the FFN alone, `where=("ffn",)`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from llmstack.architectures.layers import Block
from llmstack.execution.finetune.base import Tuned, freeze


class Adapted(nn.Module):
    """A sublayer f of width h with its adapter, called as f is. D is drawn with variance 1 / h."""

    def __init__(self, base: nn.Module, h: int, m: int, scale: float, beside: bool, rng: torch.Generator):
        super().__init__()
        self.scale, self.beside, like = scale, beside, next(base.parameters())
        self.base, zeros = base, lambda *shape: nn.Parameter(torch.zeros(shape).to(like))
        self.down = nn.Parameter((torch.randn(m, h, generator=rng, device="cpu") * h**-0.5).to(like))
        self.d, self.up, self.u = zeros(m), zeros(h, m), zeros(h)

    def forward(self, x: Tensor, *how) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        y = self.base(x, *how)
        inner = linear(x if self.beside else y, self.down, self.d).relu()  # [B, T, m]
        return y + self.scale * linear(inner, self.up, self.u)


def serial(model: nn.Module, m=8, where=("attention", "ffn"), scale=1.0, beside=False, seed=0) -> Tuned:
    """Train an adapter of inner width m at the sublayers `where` of each block: attention, cross, ffn.

    `beside`: it reads what the sublayer reads, not what it gives.
    """
    places = [(b, name) for b in model.modules() if isinstance(b, Block) for name in where if hasattr(b, name)]
    own = {name for _, name in places} & {"attention", "cross", "ffn"}
    if m < 1 or not where or set(where) != own:
        raise ValueError(f"m = {m}, where = {where}: a width of 1 or more, at the blocks' own of attention, cross, ffn")
    freeze(model)
    rng = torch.Generator().manual_seed(seed)
    for block, name in places:
        setattr(block, name, Adapted(getattr(block, name), model.config.d_model, m, scale, beside, rng))
    return Tuned(model)


parallel = partial(serial, scale=4.0, beside=True)
