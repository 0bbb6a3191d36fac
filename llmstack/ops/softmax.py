"""Softmax: safe (shifted by the maximum) and online (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3).

    y_i = exp(x_i − m) / Σ_j exp(x_j − m)                m = max x; any m gives the same y, this one cannot overflow

    x, y, dy, dx [..., S]                                the sum runs over the last axis

A row that is −∞ throughout (a query that may see no key) has no softmax: here it gives zeros, so that what is summed
with these weights is zero. Backward needs only y:

    dx = y · (dy − Σ_j dy_j y_j)

The online form finds m and the sum d in one pass: a larger maximum m' rescales what was summed so far, d · exp(m − m').

For R rows of S values of b bytes, a comparison, an exponential and a division as one operation each:

                        operations    bytes read    bytes written
    safe, in 3 passes   5RS           3bRS          bRS
    online, in 2        about 6RS     2bRS          bRS
    a row in registers  5RS           bRS           bRS
    backward            4RS           2bRS          bRS
"""

import numpy as np
import torch

from llmstack.ops._triton import Build, available, row_tile, rows_of, same_shape, tl, triton


def softmax_np(x: np.ndarray) -> np.ndarray:
    m = np.max(x, axis=-1, keepdims=True, initial=-np.inf)  # [..., 1]
    e = np.exp(x - np.where(m == -np.inf, 0, m))  # [..., S]
    total = np.sum(e, axis=-1, keepdims=True)  # [..., 1]
    return e / np.where(total == 0, 1, total)  # [..., S]


def softmax_np_backward(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    return y * (dy - np.sum(dy * y, axis=-1, keepdims=True))  # [..., S]


def online_softmax_np(x: np.ndarray, block: int = 64) -> np.ndarray:
    m = np.full_like(x[..., :1], -np.inf)  # [..., 1]: the maximum so far
    total = np.zeros_like(m)  # [..., 1]: Σ exp(x − m) so far
    shift = total
    for start in range(0, x.shape[-1], block):
        part = x[..., start : start + block]  # [..., block]
        new = np.maximum(m, part.max(axis=-1, keepdims=True))
        shift = np.where(new == -np.inf, 0, new)
        total = total * np.exp(m - shift) + np.exp(part - shift).sum(axis=-1, keepdims=True)
        m = new
    return np.exp(x - shift) / np.where(total == 0, 1, total)  # [..., S]


def softmax_torch(x: torch.Tensor) -> torch.Tensor:
    if not x.shape[-1]:
        return x.clone()
    m = x.amax(-1, keepdim=True)  # [..., 1]
    e = torch.exp(x - m.masked_fill(m == -torch.inf, 0))  # [..., S]
    total = e.sum(-1, keepdim=True)  # [..., 1]
    return e / total.masked_fill(total == 0, 1)  # [..., S]


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, R, S, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A program takes ROWS whole rows: x and y cross memory once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    inside = (row < R) & (col < S)
    x = tl.load(x_ptr + row * S + col, mask=inside, other=-float("inf")).to(tl.float32)  # [ROWS, COLS]
    m = tl.max(x, axis=1)[:, None]  # [ROWS, 1]
    e = tl.exp(x - tl.where(m == -float("inf"), 0.0, m))
    total = tl.sum(e, axis=1)[:, None]
    tl.store(y_ptr + row * S + col, e / tl.where(total == 0.0, 1.0, total), mask=inside)


@triton.jit
def _softmax_backward_kernel(dy_ptr, y_ptr, dx_ptr, R, S, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Reads dy and y once, writes dx once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    inside = (row < R) & (col < S)
    dy = tl.load(dy_ptr + row * S + col, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLS]
    y = tl.load(y_ptr + row * S + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * S + col, y * (dy - tl.sum(dy * y, axis=1)[:, None]), mask=inside)


def softmax_triton(x: torch.Tensor) -> torch.Tensor:
    """Rows of up to 16 Ki values, contiguous or not."""
    rows = rows_of(x)  # [R, S]
    y = torch.empty_like(rows)
    ROWS, COLS, warps = row_tile(x.shape[-1])
    if rows.numel():
        _softmax_kernel[(triton.cdiv(len(rows), ROWS),)](rows, y, *rows.shape, ROWS, COLS, num_warps=warps)
    return y.view(x.shape)


def softmax_triton_backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    same_shape("dy", dy, "y", y)
    rows = rows_of(y)  # [R, S]
    dx = torch.empty_like(rows)
    ROWS, COLS, warps = row_tile(y.shape[-1])
    if rows.numel():
        grid = (triton.cdiv(len(rows), ROWS),)
        _softmax_backward_kernel[grid](rows_of(dy), rows, dx, *rows.shape, ROWS, COLS, num_warps=warps)
    return dx.view(y.shape)


IMPLS = available({"numpy": softmax_np, "torch": softmax_torch, "triton": softmax_triton})
BACKWARDS = available({"numpy": softmax_np_backward, "triton": softmax_triton_backward})
AOT = [
    Build(_softmax_kernel, "*bf16 *bf16 i32 i32", {"ROWS": 1, "COLS": 4096}, 8),
    Build(_softmax_kernel, "*fp32 *fp32 i32 i32", {"ROWS": 1, "COLS": 16384}, 16),
    Build(_softmax_backward_kernel, "*bf16 *bf16 *bf16 i32 i32", {"ROWS": 1, "COLS": 4096}, 8),
    Build(_softmax_backward_kernel, "*fp32 *fp32 *fp32 i32 i32", {"ROWS": 1, "COLS": 16384}, 16),
]
