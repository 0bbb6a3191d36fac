"""Banded (sliding-window) attention: query i sees the keys from i − back to i + ahead (Beltagy et al. 2020,
Longformer, arXiv:2004.05150, section 3.1; with ahead = 0 it is causal, as in Mistral 7B, arXiv:2310.06825).

    out = softmax(Q Kᵀ / √Dh where −ahead <= i − j <= back) V          q, k, v, out [B, H, T, Dh]

The dense form writes T² scores and throws most away. Here a block of c queries reads one run of c + back + ahead keys,
so that the work grows as T:

    operations  4 B H T (c + w) Dh      scores in memory  B H T (c + w)      w = back + ahead, c = w by default

The kernel goes over the run in tiles with a running maximum and sum (the online softmax of ops/softmax.py) and writes
no scores at all: it reads q once, and k and v (1 + w/c) times. Backward is attention's own (ops/attention.py) with the
band as its mask; torch gets it from autograd. There is no backward kernel.
"""

import numpy as np
import torch

from llmstack.ops._triton import INTERPRETED, Build, available, tl, triton
from llmstack.ops.attention import attention_np, attention_np_backward
from llmstack.ops.merge import attention_lse


def banded_np(q: np.ndarray, k: np.ndarray, v: np.ndarray, back: int, ahead: int = 0) -> np.ndarray:
    _check(q, k, v, back, ahead)
    return attention_np(q, k, v, mask=_band_np(q.shape[2], back, ahead))  # [B, H, T, Dh]


def banded_np_backward(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, back: int, ahead: int = 0
) -> tuple[np.ndarray, ...]:
    return attention_np_backward(dout, q, k, v, mask=_band_np(q.shape[2], back, ahead))[:3]


def _band_np(T: int, back: int, ahead: int) -> np.ndarray:
    distance = np.arange(T)[:, None] - np.arange(T)  # [T, T]
    return (distance <= back) & (distance >= -ahead)


def banded_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, back: int, ahead: int = 0) -> torch.Tensor:
    return banded_lse(q, k, v, back, ahead)[0]


def banded_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    back: int,
    ahead: int = 0,
    keep: torch.Tensor | None = None,
    block: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, H, T, Dh] and log-denominators [B, H, T]. keep [T]: False at keys that nobody sees; block: c above."""
    _check(q, k, v, back, ahead)
    T = q.shape[2]
    c = min(block or max(back + ahead, 16), max(T, 1))
    blocks = max(1, -(-T // c))
    fill = blocks * c - T
    pad = lambda x, left, right: torch.nn.functional.pad(x, (0, 0, left, right))
    runs = lambda x: pad(x, back, ahead + fill).unfold(2, c + back + ahead, c).transpose(-1, -2)
    query = torch.arange(c, device=q.device)[:, None] + back  # [c, 1], counted from where its run begins
    key = torch.arange(c + back + ahead, device=q.device)  # [c + w]
    there = torch.ones(T, dtype=torch.bool, device=q.device) if keep is None else keep
    there = torch.nn.functional.pad(there, (back, ahead + fill)).unfold(0, c + back + ahead, c)  # [blocks, c + w]
    mask = (query - key <= back) & (key - query <= ahead) & there[:, None, :]  # [blocks, c, c + w]
    rows = pad(q, 0, fill).unflatten(2, (blocks, c))  # [B, H, blocks, c, Dh]
    out, lse = attention_lse(rows, runs(k), runs(v), mask)
    return out.flatten(2, 3)[:, :, :T], lse.flatten(2, 3)[:, :, :T]


@triton.jit
def _banded_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, T, Dh, back, ahead, scale, ROWS: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """A program takes ROWS queries of a head over a run of ROWS + back + ahead keys, KEYS at a time."""
    head = tl.program_id(1).to(tl.int64) * T * Dh
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)  # [ROWS]
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    at = head + row[:, None] * Dh + col
    inside = (row[:, None] < T) & (col < Dh)
    q = tl.load(q_ptr + at, mask=inside, other=0.0)  # [ROWS, COLS]
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(tl.maximum(first - back, 0), tl.minimum(first + ROWS + ahead, T), KEYS):
        key = start + tl.arange(0, KEYS)  # [KEYS]
        there = (key[:, None] < T) & (col < Dh)
        k = tl.load(k_ptr + head + key[:, None] * Dh + col, mask=there, other=0.0)  # [KEYS, COLS]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [ROWS, KEYS]
        away = row[:, None] - key[None, :]
        seen = (away <= back) & (away >= -ahead) & (key[None, :] < T)
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, axis=1))
        shift = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp(scores - shift[:, None])
        shrink = tl.exp(m - shift)
        v = tl.load(v_ptr + head + key[:, None] * Dh + col, mask=there, other=0.0)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new
    tl.store(out_ptr + at, acc / tl.where(total == 0.0, 1.0, total)[:, None], mask=inside)


def banded_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, back: int, ahead: int = 0) -> torch.Tensor:
    """Heads of up to 256 values, contiguous or not; fp32, fp16 or bf16."""
    _check(q, k, v, back, ahead)
    B, H, T, Dh = q.shape
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or Dh > 256:
        raise TypeError(f"the kernel takes fp32, fp16 or bf16 heads of up to 256, got {q.dtype} {Dh}; use banded_torch")
    q, k, v = (x.contiguous() for x in ((q.float(), k.float(), v.float()) if INTERPRETED else (q, k, v)))
    out = torch.empty_like(q)
    COLS = max(16, triton.next_power_of_2(Dh))
    ROWS, KEYS = (128, 128) if INTERPRETED else (64, 32 if COLS > 64 else 64)
    if out.numel():
        grid = (triton.cdiv(T, ROWS), B * H)
        _banded_kernel[grid](q, k, v, out, T, Dh, back, ahead, Dh**-0.5, ROWS, KEYS, COLS)
    return out


def _check(q, k, v, back: int, ahead: int):
    if q.ndim != 4 or q.shape != k.shape or k.shape != v.shape:
        raise ValueError(
            f"q, k and v are [B, H, T, Dh] of one shape, got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}: "
            "repeat shared key-value heads first"
        )
    if back < 0 or ahead < 0:
        raise ValueError(f"back = {back} and ahead = {ahead}, but a query sees itself: both are 0 or more keys")


IMPLS = available({"numpy": banded_np, "torch": banded_torch, "triton": banded_triton})
BACKWARDS = {"numpy": banded_np_backward}
AOT = [
    Build(_banded_kernel, "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 fp32", {"ROWS": 64, "KEYS": 64, "COLS": 64}),
    Build(_banded_kernel, "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 fp32", {"ROWS": 64, "KEYS": 32, "COLS": 128}),
]
