"""Cross-entropy of logits against token ids.

    loss_r = logsumexp(z_r) − z_r[target_r]              logits z [..., V]       targets [...] integers

    dz_r = (softmax(z_r) − onehot(target_r)) · dloss_r

Positions whose target is ignore_index have loss 0 and count for nothing; reduction "mean" divides by the number of the
others, and is 0 (with zero gradients) where there are none. "sum" adds, "none" returns a loss for each position. With
the logarithm to base e, exp(mean) is the perplexity.

For R rows of V values of b bytes, a comparison, an exponential and a division as one operation each:

                             operations    bytes read    bytes written
    forward                  4RV           bRV           12R
    backward                 8RV           2bRV          bRV
    softmax kept, unfused    9RV           4bRV          2bRV            forward and backward together

The kernels go over V in blocks with a running maximum, so a row may be longer than registers hold, and no softmax is
kept: backward computes logsumexp again.
"""

import numpy as np
import torch

from llmstack.ops._triton import INTERPRETED, Build, available, rows_of, tl, triton
from llmstack.ops.embedding import check_ids

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy_np(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int = -100, reduction: str = "mean"
) -> np.ndarray:
    kept = _kept(logits, targets, ignore_index, reduction)  # [...]
    m = np.max(logits, axis=-1, keepdims=True)  # [..., 1]
    log_sum = np.log(np.sum(np.exp(logits - m), axis=-1))  # [...]
    picked = np.take_along_axis(logits, np.where(kept, targets, 0)[..., None], -1) - m  # [..., 1]
    loss = np.where(kept, log_sum - picked[..., 0], 0)  # [...]
    return loss if reduction == "none" else loss.sum() / loss.dtype.type(_count(kept, reduction))


def cross_entropy_np_backward(
    dloss: np.ndarray, logits: np.ndarray, targets: np.ndarray, ignore_index: int = -100, reduction: str = "mean"
) -> np.ndarray:
    kept = _kept(logits, targets, ignore_index, reduction)  # [...]
    e = np.exp(logits - np.max(logits, axis=-1, keepdims=True))  # [..., V]
    onehot = np.where(kept, targets, 0)[..., None] == np.arange(logits.shape[-1])  # [..., V]
    weight = kept * dloss / _count(kept, reduction)  # [...]
    return (e / e.sum(axis=-1, keepdims=True) - onehot) * weight[..., None]  # [..., V]


def cross_entropy_torch(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    kept = _kept(logits, targets, ignore_index, reduction)  # [...]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [..., V]
    picked = torch.log_softmax(wide, -1).gather(-1, torch.where(kept, targets, 0).long()[..., None])[..., 0]  # [...]
    loss = torch.where(kept, -picked, 0)  # [...]
    return loss if reduction == "none" else loss.sum() / _count(kept, reduction)


@triton.jit
def _cross_entropy_kernel(z_ptr, target_ptr, loss_ptr, m_ptr, log_sum_ptr, V, ignore, BLOCK: tl.constexpr):
    """A program takes a row: z crosses memory once; loss, maximum and log Σ exp(z − m) are three values a row."""
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        col = start + tl.arange(0, BLOCK)  # [BLOCK]
        z = tl.load(z_ptr + row * V + col, mask=col < V, other=-float("inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(z, axis=0))
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(m - shift) + tl.sum(tl.exp(z - shift), axis=0)
        m = new
    log_sum = tl.log(total)
    target = tl.load(target_ptr + row)
    picked = tl.load(z_ptr + row * V + target, mask=target != ignore, other=0.0).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(target != ignore, log_sum - (picked - m), 0.0))
    tl.store(m_ptr + row, m)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def _cross_entropy_backward_kernel(z_ptr, target_ptr, m_ptr, log_sum_ptr, dloss_ptr, dz_ptr, V, BLOCK: tl.constexpr):
    """A program takes BLOCK values of a row: z is read once, dz written once."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    target = tl.load(target_ptr + row)
    dloss = tl.load(dloss_ptr + row)  # 0 where the target is ignored
    z = tl.load(z_ptr + row * V + col, mask=col < V, other=-float("inf")).to(tl.float32)
    y = tl.exp(z - tl.load(m_ptr + row) - tl.load(log_sum_ptr + row))
    tl.store(dz_ptr + row * V + col, (y - tl.where(col == target, 1.0, 0.0)) * dloss, mask=col < V)


def cross_entropy_triton(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    kept = _kept(logits, targets, ignore_index, reduction)  # [...]
    loss = _rows(logits, targets, ignore_index)[0].view(targets.shape)
    return loss if reduction == "none" else loss.sum() / _count(kept, reduction)


def cross_entropy_triton_backward(
    dloss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    kept = _kept(logits, targets, ignore_index, reduction)  # [...]
    weight = (kept * dloss / _count(kept, reduction)).float().reshape(-1).contiguous()  # [R]
    rows = rows_of(logits)  # [R, V]
    dz = torch.empty_like(rows)
    R, V = rows.shape
    if R:
        _, m, log_sum = _rows(logits, targets, ignore_index)
        grid = (R, triton.cdiv(V, BLOCK))
        flat = targets.reshape(-1).contiguous()
        _cross_entropy_backward_kernel[grid](rows, flat, m, log_sum, weight, dz, V, BLOCK)
    return dz.view(logits.shape)


def _rows(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, ...]:
    """Loss, maximum and log Σ exp(z − m) of each row, [R] each; m + that log rounds worse."""
    rows = rows_of(logits)  # [R, V]
    loss, m, log_sum = torch.empty(3, len(rows), dtype=torch.float32, device=logits.device)
    if len(rows):
        flat = targets.reshape(-1).contiguous()
        _cross_entropy_kernel[(len(rows),)](rows, flat, loss, m, log_sum, rows.shape[1], ignore_index, BLOCK)
    return loss, m, log_sum


def _kept(logits, targets, ignore_index: int, reduction: str):
    """Which positions count. Raises ValueError on shapes or a reduction that do not fit, IndexError on a target."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits [..., V] need targets [...]: got {list(logits.shape)} and {list(targets.shape)}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction = {reduction!r}, but it must be one of {', '.join(REDUCTIONS)}")
    kept = targets != ignore_index
    check_ids(targets * kept, logits.shape[-1], "targets")
    return kept


def _count(kept, reduction: str):
    return kept.sum().clip(1) if reduction == "mean" else 1


BLOCK = 1 << 16 if INTERPRETED else 4096

IMPLS = available({"numpy": cross_entropy_np, "torch": cross_entropy_torch, "triton": cross_entropy_triton})
BACKWARDS = available({"numpy": cross_entropy_np_backward, "triton": cross_entropy_triton_backward})
AOT = [
    Build(_cross_entropy_kernel, "*bf16 *i64 *fp32 *fp32 *fp32 i32 i32", {"BLOCK": 4096}),
    Build(_cross_entropy_kernel, "*fp32 *i64 *fp32 *fp32 *fp32 i32 i32", {"BLOCK": 4096}),
    Build(_cross_entropy_backward_kernel, "*bf16 *i64 *fp32 *fp32 *fp32 *bf16 i32", {"BLOCK": 4096}),
    Build(_cross_entropy_backward_kernel, "*fp32 *i64 *fp32 *fp32 *fp32 *fp32 i32", {"BLOCK": 4096}),
]
