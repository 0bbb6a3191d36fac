"""Adapters: small bottlenecks beside or behind the sublayers of a frozen model.

    serial      y = f(x);  y + A(y)          Houlsby et al. 2019, arXiv:1902.00751, figure 2
    parallel    f(x) + s A(x)                He et al. 2021, arXiv:2110.04366, table 1

with A(x) = U act(D x + d) + u, D [m, h], U [h, m]. U and u start at zero, so that the prepared model is the base model.
Two adapters a block hold 2 L (2 h m + m + h) parameters. Being nonlinear, they stay after training: nothing merges.
(Houlsby et al. also train the norms, and He et al. put the parallel one at the FFN alone: `where=("ffn",)`.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmstack.architectures.layers import Block, draw
from llmstack.execution.finetune.base import Tuned, freeze
from llmstack.ops.activations import ACTIVATIONS_TORCH


class Adapted(nn.Module):
    """A sublayer f with its adapter, called as f is. D is drawn with variance 1 / h."""

    def __init__(self, base: nn.Module, h: int, m: int, activation: str, scale: float, beside: bool, rng):
        super().__init__()
        self.act, self.scale, self.beside = ACTIVATIONS_TORCH[activation], scale, beside
        self.down, self.up = nn.Linear(h, m), nn.Linear(m, h)
        for p in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(p)
        if not self.down.weight.is_meta:
            with torch.no_grad():
                draw(self.down.weight, h**-0.5, rng)
        self.to(next(base.parameters()))
        self.base = base

    def forward(self, x: Tensor, *how) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        y = self.base(x, *how)
        return y + self.scale * self.up(self.act(self.down(x if self.beside else y)))


def serial(
    model: nn.Module, m: int = 8, where: Sequence[str] = ("attention", "ffn"), activation: str = "gelu", seed: int = 0
) -> Tuned:
    """An adapter of inner width m behind the sublayers `where` of each block: attention, cross, ffn."""
    return _adapt(model, m, where, activation, 1.0, False, seed)


def parallel(
    model: nn.Module,
    m: int = 8,
    where: Sequence[str] = ("attention", "ffn"),
    activation: str = "relu",
    scale: float = 4.0,
    seed: int = 0,
) -> Tuned:
    """An adapter of inner width m beside them: it reads what the sublayer reads. Its output is scaled."""
    return _adapt(model, m, where, activation, scale, True, seed)


def _adapt(model, m, where, activation, scale, beside, seed) -> Tuned:
    places = [(b, name) for b in model.modules() if isinstance(b, Block) for name in where if hasattr(b, name)]
    if lost := sorted(set(where) - {name for _, name in places} | set(where) - {"attention", "cross", "ffn"}):
        raise ValueError(f"where = {lost}, but adapters go to attention, cross or ffn of a block that has it")
    if activation not in ACTIVATIONS_TORCH:
        raise ValueError(f"activation = {activation!r}, but it must be one of {', '.join(ACTIVATIONS_TORCH)}")
    if not isinstance(m, int) or m < 1 or not places:
        raise ValueError(f"m = {m!r} at {len(places)} places, but adapters have a whole inner width, 1 or more")
    freeze(model)
    rng = torch.Generator().manual_seed(seed)
    for block, name in places:
        setattr(block, name, Adapted(getattr(block, name), model.config.d_model, m, activation, scale, beside, rng))
    return Tuned(model)
