"""How much of a machine a training run uses.

    utilisation(config, batch, tokens, seconds, devices, peak)    MFU, HFU and operations a second of an iteration
    per_token(config, tokens)                                     PaLM's operations a token, 6 N + 12 L H Dh T

MFU counts the operations that the model needs, forward and backward once each (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B). HFU counts what the hardware did: forward again where activations were thrown away (Korthikanti et al.,
arXiv:2205.05198, section 6). Megatron's "TFLOP/s a GPU" (Narayanan et al. 2021, arXiv:2104.04473) is with full
recomputation and hence an HFU: 4/3 of the MFU of the same run, but for the head.

Papers that count 6 N D leave out the attention scores: `attention=False`.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmstack.config import ModelConfig
from llmstack.intensity.counts import flops
from llmstack.intensity.params import params


@dataclass(frozen=True)
class Utilisation:
    """Shares of the peak, and operations a second and device that the hardware did."""

    mfu: float
    hfu: float
    per_device: float


def utilisation(
    config: ModelConfig, batch: int, tokens: int, seconds: float, devices: int, peak: float, recompute: str = "none"
) -> Utilisation:
    """Of one iteration over `batch` sequences of `tokens`; peak: operations a second of a device, dense.

    Raises ValueError when a number is not positive.
    """
    for name, value in dict(seconds=seconds, devices=devices, peak=peak).items():
        if not value > 0:
            raise ValueError(f"{name} = {value!r}, but it must be positive")
    model, hardware = (flops(config, batch, tokens, "train", recompute=how) for how in ("none", recompute))
    room = seconds * devices * peak
    return Utilisation(model / room, hardware / room, hardware / seconds / devices)


def per_token(config: ModelConfig, tokens: int, attention: bool = True) -> float:
    """Operations that training on one token of a sequence needs: 6 N + 12 L H Dh T, N the parameters it passes."""
    c = config
    return 6 * params(c).active + 12 * c.n_layers * c.n_heads * c.d_head * tokens * attention
