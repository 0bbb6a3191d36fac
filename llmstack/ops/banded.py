"""Banded (sliding-window) attention: query i sees the keys from i − back to i + ahead (Beltagy et al. 2020,
Longformer, arXiv:2004.05150, section 3.1; with ahead = 0 it is causal, as in Mistral 7B, arXiv:2310.06825).

    out = softmax(Q Kᵀ / √Dh where −ahead <= i − j <= back) V          q, k, v, out [B, H, T, Dh]

The dense form writes T² scores and throws most away. Here a block of c queries reads one run of c + back + ahead keys,
so that the work grows as T:

    operations  4 B H T (c + w) Dh      scores in memory  B H T (c + w)      w = back + ahead, c = w by default

The kernels are those of ops/flash, which skip the tiles outside a band and write no scores at all, forward or backward:
they read q once, and k and v (1 + w/c) times. NumPy's backward is attention's own with the band as its mask.
"""

import numpy as np
import torch

from llmstack.ops._triton import available
from llmstack.ops.attention import attention_np, attention_np_backward
from llmstack.ops.flash import Flash
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, back: int, ahead: int = 0, keep: torch.Tensor | None = None,
    block: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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


def banded_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, back: int, ahead: int = 0) -> torch.Tensor:
    """Heads of up to 256 values, of any strides; fp32, fp16 or bf16; differentiable."""
    _check(q, k, v, back, ahead)
    return Flash.apply(q, k, v, None, dict(causal=True, window=back + 1, ahead=ahead))[0]


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
