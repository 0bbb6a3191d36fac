"""Activation functions, applied to each value by itself.

    relu           max(0, x)                                             slope 1 where x > 0, else 0
    gelu           x Φ(x),  Φ(x) = (1 + erf(x/√2)) / 2                   Φ(x) + x φ(x), φ the normal density
    gelu_tanh      x (1 + t) / 2,  t = tanh(√(2/π) (x + 0.044715 x³))    within 5e-4 of gelu
    gelu_sigmoid   x σ(1.702 x)                                          within 2.1e-2 of gelu
    silu           x σ(x)                                                σ (1 + x (1 − σ))

GELU and its two approximations: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2. SiLU: the same paper, and as
Swish Ramachandran et al. 2017, arXiv:1710.05941. For N values of b bytes forward reads and writes bN, backward reads
2bN (dy and x) and writes bN, whatever the function: a transcendental function costs no byte.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from scipy.special import erf, expit  # expit is σ without overflow

TANH_SCALE = math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715
SIGMOID_SCALE = 1.702


def relu_np(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def relu_np_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    return dy * (x > 0)


def gelu_np(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


def gelu_np_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return dy * (0.5 * (1 + erf(x * math.sqrt(0.5))) + x * density)


def gelu_tanh_np(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(TANH_SCALE * (x + TANH_CUBIC * x * x * x)))


def gelu_tanh_np_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    t = np.tanh(TANH_SCALE * (x + TANH_CUBIC * x * x * x))
    slope = TANH_SCALE * (1 + 3 * TANH_CUBIC * x * x)  # of tanh's argument
    return dy * 0.5 * (1 + t + x * (1 - t * t) * slope)


def gelu_sigmoid_np(x: np.ndarray) -> np.ndarray:
    return x * expit(SIGMOID_SCALE * x)


def gelu_sigmoid_np_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    s = expit(SIGMOID_SCALE * x)
    return dy * s * (1 + SIGMOID_SCALE * x * (1 - s))


def silu_np(x: np.ndarray) -> np.ndarray:
    return x * expit(x)


def silu_np_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    s = expit(x)
    return dy * s * (1 + x * (1 - s))


def gelu_torch(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


def gelu_sigmoid_torch(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(SIGMOID_SCALE * x)


ACTIVATIONS_NP: dict[str, Callable] = dict(
    relu=relu_np, gelu=gelu_np, gelu_tanh=gelu_tanh_np, gelu_sigmoid=gelu_sigmoid_np, silu=silu_np
)
ACTIVATIONS_NP_BACKWARD: dict[str, Callable] = dict(
    relu=relu_np_backward,
    gelu=gelu_np_backward,
    gelu_tanh=gelu_tanh_np_backward,
    gelu_sigmoid=gelu_sigmoid_np_backward,
    silu=silu_np_backward,
)
ACTIVATIONS_TORCH: dict[str, Callable] = {
    "relu": torch.relu,
    "gelu": gelu_torch,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu_sigmoid": gelu_sigmoid_torch,
    "silu": torch.nn.functional.silu,
}

IMPLS = {"numpy": gelu_np, "torch": gelu_torch}
BACKWARDS = {"numpy": gelu_np_backward}
