"""LoRA: what tuning adds to a matrix is a product of two thin ones (Hu et al. 2021, arXiv:2106.09685, eq. 3).

    y = W x + (α / r) B A x        W [out, in] frozen, A [r, in] random, B [out, r] zero: at first nothing changes

r (in + out) values are trained in place of in · out, and rank(ΔW) ≤ r. On Wq and Wv of L layers of width D that is
4 L D r: for GPT-3 (L = 96, D = 12,288) 4.7 M with r = 1 and 37.7 M with r = 8, as its table 4 has it. Merged, W + ΔW is
an ordinary matrix, and inference costs nothing more.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from llmstack.execution.finetune.base import Targets, Tuned, freeze, linears


class LoRA(nn.Module):
    """A linear, or whatever has in_features and out_features and is called as one, with a low-rank update beside it.

    A is uniform within ± 1 / √in, as PEFT draws it; A and B have the dtype of the base's weight.
    """

    def __init__(self, base: nn.Module, r: int, alpha: float, rng: torch.Generator):
        super().__init__()
        like = next(chain(base.parameters(), base.buffers()))
        to = dict(device=like.device, dtype=getattr(base, "dtype", like.dtype))
        a = (2 * torch.rand(r, base.in_features, generator=rng, device="cpu") - 1) * base.in_features**-0.5
        self.base, self.scale = base, alpha / r
        self.a = nn.Parameter(a.to(**to))  # [r, in]
        self.b = nn.Parameter(torch.zeros(base.out_features, r, **to))  # [out, r]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.base(x) + linear(linear(x, self.a), self.b) * self.scale

    def delta(self) -> Tensor:
        """ΔW [out, in]."""
        return self.scale * self.b @ self.a

    @property
    def weight(self) -> Tensor:
        """W + ΔW [out, in], for who reads a linear's matrix in place of calling it."""
        return self.base.weight + self.delta()

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """What stands here after training: a linear of W + ΔW."""
        return dense(self.weight, self.base.bias)


def dense(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear with these values."""
    plain = nn.Linear(*weight.T.shape, bias is not None).to(weight)
    plain.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return plain


def attach(model: nn.Module, r: int, alpha: float, targets: Targets, seed: int, base=lambda m: m, kind=LoRA) -> Tuned:
    """Freeze the model and put a LoRA, or another `kind` of it, in the place of the target linears.

    `base` says what becomes of the linear itself. Raises ValueError when r is not a rank that every target can have.
    """
    for name, _, _, module in (found := list(linears(model, targets))):
        if r not in range(1, (most := min(module.weight.shape)) + 1):
            shape = "×".join(map(str, module.weight.shape))
            raise ValueError(f"r = {r!r}, but {name} is {shape}: a rank is a whole number from 1 to {most}")
    rng = torch.Generator().manual_seed(seed)
    made = [(parent, attribute, kind(base(module), r, alpha, rng)) for _, parent, attribute, module in found]
    freeze(model)
    for place in made:
        setattr(*place)

    def merge() -> nn.Module:
        for parent, attribute, module in made:
            setattr(parent, attribute, module.merged())
        return model

    return Tuned(model, merge=merge)


def lora(model: nn.Module, r: int = 8, alpha: float = 16.0, targets: Targets = ("q", "v"), seed: int = 0) -> Tuned:
    """Train A and B of the targets (base.linears). `merge()` adds ΔW to each matrix and takes A and B away."""
    return attach(model, r, alpha, targets, seed)
