"""The AdamW step (Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2), in one pass over memory.

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²        m̂ = m / (1 − β₁ᵗ)        v̂ = v / (1 − β₂ᵗ)
    w ← (1 − lr λ) w − lr m̂ / (√v̂ + ε)                          w, g, m, v of one shape; t = 1, 2, …

15 operations a value, of which an unfused framework makes a dozen passes over memory. Fused, N values of b bytes cost
4bN read and 3bN written (28 bytes a value in fp32), whatever the shape: half an operation a byte, so the time of an
update is the time of its bytes.

NumPy returns new arrays; torch and Triton change w, m and v in place.
"""

import numpy as np
import torch

from llmstack.ops._triton import INTERPRETED, Build, available, tl, triton

BETAS = (0.9, 0.999)


def adamw_np(w, g, m, v, t: int, lr: float, betas=BETAS, eps: float = 1e-8, decay: float = 0.0):
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    root = np.sqrt(v / (1 - betas[1] ** t))
    return (1 - lr * decay) * w - lr * m / (1 - betas[0] ** t) / (root + eps), m, v


@torch.no_grad()
def adamw_torch(w, g, m, v, t: int, lr: float, betas=BETAS, eps: float = 1e-8, decay: float = 0.0):
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    root = v.sqrt().div_((1 - betas[1] ** t) ** 0.5).add_(eps)
    w.mul_(1 - lr * decay).addcdiv_(m, root, value=-lr / (1 - betas[0] ** t))
    return w, m, v


@triton.jit
def _adamw_kernel(w_ptr, g_ptr, m_ptr, v_ptr, N, lr, b1, b2, eps, decay, fix1, fix2, BLOCK: tl.constexpr):
    """A program takes BLOCK values: w, g, m, v are read once, w, m, v written once; fix = 1 − βᵗ."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    w = tl.load(w_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    m = b1 * tl.load(m_ptr + at, mask=at < N, other=0.0) + (1 - b1) * g
    v = b2 * tl.load(v_ptr + at, mask=at < N, other=0.0) + (1 - b2) * g * g
    step = m / fix1 / (tl.sqrt(v / fix2) + eps)
    tl.store(w_ptr + at, (1 - lr * decay) * w - lr * step, mask=at < N)
    tl.store(m_ptr + at, m, mask=at < N)
    tl.store(v_ptr + at, v, mask=at < N)


@torch.no_grad()
def adamw_triton(w, g, m, v, t: int, lr: float, betas=BETAS, eps: float = 1e-8, decay: float = 0.0):
    """w and g in fp32, fp16 or bf16, m and v in fp32, all contiguous; raises ValueError where they are not."""
    for name, x in dict(w=w, g=g, m=m, v=v).items():
        if x.shape != w.shape or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous and of w's shape {list(w.shape)}, got {list(x.shape)}")
    fixes = (1 - betas[0] ** t, 1 - betas[1] ** t)
    if w.numel():
        grid = (triton.cdiv(w.numel(), BLOCK),)
        _adamw_kernel[grid](w, g, m, v, w.numel(), lr, *betas, eps, decay, *fixes, BLOCK)
    return w, m, v


BLOCK = 1 << 16 if INTERPRETED else 1024

IMPLS = available({"numpy": adamw_np, "torch": adamw_torch, "triton": adamw_triton})
_SCALARS = "i32 fp32 fp32 fp32 fp32 fp32 fp32 fp32"
AOT = [
    Build(_adamw_kernel, f"*fp32 *fp32 *fp32 *fp32 {_SCALARS}", {"BLOCK": 1024}),
    Build(_adamw_kernel, f"*bf16 *bf16 *fp32 *fp32 {_SCALARS}", {"BLOCK": 1024}),
]
