"""What the surveys claim about number formats in training, recomputed. data/claims.toml names these functions."""

import torch
from torch import nn

from llmstack.execution.precision import OPERANDS, Precision, rounded
from llmstack.facts import Computed


def transformer_engine_is_fp8() -> Computed:
    """BC-18: the share of a linear's small gradients that E5M2 loses, as they are and with a scale for each tensor."""
    dy = 1e-7 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    layer, precision, x = nn.Linear(16, 32, bias=False), Precision("fp8"), torch.ones(64, 16, requires_grad=True)
    for _ in range(2):  # the first pass finds the scales
        x.grad = None
        with precision.forward(layer):
            layer(x).backward(dy)
    lost = [float((g == 0).float().mean()) for g in (rounded(dy, "e5m2"), x.grad)]
    formats = ", ".join(f"{name} {format.upper()}" for name, format in OPERANDS.items())
    says = f"operands {formats}, the rest 16 bits; of gradients of 1e-7, {lost[0]:.0%} are lost without scales"
    return Computed(lost, "of the gradients lost without and with scales", f"{says}, {lost[1]:.0%} with them")
