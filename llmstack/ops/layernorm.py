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
doi:10.1080/00401706.1962.10490022). One pass by mean(x²) − μ² also exists, and cancels: it loses all digits once μ² is
2^24 times the variance in fp32.
"""

import numpy as np
import torch

from llmstack.ops._triton import Build, available, row_tile, rows_of, tl, triton


def welford_np(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and (biased) variance over the last axis in one pass: x [..., D] -> two arrays [...]."""
    mean, squares = np.zeros_like(x[..., 0]), np.zeros_like(x[..., 0])
    for n in range(x.shape[-1]):
        delta = x[..., n] - mean
        mean = mean + delta / (n + 1)
        squares = squares + delta * (x[..., n] - mean)
    return mean, squares / x.shape[-1]


def layernorm_np(x: np.ndarray, g: np.ndarray, b: np.ndarray | None = None, eps: float = 1e-5) -> np.ndarray:
    centred = x - np.mean(x, axis=-1, keepdims=True)  # [..., D]
    r = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)  # [..., 1]
    y = centred / r * g  # [..., D]
    return y if b is None else y + b


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
def _layernorm_kernel(x_ptr, g_ptr, b_ptr, y_ptr, R, D, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A program takes ROWS whole rows: x and y cross memory once, g and b once a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    inside = (row < R) & (col < D)
    x = tl.load(x_ptr + row * D + col, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLS]
    g = tl.load(g_ptr + col, mask=col < D, other=0.0).to(tl.float32)  # [1, COLS]
    b = tl.load(b_ptr + col, mask=col < D, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - (tl.sum(x, axis=1) / D)[:, None], 0.0)
    r = tl.sqrt(tl.sum(centred * centred, axis=1) / D + eps)[:, None]  # [ROWS, 1]
    tl.store(y_ptr + row * D + col, centred / r * g + b, mask=inside)


@triton.jit
def _layernorm_backward_kernel(
    dy_ptr, x_ptr, g_ptr, dx_ptr, dg_ptr, db_ptr, R, D, eps, STEPS, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A program takes STEPS tiles of rows and sums its own dg and db, which it writes once; dy, x, dx cross once."""
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    g = tl.load(g_ptr + col, mask=col < D, other=0.0).to(tl.float32)  # [1, COLS]
    dg = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        inside = (row < R) & (col < D)
        x = tl.load(x_ptr + row * D + col, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLS]
        dy = tl.load(dy_ptr + row * D + col, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, x - (tl.sum(x, axis=1) / D)[:, None], 0.0)
        r = tl.sqrt(tl.sum(centred * centred, axis=1) / D + eps)[:, None]  # [ROWS, 1]
        n = centred / r
        u = dy * g
        dx = (u - (tl.sum(u, axis=1) / D)[:, None] - n * (tl.sum(u * n, axis=1) / D)[:, None]) / r
        tl.store(dx_ptr + row * D + col, dx, mask=inside)
        dg += tl.sum(dy * n, axis=0)
        db += tl.sum(dy, axis=0)
    part = tl.program_id(0) * D + tl.arange(0, COLS)
    tl.store(dg_ptr + part, dg, mask=tl.arange(0, COLS) < D)
    tl.store(db_ptr + part, db, mask=tl.arange(0, COLS) < D)


def layernorm_triton(
    x: torch.Tensor, g: torch.Tensor, b: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Rows of up to 16 Ki values, contiguous or not; raises ValueError on a g or b of another width."""
    b = torch.zeros_like(g) if b is None else b
    _check(x, g, b)
    rows = rows_of(x)  # [R, D]
    y = torch.empty_like(rows)
    ROWS, COLS, warps = row_tile(x.shape[-1])
    if len(rows):
        grid = (triton.cdiv(len(rows), ROWS),)
        _layernorm_kernel[grid](rows, g.contiguous(), b.contiguous(), y, *rows.shape, eps, ROWS, COLS, num_warps=warps)
    return y.view(x.shape)


def layernorm_triton_backward(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dg and db. At most PROGRAMS programs leave a part of dg and db each, and the parts are summed afterwards.

    Rows over 8 Ki values spill registers to memory.
    """
    _check(x, g, g)
    if dy.shape != x.shape:
        raise ValueError(f"dy has the shape of x: expected {list(x.shape)}, got {list(dy.shape)}")
    rows = rows_of(x)  # [R, D]
    dx = torch.empty_like(rows)
    ROWS, COLS, warps = row_tile(x.shape[-1])
    steps = triton.cdiv(triton.cdiv(len(rows), ROWS), PROGRAMS)
    programs = triton.cdiv(len(rows), ROWS * max(steps, 1))
    dg, db = torch.empty(2, programs, x.shape[-1], dtype=torch.float32, device=x.device)
    if programs:
        _layernorm_backward_kernel[(programs,)](
            rows_of(dy), rows, g.contiguous(), dx, dg, db, *rows.shape, eps, steps, ROWS, COLS, num_warps=warps
        )
    return dx.view(x.shape), dg.sum(0).to(g.dtype), db.sum(0).to(g.dtype)


def _check(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor):
    for name, t in (("g", g), ("b", b)):
        if t.shape != x.shape[-1:]:
            raise ValueError(f"{name} acts on the last axis of x: expected shape [{x.shape[-1]}], got {list(t.shape)}")


PROGRAMS = 256  # about two for each multiprocessor of a large GPU

IMPLS = available({"numpy": layernorm_np, "torch": layernorm_torch, "triton": layernorm_triton})
BACKWARDS = available({"numpy": layernorm_np_backward, "triton": layernorm_triton_backward})
_BACKWARD_TYPES = "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32 i32 i32 fp32 i32"
AOT = [
    Build(_layernorm_kernel, "*bf16 *bf16 *bf16 *bf16 i32 i32 fp32", {"ROWS": 1, "COLS": 4096}, 8),
    Build(_layernorm_kernel, "*fp32 *fp32 *fp32 *fp32 i32 i32 fp32", {"ROWS": 1, "COLS": 16384}, 16),
    Build(_layernorm_backward_kernel, _BACKWARD_TYPES, {"ROWS": 1, "COLS": 4096}, 8),
    Build(_layernorm_backward_kernel, _BACKWARD_TYPES, {"ROWS": 1, "COLS": 8192}, 16),
]
