"""Small operations joined to their neighbours, so that what lies between them never goes to memory and back.

    add_norm               s = x + r,  y = norm(s)         norm: RMSNorm or LayerNorm; x, r, s, y [..., D]   g, b [D]
    bias_gelu              y = gelu(x + b)                 x, y [..., F]   b [F]
    linear_cross_entropy   cross_entropy(x Wᵀ, targets)    x [..., D]   W [V, D]   targets [...] integers

The first two surround the matmuls of a block (DeepSpeed Inference, Aminabadi et al. 2022, arXiv:2207.00032, III.B).
The third goes over the vocabulary in blocks with a running maximum and sum, so logits [R, V] exist nowhere (Wijmans et
al. 2024, arXiv:2411.09009); Liger Kernel (Hsu et al. 2024, arXiv:2410.10989) goes over the rows instead. Backward makes
a chunk of the logits again from what each row left, its maximum m and log Σ exp(z − m):

    dz = (exp(z − m − log Σ) − onehot(target)) · dloss        dx += dz W_chunk        dW_chunk = dzᵀ x

For R rows of D, F or V values of w bytes (targets of 8, statistics of 4), with tiles of P rows and Q of the vocabulary:

                           bytes read                        written     unfused, more
    add_norm               w(2RD + D), LayerNorm w(2RD+2D)   2wRD        wRD     the sum, read again
    bias_gelu              w(RF + F)                         wRF         2wRF    x + b, written and read
    its backward           w(2RF + F)                        wRF         2wRF
    linear_cross_entropy   w(RD⌈V/Q⌉ + VD⌈R/P⌉) + 8R         12R         2wRV    logits, written and read

add_norm's backward is the norm's own, with ds added to its dx for x and r alike; that of the third makes its products
with the library's matmul.
"""

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from llmstack.ops._triton import INTERPRETED, TILE, Build, available, no_gradient, rows_of, same_shape, tl, triton
from llmstack.ops.activations import gelu_np, gelu_np_backward, gelu_torch
from llmstack.ops.cross_entropy import _count, _kept, cross_entropy_np, cross_entropy_np_backward
from llmstack.ops.layernorm import add_norm, layernorm_np, layernorm_torch
from llmstack.ops.rmsnorm import _check, rmsnorm_np, rmsnorm_torch


def _centred(kind: str) -> bool:
    if kind not in ("rmsnorm", "layernorm"):
        raise ValueError(f"kind = {kind!r}, but a norm is 'rmsnorm' or 'layernorm'")
    return kind == "layernorm"


def add_norm_np(x, r, g, b=None, eps: float = 1e-6, kind: str = "rmsnorm") -> tuple[np.ndarray, np.ndarray]:
    s = x + r  # [..., D]
    return s, layernorm_np(s, g, b, eps) if _centred(kind) else rmsnorm_np(s, g, eps)


def bias_gelu_np(x: np.ndarray, b: np.ndarray) -> np.ndarray:
    return gelu_np(x + b)  # [..., F]


def bias_gelu_np_backward(dy: np.ndarray, x: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    dx = gelu_np_backward(dy, x + b)  # [..., F]
    return dx, dx.reshape(-1, b.size).sum(0)


def linear_cross_entropy_np(x, w, targets, ignore_index: int = -100, reduction: str = "mean") -> np.ndarray:
    return cross_entropy_np(x @ w.T, targets, ignore_index, reduction)


def linear_cross_entropy_np_backward(
    dloss, x, w, targets, ignore_index: int = -100, reduction: str = "mean"
) -> tuple[np.ndarray, np.ndarray]:
    dz = cross_entropy_np_backward(dloss, x @ w.T, targets, ignore_index, reduction)  # [..., V]
    return dz @ w, dz.reshape(-1, len(w)).T @ x.reshape(-1, w.shape[1])


def add_norm_torch(x, r, g, b=None, eps: float = 1e-6, kind: str = "rmsnorm") -> tuple[torch.Tensor, torch.Tensor]:
    s = x + r  # [..., D]
    return s, layernorm_torch(s, g, b, eps) if _centred(kind) else rmsnorm_torch(s, g, eps)


def bias_gelu_torch(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return gelu_torch(x + b)  # [..., F]


def _statistics_torch(x, w, targets):
    """z[target] − m, m and log Σ exp(z − m) of each row, [R] each, a chunk of the vocabulary at a time."""
    wide = torch.promote_types(x.dtype, torch.float32)
    m, total = (torch.full_like(x[:, 0], start, dtype=wide) for start in (-torch.inf, 0))
    for part in w.split(CHUNK):
        z = (x @ part.T).to(wide)  # [R, chunk]
        new = torch.maximum(m, z.amax(1))
        total = total * torch.exp(m - new) + torch.exp(z - new[:, None]).sum(1)
        m = new
    return (x * w[targets]).sum(1, dtype=wide) - m, m, total.log()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(x, w, targets, kept, statistics):
        wide = torch.promote_types(x.dtype, torch.float32)
        picked, m, log_sum = statistics(x, w, targets) if len(x) else torch.zeros(3, 0, dtype=wide, device=x.device)
        return torch.where(kept, log_sum - picked, 0), m, log_sum

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:4], *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, *_):
        x, w, targets, kept, m, log_sum = ctx.saved_tensors
        dx, dw, weight = torch.zeros_like(x, dtype=m.dtype), torch.empty_like(w), (kept * dloss)[:, None]
        for start in range(0, len(w), CHUNK):
            part = w[start : start + CHUNK]  # [chunk, D]
            dz = torch.exp((x @ part.T).to(m.dtype) - m[:, None] - log_sum[:, None])  # [R, chunk]
            onehot = targets[:, None] == torch.arange(start, start + len(part), device=x.device)
            dz = ((dz - onehot.to(dz.dtype)) * weight).to(x.dtype)
            dx += dz @ part
            dw[start : start + CHUNK] = dz.T @ x
        return dx.to(x.dtype), dw, None, None, None


def linear_cross_entropy_torch(
    x, w, targets, ignore_index: int = -100, reduction: str = "mean", statistics=_statistics_torch
) -> torch.Tensor:
    if w.ndim != 2 or x.ndim < 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x [..., D] meets w [V, D], got {list(x.shape)} and {list(w.shape)}")
    kept = _kept(x[..., :1].expand(*x.shape[:-1], len(w)), targets, ignore_index, reduction)  # [...]
    ids = torch.where(kept, targets, 0).flatten()  # [R]
    loss = _LinearCrossEntropy.apply(x.flatten(0, -2), w, ids, kept.flatten(), statistics)[0].view(targets.shape)
    return loss if reduction == "none" else loss.sum() / _count(kept, reduction)


def add_norm_triton(x, r, g, b=None, eps: float = 1e-6, kind: str = "rmsnorm") -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of up to 16 Ki values, contiguous or not; raises ValueError where r, g or b do not fit x."""
    same_shape("r", r, "x", x)
    return add_norm(x, r, g, b, eps, _centred(kind))


@triton.jit
def _bias_gelu_kernel(
    x_ptr, b_ptr, dy_ptr, y_ptr, R, F, BACKWARD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """A program takes a tile: x, and dy backward, are read once, y or dx is written once, b is read once a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]  # [1, COLS]
    at, inside = row * F + col, (row < R) & (col < F)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLS]
    x += tl.load(b_ptr + col, mask=col < F, other=0.0).to(tl.float32)
    y = 0.5 * (1 + tl.erf(x * 0.7071067811865476))  # Φ(x)
    if BACKWARD:
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = dy * (y + x * tl.exp(-0.5 * x * x) * 0.3989422804014327)
    else:
        y = x * y
    tl.store(y_ptr + at, y, mask=inside)


def bias_gelu_triton(x: torch.Tensor, b: torch.Tensor, dy: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(x + b), or with dy the gradient of x. Any shape and strides; raises ValueError where b does not fit x."""
    _check(x, b, b)
    no_gradient(b)
    rows, COLS = rows_of(x), min(triton.next_power_of_2(max(x.shape[-1], 1)), 1024)
    y, ROWS = torch.empty_like(rows), TILE // COLS
    if y.numel():
        grid = (triton.cdiv(len(rows), ROWS), triton.cdiv(x.shape[-1], COLS))
        dys = rows if dy is None else rows_of(dy)
        _bias_gelu_kernel[grid](rows, b.contiguous(), dys, y, *rows.shape, dy is not None, ROWS, COLS, num_warps=8)
    return y.view(x.shape)


def bias_gelu_triton_backward(dy, x, b) -> tuple[torch.Tensor, torch.Tensor]:
    same_shape("dy", dy, "x", x)
    dx = bias_gelu_triton(x, b, dy)
    return dx, dx.reshape(-1, len(b)).sum(0)


@triton.jit
def _statistics_kernel(
    x_ptr, w_ptr, id_ptr, out_ptr, R, V, D, ROWS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """A program takes ROWS rows over the whole vocabulary, WORDS at a time: logits stay in registers, three values a
    row are written. W is read once a program, x once for each WORDS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    depth = tl.arange(0, DEPTH)[None, :]  # [1, DEPTH]
    target = tl.load(id_ptr + row, mask=row < R, other=-1)[:, None]  # [ROWS, 1]
    x_at = row.to(tl.int64)[:, None] * D + depth
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total, picked = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, V, WORDS):
        word = start + tl.arange(0, WORDS)  # [WORDS]
        w_at = word.to(tl.int64)[:, None] * D + depth
        z = tl.zeros([ROWS, WORDS], tl.float32)
        for d in range(0, D, DEPTH):
            x = tl.load(x_ptr + x_at + d, mask=(row < R)[:, None] & (depth + d < D), other=0.0)  # [ROWS, DEPTH]
            w = tl.load(w_ptr + w_at + d, mask=(word < V)[:, None] & (depth + d < D), other=0.0)  # [WORDS, DEPTH]
            z = tl.dot(x, tl.trans(w), z, input_precision="ieee")
        picked += tl.sum(tl.where(word[None, :] == target, z, 0.0), axis=1)
        z = tl.where(word[None, :] < V, z, -float("inf"))
        new = tl.maximum(m, tl.max(z, axis=1))
        total = total * tl.exp(m - new) + tl.sum(tl.exp(z - new[:, None]), axis=1)
        m = new
    tl.store(out_ptr + row, picked - m, mask=row < R)
    tl.store(out_ptr + R + row, m, mask=row < R)
    tl.store(out_ptr + 2 * R + row, tl.log(total), mask=row < R)


def _statistics_triton(x, w, targets):
    x, w = (t.float() for t in (x, w)) if INTERPRETED else (x, w.to(x.dtype))
    out, (ROWS, WORDS, DEPTH) = torch.empty(3, len(x), dtype=torch.float32, device=x.device), TILES
    grid = (triton.cdiv(len(x), ROWS),)
    _statistics_kernel[grid](rows_of(x), rows_of(w), targets, out, len(x), *w.shape, ROWS, WORDS, DEPTH, num_warps=8)
    return out


def linear_cross_entropy_triton(x, w, targets, ignore_index: int = -100, reduction: str = "mean") -> torch.Tensor:
    """Rows and vocabulary of any size, differentiable: the kernel forward, chunks of the vocabulary backward."""
    return linear_cross_entropy_torch(x, w, targets, ignore_index, reduction, _statistics_triton)


CHUNK = 8192  # words of the vocabulary whose logits exist at once
TILES = (128, 128, 128) if INTERPRETED else (64, 128, 64)  # rows, words and depth of a program's product

ADD_NORM = available({"numpy": add_norm_np, "torch": add_norm_torch, "triton": add_norm_triton})
BIAS_GELU = available({"numpy": bias_gelu_np, "torch": bias_gelu_torch, "triton": bias_gelu_triton})
BIAS_GELU_BACKWARDS = available({"numpy": bias_gelu_np_backward, "triton": bias_gelu_triton_backward})
LINEAR_CROSS_ENTROPY = {"numpy": linear_cross_entropy_np, "torch": linear_cross_entropy_torch}
LINEAR_CROSS_ENTROPY = available(LINEAR_CROSS_ENTROPY | {"triton": linear_cross_entropy_triton})
IMPLS, BACKWARDS = BIAS_GELU, BIAS_GELU_BACKWARDS
AOT = [
    Build(_bias_gelu_kernel, "*bf16 " * 4 + "i32 i32", {"BACKWARD": False, "ROWS": 4, "COLS": 1024}, 8),
    Build(_bias_gelu_kernel, "*bf16 " * 4 + "i32 i32", {"BACKWARD": True, "ROWS": 4, "COLS": 1024}, 8),
    Build(_statistics_kernel, "*bf16 *bf16 *i64 *fp32 i32 i32 i32", {"ROWS": 64, "WORDS": 128, "DEPTH": 64}, 8),
]
