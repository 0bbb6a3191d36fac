"""To be documented below."""

import torch

from llmstack.ops.layernorm import layernorm_torch


def deepnorm_constants(
    n_layers: int, kind: str = "decoder", side: str = "encoder", n_decoder_layers: int | None = None
) -> tuple[float, float]:
    if kind in ("encoder", "decoder"):
        return (2 * n_layers) ** 0.25, (8 * n_layers) ** -0.25
    N, M = n_layers, n_decoder_layers or n_layers
    if side == "decoder":
        return (3 * M) ** 0.25, (12 * M) ** -0.25
    return 0.81 * (N**4 * M) ** (1 / 16), 0.87 * (N**4 * M) ** (-1 / 16)


def deepnorm_torch(
    x: torch.Tensor, fx: torch.Tensor, g: torch.Tensor, b: torch.Tensor | None, alpha: float, eps: float = 1e-5
) -> torch.Tensor:
    return layernorm_torch(alpha * x + fx, g, b, eps)
