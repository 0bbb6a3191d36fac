"""To be documented below."""

import math

import torch

GELU_SCALE = math.sqrt(2 / math.pi)


def relu_torch(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0)


def gelu_torch(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh_torch(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(GELU_SCALE * (x + 0.044715 * x * x * x)))


def gelu_sigmoid_torch(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def silu_torch(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


ACTIVATIONS_TORCH = {
    "relu": relu_torch,
    "gelu": gelu_torch,
    "gelu_tanh": gelu_tanh_torch,
    "gelu_sigmoid": gelu_sigmoid_torch,
    "silu": silu_torch,
}
