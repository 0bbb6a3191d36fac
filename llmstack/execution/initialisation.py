"""How large weights start: so that activations neither die out nor grow, over depth and over width.

    xavier   2 / (fan_in + fan_out)      Glorot and Bengio 2010: forward and backward alike, for tanh
    he       2 / fan_in                  He et al. 2015, arXiv:1502.01852, eq. 10: ReLU lets half of it through
    normal   0.02²                       whatever the width
    gpt2     0.02², of matrices that write to the residual stream 0.02² / 2L: L blocks add to it twice each
             (Radford et al. 2019, section 2.3)

These are variances of a matrix's entries. `mup` is about width: what must change when a model becomes wider, so that
activations and their change by a step keep their size, and with them the best learning rate (Yang et al. 2022,
arXiv:2203.03466, table 3, for Adam; the standard rule in brackets):

                              input and all biases    output                      hidden
    variance                  1 / fan_in              1 / fan_in² (1 / fan_in)    1 / fan_in
    Adam's learning rate      1                       1 / fan_in  (1)             1 / fan_in  (1)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmstack.architectures.layers import draw

Variance = Callable[[int, int, int], float]
SCHEMES: dict[str, Variance] = {  # of fan in, fan out, and how often the residual stream is added to (0: not by this)
    "xavier": lambda fan_in, fan_out, adds: 2 / (fan_in + fan_out),
    "he": lambda fan_in, fan_out, adds: 2 / fan_in,
    "normal": lambda fan_in, fan_out, adds: 0.02**2,
    "gpt2": lambda fan_in, fan_out, adds: 0.02**2 / max(adds, 1),
}


@torch.no_grad()
def initialise(model: nn.Module, scheme: str, seed: int = 0) -> nn.Module:
    """Draw every linear's weights by a scheme, and set its bias to zero. Raises ValueError on another scheme."""
    if scheme not in SCHEMES:
        raise ValueError(f"scheme = {scheme!r}, but it must be one of {', '.join(SCHEMES)}")
    rng, adds = torch.Generator().manual_seed(seed), 2 * len(getattr(model, "blocks", ()))
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            writes = path.endswith((".o", ".down"))
            draw(module.weight, SCHEMES[scheme](module.in_features, module.out_features, adds * writes) ** 0.5, rng)
            if module.bias is not None:
                module.bias.zero_()
    return model


@torch.no_grad()
def mup(model: nn.Module, base: int, seed: int = 0) -> dict[str, float]:
    """Draw a decoder's weights by table 3, and give each one's factor of Adam's learning rate, by name.

    `base` is the width (d_model) at which factors are 1 and variances 1 / fan_in: there the learning rate is sought.
    Raises ValueError where the head is the embedding, since one matrix cannot follow two columns.
    """
    if model.config.tied:
        raise ValueError(f"{model.config.name} is tied, but input and output differ in mup; build it with tied=False")
    rng, factors = torch.Generator().manual_seed(seed), {}
    for name, w in model.named_parameters():
        fan_in, inner = w.shape[-1], w.ndim == 2 and not name.startswith("embed.")
        factors[name] = base / model.config.d_model if inner else 1.0
        if w.ndim == 2:
            variance = (1 if inner else fan_in / base) * (base / fan_in if name.startswith("out.") else 1) / fan_in
            draw(w, variance**0.5, rng)
    return factors


def stack(depth: int, width: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """`depth` linears with an activation after each and nothing else: what no norm and no residual holds up."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), activation()) for _ in range(depth)))


@torch.no_grad()
def spreads(model: nn.Module, x: Tensor) -> list[float]:
    """The root mean square of what enters and of what each layer gives, L + 1 numbers: of a `stack` at x [B, D], or of
    the residual stream of a model at ids x [B, T]."""
    if hasattr(model, "states"):
        norm, model.norm = model.norm, None  # what it would hide
        states = list(model.states(x))
        model.norm = norm
    else:
        states = [x, *(x := layer(x) for layer in model)]
    return [float(h.square().mean()) ** 0.5 for h in states]
