"""To be documented below."""

import torch

from llmstack.ops.activations import gelu_tanh_torch, gelu_torch, relu_torch, silu_torch


def reglu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return relu_torch(gate) * up


def geglu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gelu_torch(gate) * up


def geglu_tanh_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gelu_tanh_torch(gate) * up


def swiglu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu_torch(gate) * up


GLU_TORCH = {"reglu": reglu_torch, "geglu": geglu_torch, "geglu_tanh": geglu_tanh_torch, "swiglu": swiglu_torch}
