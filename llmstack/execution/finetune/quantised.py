"""LoRA on a base that is stored in 4 bits, and stays so: QLoRA and QA-LoRA.

    QLoRA      y = x Ŵᵀ + (α / r) x Aᵀ Bᵀ      Ŵ is NF4 with double quantised constants: 4.127 bits a weight
    QA-LoRA    the same, but A reads the sums of x over the groups of an INT4 base, whose zero points then take B A in

QLoRA (Dettmers et al. 2023, arXiv:2305.14314, eq. 5): gradients pass the base (ops.packed) and reach only A and B.
Merging gives full-precision matrices. QA-LoRA (Xu et al. 2023, arXiv:2309.14717, section 3.3): an update equal
over a group of inputs only shifts what the group's code 0 means, z ← z − (α / r) (B A) / s. Merged, it is INT4:
codes and scales are untouched, and y is the same but for the rounding of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from llmstack.execution.finetune.base import Targets, Tuned
from llmstack.execution.finetune.lora import LoRA, attach
from llmstack.ops.packed import IntLinear, NFLinear


class PooledLoRA(LoRA):
    """LoRA that sees only the sums of x over the groups of its IntLinear: A [r, in / group]."""

    def __init__(self, base: IntLinear, r: int, alpha: float, rng: torch.Generator):
        super().__init__(base, r, alpha, rng)
        self.a = nn.Parameter(self.a.detach()[:, : base.in_features // base.group].clone())

    def forward(self, x: Tensor) -> Tensor:
        sums = x.unflatten(-1, (-1, self.base.group)).sum(-1)  # [..., in / group]
        return self.base(x) + linear(linear(sums, self.a), self.b) * self.scale

    @property
    def weight(self) -> Tensor:
        return self.base.weight + self.delta().repeat_interleave(self.base.group, 1)

    @torch.no_grad()
    def merged(self) -> IntLinear:
        self.base.zero -= self.delta() / self.base.scale
        return self.base


def qlora(model: nn.Module, r=8, alpha=16.0, targets: Targets = "all", block=64, double=True, seed=0) -> Tuned:
    """LoRA on NF4. `merge()` gives plain linears of Ŵ + ΔW in full precision."""
    if block < 1:
        raise ValueError(f"block = {block!r}, but a constant is for at least one weight; the paper has 64")
    return attach(model, r, alpha, targets, seed, lambda linear: NFLinear(linear, 4, block, double))


def qa_lora(model: nn.Module, r=8, alpha=16.0, targets: Targets = "all", bits=4, group=32, seed=0) -> Tuned:
    """QA-LoRA. `merge()` moves zero points and leaves IntLinears. Raises ValueError where `group` does not divide."""
    return attach(model, r, alpha, targets, seed, lambda linear: IntLinear(linear, bits, group), PooledLoRA)
