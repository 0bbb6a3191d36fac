"""Layer normalisation (Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 3).

    μ = mean(x)      r = sqrt(mean((x − μ)²) + ε)      y = (x − μ) / r · g + b        means run over the last axis

    x, y, dy, dx [..., D]        g, b, dg, db [D]        μ, r [..., 1]; b may be left out

Shifting or rescaling x changes nothing (up to ε). With n = (x − μ) / r and u = dy · g,

    dx = (u − mean(u) − n · mean(u · n)) / r          dg = Σ over rows of dy · n          db = Σ over rows of dy

For R rows of D values of w bytes, a multiply and an add counted apart and a division as one:

                operations        bytes read         bytes written
    forward     7RD + 4R          w(RD + 2D)         wRD
    backward    16RD + 6R         w(2RD + D)         w(RD + 2D)

The variance needs the mean first: two passes over x, unless a running mean is corrected value by value (Welford 1962,
doi:10.1080/00401706.1962.10490022): `welford_np`. One pass by mean(x²) − μ² also exists, and cancels: it loses all
digits once μ² is 2^24 times the variance in fp32.
"""

import numpy as np
import torch

from llmstack.ops._triton import Build, available, no_gradient, row_tile, rows_of, tl, triton
from llmstack.ops.rmsnorm import _check, rmsnorm_triton_backward


def layernorm_np(x: np.ndarray, g: np.ndarray, b: np.ndarray | None = None, eps: float = 1e-5) -> np.ndarray:
    centred = x - np.mean(x, axis=-1, keepdims=True)  # [..., D]
    r = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)  # [..., 1]
    y = centred / r * g  # [..., D]
    return y if b is None else y + b


def welford_np(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (of n values, not of n − 1) of x [..., D] in one pass over its values: two arrays [...].

    A value δ away from the mean so far moves it by δ / n; the sum of squares about the mean grows by δ times what is
    left between the value and the new mean.
    """
    mean = np.zeros_like(x[..., 0])
    squares = np.zeros_like(mean)
    for n in range(1, x.shape[-1] + 1):
        value = x[..., n - 1]
        away = value - mean
        mean = mean + away / n
        squares = squares + away * (value - mean)
    return mean, squares / x.shape[-1]


def layernorm_np_backward(
    dy: np.ndarray, x: np.ndarray, g: np.ndarray, eps: float = 1e-5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    centred = x - np.mean(x, axis=-1, keepdims=True)  # [..., D]
    r = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)  # [..., 1]
    n = centred / r  # [..., D]
    u = dy * g  # [..., D]
    dx = (u - np.mean(u, axis=-1, keepdims=True) - n * np.mean(u * n, axis=-1, keepdims=True)) / r  # [..., D]
    dg = np.sum((dy * n).reshape(-1, g.size), axis=0)  # [D]
    return dx, dg, np.sum(dy.reshape(-1, g.size), axis=0)


def layernorm_torch(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor | None = None, eps: float = 1e-5) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # bf16 and fp16 are summed in fp32
    centred = wide - wide.mean(-1, keepdim=True)  # [..., D]
    r = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)  # [..., 1]
    y = centred * r * g  # [..., D]
    return (y if b is None else y + b).to(x.dtype)


@triton.jit
def _add_norm_kernel(
    x_ptr, r_ptr, g_ptr, b_ptr, s_ptr, y_ptr, R, D, eps, CENTRE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """A program takes ROWS whole rows: what is read and written crosses memory once, g and b once a program.

    With r_ptr x + r is written to s, and it is that sum's norm; without CENTRE the norm is RMSNorm, and b is not read.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    at, inside = row * D + col, (row < R) & (col < D)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLS]
    if r_ptr is not None:
        x += tl.load(r_ptr + at, mask=inside, other=0.0).to(tl.float32)
        s = x.to(s_ptr.dtype.element_ty)  # the norm of the sum as it is stored
        tl.store(s_ptr + at, s, mask=inside)
        x = s.to(tl.float32)
    if CENTRE:
        x = tl.where(inside, x - (tl.sum(x, axis=1) / D)[:, None], 0.0)
    g = tl.load(g_ptr + col, mask=col < D, other=0.0).to(tl.float32)  # [1, COLS]
    y = x / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * g
    if CENTRE:
        y += tl.load(b_ptr + col, mask=col < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y, mask=inside)


def add_norm(x, r, g, b, eps: float, centre: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x + r (x itself where r is None) and its norm; raises ValueError on a g or b of another width."""
    b = torch.zeros_like(g) if b is None else b
    _check(x, g, b)
    no_gradient(g, b)
    rows, (ROWS, COLS, warps) = rows_of(x), row_tile(x.shape[-1])
    y = torch.empty_like(rows)
    s, added = (None, None) if r is None else (torch.empty_like(rows), rows_of(r))
    if len(rows):
        grid, flags = (triton.cdiv(len(rows), ROWS),), (centre, ROWS, COLS)
        vectors = g.contiguous(), b.contiguous()
        _add_norm_kernel[grid](rows, added, *vectors, s, y, *rows.shape, eps, *flags, num_warps=warps)
    return (x if s is None else s.view(x.shape)), y.view(x.shape)


def layernorm_triton(
    x: torch.Tensor, g: torch.Tensor, b: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Rows of up to 16 Ki values, contiguous or not; raises ValueError on a g or b of another width."""
    return add_norm(x, None, g, b, eps, True)[1]


def layernorm_triton_backward(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, ...]:
    """dx, dg and db, by RMSNorm's kernel with x centred."""
    return rmsnorm_triton_backward(dy, x, g, eps, centre=True)


IMPLS = available({"numpy": layernorm_np, "torch": layernorm_torch, "triton": layernorm_triton})
BACKWARDS = available({"numpy": layernorm_np_backward, "triton": layernorm_triton_backward})
ALONE = {"r_ptr": None, "s_ptr": None, "CENTRE": True}
AOT = [
    Build(_add_norm_kernel, "*bf16 *bf16 *bf16 *bf16 i32 i32 fp32", ALONE | {"ROWS": 1, "COLS": 4096}, 8),
    Build(_add_norm_kernel, "*fp32 *fp32 *fp32 *fp32 i32 i32 fp32", ALONE | {"ROWS": 1, "COLS": 16384}, 16),
    Build(_add_norm_kernel, "*bf16 " * 6 + "i32 i32 fp32", {"CENTRE": False, "ROWS": 1, "COLS": 4096}, 8),
    Build(_add_norm_kernel, "*fp32 " * 6 + "i32 i32 fp32", {"CENTRE": True, "ROWS": 1, "COLS": 16384}, 16),
]
