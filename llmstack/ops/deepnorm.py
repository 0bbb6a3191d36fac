"""DeepNorm (Wang et al. 2022, arXiv:2203.00555, fig. 2): a post-norm residual that stays stable at 1,000 layers.

    y = LayerNorm(α x + f(x))                 f's FFN, value and output projections start with Xavier gain β

    x, f(x), y, dy [..., D]                   α > 1 weighs the stream over the branch, β < 1 starts the branch small

                            encoder's α, β                                       decoder's α, β
    encoder only            (2N)^(1/4), (8N)^(−1/4)
    decoder only                                                                 (2M)^(1/4), (8M)^(−1/4)
    encoder-decoder         0.81 (N⁴M)^(1/16), 0.87 (N⁴M)^(−1/16)                (3M)^(1/4), (12M)^(−1/4)

for N encoder and M decoder layers. The query and key projections keep gain 1: they do not change the size of f's
output. Backward is LayerNorm's with h = αx + f(x): dx = α dh (besides what comes back through f), df = dh.
Operations: LayerNorm's and 2RD more; bytes: f(x) is read too.
"""

import numpy as np
import torch

from llmstack.ops.layernorm import layernorm_np, layernorm_np_backward, layernorm_torch


def deepnorm_constants(
    n_layers: int, kind: str = "decoder", side: str = "encoder", n_decoder_layers: int = 0
) -> tuple[float, float]:
    """α and β of one stack. kind as in ModelConfig.

    In an encoder-decoder n_layers counts encoder layers, n_decoder_layers (0: as many) the decoder's, and side says
    whose constants are asked for. Raises ValueError on another kind or side, or fewer than one layer.
    """
    N, M = n_layers, n_decoder_layers or n_layers
    if N < 1 or M < 1:
        raise ValueError(f"deepnorm: n_layers = {N}, n_decoder_layers = {M}, but a stack has at least one layer")
    if kind in ("encoder", "decoder"):
        return (2 * N) ** 0.25, (8 * N) ** -0.25
    if kind != "encoder-decoder" or side not in ("encoder", "decoder"):
        raise ValueError(
            f"deepnorm: kind = {kind!r}, side = {side!r}, but kind is encoder, decoder or encoder-decoder, "
            "and side is encoder or decoder"
        )
    if side == "decoder":
        return (3 * M) ** 0.25, (12 * M) ** -0.25
    return 0.81 * (N**4 * M) ** (1 / 16), 0.87 * (N**4 * M) ** (-1 / 16)


def deepnorm_np(
    x: np.ndarray, fx: np.ndarray, g: np.ndarray, b: np.ndarray | None, alpha: float, eps: float = 1e-5
) -> np.ndarray:
    return layernorm_np(alpha * x + fx, g, b, eps)  # [..., D]


def deepnorm_np_backward(
    dy: np.ndarray, x: np.ndarray, fx: np.ndarray, g: np.ndarray, alpha: float, eps: float = 1e-5
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    dh, dg, db = layernorm_np_backward(dy, alpha * x + fx, g, eps)
    return alpha * dh, dh, dg, db  # dx, dfx [..., D], dg, db [D]


def deepnorm_torch(
    x: torch.Tensor, fx: torch.Tensor, g: torch.Tensor, b: torch.Tensor | None, alpha: float, eps: float = 1e-5
) -> torch.Tensor:
    return layernorm_torch(alpha * x + fx, g, b, eps)  # [..., D]


IMPLS = {"numpy": deepnorm_np, "torch": deepnorm_torch}
BACKWARDS = {"numpy": deepnorm_np_backward}
