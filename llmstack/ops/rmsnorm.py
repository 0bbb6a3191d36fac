"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4).

    r = sqrt(mean(x²) + ε)        y = x / r · g              the mean runs over the last axis

    x, y, dy, dx [..., D]         g, dg [D]                  r [..., 1]

LayerNorm without the mean: rescaling x changes nothing (up to ε), shifting it does. With n = x / r and u = dy · g,

    dx = (u − n · mean(u · n)) / r                           dg = Σ over rows of dy · n

For R rows of D values of b bytes, a multiply and an add counted apart and a division as one:

                operations        bytes read         bytes written
    forward     4RD + 3R          b(RD + D)          bRD
    backward    11RD + 4R         b(2RD + D)         b(RD + D)

Backward recomputes r. About one operation a byte: the time is the time to read x and write y once, which is what
fusing must reach.
"""

import numpy as np
import torch

from llmstack.ops._triton import Build, available, no_gradient, row_tile, rows_of, same_shape, tl, triton


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
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    inside = (row < R) & (col < D)
    x = tl.load(x_ptr + row * D + col, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLS]
    g = tl.load(g_ptr + col, mask=col < D, other=0.0).to(tl.float32)  # [1, COLS]
    r = tl.sqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]  # [ROWS, 1]
    tl.store(y_ptr + row * D + col, x / r * g, mask=inside)


@triton.jit
def _norm_backward_kernel(
    dy_ptr, x_ptr, g_ptr, dx_ptr, dg_ptr, db_ptr, R, D, eps, STEPS, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A program takes STEPS tiles of rows and sums its own dg: dy, x, dx cross memory once, dg once a program.

    With db_ptr it is LayerNorm's: x and u lose their means, and a program sums its own db too.
    """
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    g = tl.load(g_ptr + col, mask=col < D, other=0.0).to(tl.float32)  # [1, COLS]
    dg = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        inside = (row < R) & (col < D)
        x = tl.load(x_ptr + row * D + col, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLS]
        dy = tl.load(dy_ptr + row * D + col, mask=inside, other=0.0).to(tl.float32)
        if db_ptr is not None:
            x = tl.where(inside, x - (tl.sum(x, axis=1) / D)[:, None], 0.0)
            db += tl.sum(dy, axis=0)
        r = tl.sqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]  # [ROWS, 1]
        n = x / r
        u = dy * g
        dx = u - n * (tl.sum(u * n, axis=1) / D)[:, None]
        if db_ptr is not None:
            dx -= (tl.sum(u, axis=1) / D)[:, None]
        tl.store(dx_ptr + row * D + col, dx / r, mask=inside)
        dg += tl.sum(dy * n, axis=0)
    part = tl.program_id(0) * D + tl.arange(0, COLS)
    tl.store(dg_ptr + part, dg, mask=tl.arange(0, COLS) < D)
    if db_ptr is not None:
        tl.store(db_ptr + part, db, mask=tl.arange(0, COLS) < D)


def rmsnorm_triton(x: torch.Tensor, g: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Rows of up to 16 Ki values, any number of them, contiguous or not; raises ValueError on a g of another width."""
    _check(x, g)
    no_gradient(g)
    rows = rows_of(x)  # [R, D]
    y = torch.empty_like(rows)
    ROWS, COLS, warps = row_tile(x.shape[-1])
    if len(rows):
        grid = (triton.cdiv(len(rows), ROWS),)
        _rmsnorm_kernel[grid](rows, g.contiguous(), y, *rows.shape, eps, ROWS, COLS, num_warps=warps)
    return y.view(x.shape)


def rmsnorm_triton_backward(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, eps: float = 1e-6, centre: bool = False
) -> tuple[torch.Tensor, ...]:
    """dx and dg, and where centred (LayerNorm) db. At most PROGRAMS programs leave a part of dg and db each, and the
    parts are summed afterwards.

    Rows over 8 Ki values spill registers to memory.
    """
    _check(x, g)
    same_shape("dy", dy, "x", x)
    rows = rows_of(x)  # [R, D]
    dx = torch.empty_like(rows)
    ROWS, COLS, warps = row_tile(x.shape[-1])
    steps = triton.cdiv(triton.cdiv(len(rows), ROWS), PROGRAMS)
    programs = triton.cdiv(len(rows), ROWS * max(steps, 1))
    parts = torch.empty(1 + centre, programs, x.shape[-1], dtype=torch.float32, device=x.device)  # of dg, db
    if programs:
        _norm_backward_kernel[(programs,)](
            rows_of(dy), rows, g.contiguous(), dx, parts[0], parts[1] if centre else None, *rows.shape, eps, steps,
            ROWS, COLS, num_warps=warps,
        )  # fmt: skip
    return dx.view(x.shape), *parts.sum(1).to(g.dtype)


def _check(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor | None = None):
    for name, t in (("g", g), ("b", g if b is None else b)):
        if t.shape != x.shape[-1:]:
            raise ValueError(f"{name} acts on the last axis of x: expected shape [{x.shape[-1]}], got {list(t.shape)}")


PROGRAMS = 256  # about two for each multiprocessor of a large GPU

IMPLS = available({"numpy": rmsnorm_np, "torch": rmsnorm_torch, "triton": rmsnorm_triton})
BACKWARDS = available({"numpy": rmsnorm_np_backward, "triton": rmsnorm_triton_backward})
AOT = [
    Build(_rmsnorm_kernel, "*bf16 *bf16 *bf16 i32 i32 fp32", {"ROWS": 1, "COLS": 4096}, 8),
    Build(_rmsnorm_kernel, "*fp32 *fp32 *fp32 i32 i32 fp32", {"ROWS": 1, "COLS": 16384}, 16),
    *(
        Build(_norm_backward_kernel, f"*bf16 *bf16 *bf16 *bf16 *fp32 {db} i32 i32 fp32 i32", how | shape, warps)
        for db, how in (("", {"db_ptr": None}), ("*fp32", {}))
        for shape, warps in (({"ROWS": 1, "COLS": 4096}, 8), ({"ROWS": 1, "COLS": 8192}, 16))
    ),
]
