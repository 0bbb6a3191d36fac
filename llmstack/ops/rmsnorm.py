"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4).

    r = sqrt(mean(x²) + ε)        y = x / r · g              the mean runs over the last axis

    x, y, dy, dx [..., D]         g, dg [D]                  r [..., 1]

LayerNorm without the mean: rescaling x changes nothing (up to ε), shifting it does. With n = x / r and u = dy · g,

    dx = (u − n · mean(u · n)) / r                           dg = Σ over rows of dy · n

For R rows of D values of b bytes, a multiply and an add counted apart and a division as one:

                operations        bytes read         bytes written
    forward     4RD + 3R          b(RD + D)          bRD
    backward    11RD + 4R         b(2RD + D)         b(RD + D)

Backward recomputes r. About one operation a byte: the time is the time to read x and write y once, which is what fusing must reach.
"""

import numpy as np
import torch

from llmstack.ops._triton import available, tl, triton


def rmsnorm_np(x: np.ndarray, g: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    r = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)  # [..., 1]
    return x / r * g  # [..., D]


def rmsnorm_np_backward(
    dy: np.ndarray, x: np.ndarray, g: np.ndarray, eps: float = 1e-6
) -> tuple[np.ndarray, np.ndarray]:
    r = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)  # [..., 1]
    n = x / r  # [..., D]
    u = dy * g  # [..., D]
    dx = (u - n * np.mean(u * n, axis=-1, keepdims=True)) / r  # [..., D]
    dg = np.sum((dy * n).reshape(-1, g.size), axis=0)  # [D]
    return dx, dg


def rmsnorm_torch(x: torch.Tensor, g: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # bf16 and fp16 are squared and summed in fp32
    r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)  # [..., 1]
    return (wide * r * g).to(x.dtype)  # [..., D]


@triton.jit
def _rmsnorm_kernel(x_ptr, g_ptr, y_ptr, R, D, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A program takes ROWS whole rows: x and y cross memory once, g once a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    inside = (row < R) & (col < D)
    x = tl.load(x_ptr + row * D + col, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLS]
    g = tl.load(g_ptr + col, mask=col < D, other=0.0).to(tl.float32)  # [1, COLS]
    r = tl.sqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]  # [ROWS, 1]
    tl.store(y_ptr + row * D + col, x / r * g, mask=inside)


def rmsnorm_triton(x: torch.Tensor, g: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Rows of up to 64 Ki values, any number of them, contiguous or not; raises ValueError on a g of another width."""
    if g.shape != x.shape[-1:]:
        raise ValueError(f"g scales the last axis of x: expected shape [{x.shape[-1]}], got {list(g.shape)}")
    D = x.shape[-1]
    rows = x.reshape(-1, D).contiguous()  # [R, D]
    y = torch.empty_like(rows)
    R, COLS = len(rows), triton.next_power_of_2(D)
    ROWS = max(1, 4096 // COLS)
    if R:
        _rmsnorm_kernel[(triton.cdiv(R, ROWS),)](rows, g.contiguous(), y, R, D, eps, ROWS, COLS)
    return y.view(x.shape)


IMPLS = available({"numpy": rmsnorm_np, "torch": rmsnorm_torch, "triton": rmsnorm_triton})
