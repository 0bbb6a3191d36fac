"""Gated linear units (Shazeer 2020, arXiv:2002.05202, eq. 5 and 6): an activation of one projection gates another.

    y = act(gate) · up,    gate = x W,    up = x V              ReGLU: relu    GEGLU: gelu    SwiGLU: silu

    gate, up, y, dy [..., F]

    d_gate = dy · up · act'(gate)                d_up = dy · act(gate)

Three matrices of D × F where a plain FFN has two of D × 4D: the same parameters at F = 8D/3. For SwiGLU on N values of
b bytes, σ as four operations:

                operations    bytes read    bytes written
    forward     6N            2bN           bN
    backward    11N           3bN           2bN

Unfused, silu(gate) is written and read again: 5bN forward instead of 3bN.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from llmstack.ops._triton import TILE, Build, available, rows_of, same_shape, tl, triton
from llmstack.ops.activations import ACTIVATIONS_NP, ACTIVATIONS_NP_BACKWARD, ACTIVATIONS_TORCH

GATES = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


def glu_np(gate: np.ndarray, up: np.ndarray, act: str) -> np.ndarray:
    return ACTIVATIONS_NP[act](gate) * up  # [..., F]


def glu_np_backward(dy: np.ndarray, gate: np.ndarray, up: np.ndarray, act: str) -> tuple[np.ndarray, np.ndarray]:
    return ACTIVATIONS_NP_BACKWARD[act](dy * up, gate), dy * ACTIVATIONS_NP[act](gate)  # [..., F] each


def swiglu_np(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return glu_np(gate, up, "silu")


def swiglu_np_backward(dy: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return glu_np_backward(dy, gate, up, "silu")


def glu_torch(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    return ACTIVATIONS_TORCH[act](gate) * up  # [..., F]


def swiglu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return glu_torch(gate, up, "silu")


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Reads gate and up once, writes y once; silu(gate) never leaves the registers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    gate = tl.load(gate_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, gate * tl.sigmoid(gate) * up, mask=i < N)


@triton.jit
def _swiglu_backward_kernel(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, N, BLOCK: tl.constexpr):
    """Reads dy, gate and up once, writes both gradients once; σ is computed again instead of kept."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(dgate_ptr + i, dy * up * (s + gate * s * (1 - s)), mask=i < N)
    tl.store(dup_ptr + i, dy * gate * s, mask=i < N)


def swiglu_triton(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Any shape and strides; raises ValueError when gate and up differ in shape."""
    same_shape("up", up, "gate", gate)
    gates, y = rows_of(gate), torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        _swiglu_kernel[(triton.cdiv(y.numel(), TILE),)](gates, rows_of(up), y, y.numel(), TILE)
    return y


def swiglu_triton_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    same_shape("up", up, "gate", gate)
    same_shape("dy", dy, "gate", gate)
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if dy.numel():
        grid = (triton.cdiv(dy.numel(), TILE),)
        _swiglu_backward_kernel[grid](rows_of(dy), rows_of(gate), rows_of(up), dgate, dup, dy.numel(), TILE)
    return dgate, dup


def _each(fn: Callable) -> dict[str, Callable]:
    """By the unit's name. A partial, unlike a lambda, can be pickled, and so can a model that holds one."""
    return {glu: partial(fn, act=act) for glu, act in GATES.items()}


GLU_NP, GLU_NP_BACKWARD, GLU_TORCH = _each(glu_np), _each(glu_np_backward), _each(glu_torch)

IMPLS = available({"numpy": swiglu_np, "torch": swiglu_torch, "triton": swiglu_triton})
BACKWARDS = available({"numpy": swiglu_np_backward, "triton": swiglu_triton_backward})
AOT = [
    Build(_swiglu_kernel, "*bf16 *bf16 *bf16 i32", {"BLOCK": 4096}),
    Build(_swiglu_backward_kernel, "*bf16 *bf16 *bf16 *bf16 *bf16 i32", {"BLOCK": 4096}),
]
