"""Dropout (Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a) whose mask is a function, not a memory.

    y = x · keep / (1 − p),  keep = random(seed, index) > p        E[y] = x        dx = dy · keep / (1 − p)

The random numbers are counter-based (Philox-4x32-10, Salmon et al. 2011, doi:10.1145/2063384.2063405): the number at an
index follows from seed and index alone. So backward draws the mask again in place of storing it, a block that is
computed again gets the same mask, and ranks that hold parts of x draw their part (`offset`). NumPy, torch and Triton
give the same bits (below index 2^31 those of `tl.rand`).

About 100 integer operations a value. Forward and backward read and write bN bytes each, and no mask.
"""

import numpy as np
import torch

from llmstack.ops._triton import INTERPRETED, Build, available, tl, triton

ROUND = (0xD2511F53, 0xCD9E8D57)  # multipliers
KEY = (0x9E3779B9, 0xBB67AE85)  # what the key grows by in each round
LOW = 0xFFFFFFFF


def philox(index, seed: int):
    """The first of four random 32-bit words for each index, in 64-bit integers: NumPy arrays or torch tensors."""
    c, k = [index & LOW, index >> 32, index * 0, index * 0], [seed & LOW, seed >> 32 & LOW]
    for _ in range(10):
        a, b = c[0] * ROUND[0], c[2] * ROUND[1]
        c = [(b >> 32 & LOW) ^ c[1] ^ k[0], b & LOW, (a >> 32 & LOW) ^ c[3] ^ k[1], a & LOW]
        k = [(k[0] + KEY[0]) & LOW, (k[1] + KEY[1]) & LOW]
    return c[0]


def random_np(shape: tuple[int, ...], seed: int, offset: int = 0) -> np.ndarray:
    """Uniform fp32 numbers in [0, 1) for the indices offset, offset + 1, …"""
    with np.errstate(over="ignore"):  # products wrap to 64 bits
        word = philox(np.arange(offset, offset + int(np.prod(shape))), seed)
    return (np.where(word > LOW >> 1, LOW - word, word).astype(np.float32) * np.float32(SCALE)).reshape(shape)


def dropout_np(x: np.ndarray, p: float, seed: int, offset: int = 0) -> np.ndarray:
    _check(p)
    return np.where(random_np(x.shape, seed, offset) > p, x / (1 - p), 0).astype(x.dtype)


def dropout_torch(x: torch.Tensor, p: float, seed: int, offset: int = 0) -> torch.Tensor:
    _check(p)
    word = philox(torch.arange(offset, offset + x.numel(), device=x.device), seed)
    uniform = torch.where(word > LOW >> 1, LOW - word, word).float() * SCALE
    return torch.where(uniform.view(x.shape) > p, x / (1 - p), 0)


@triton.jit
def _dropout_kernel(x_ptr, y_ptr, N, p, seed, offset, BLOCK: tl.constexpr):
    """A program takes BLOCK values: x is read once, y written once, the mask is never in memory."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    index = at + offset
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    keep = tl.uint_to_uniform_float(word) > p
    tl.store(y_ptr + at, tl.where(keep, x / (1 - p), 0.0), mask=at < N)


def dropout_triton(x: torch.Tensor, p: float, seed: int, offset: int = 0) -> torch.Tensor:
    """fp32, fp16 or bf16 of any shape; its gradient is the same function of dy."""
    _check(p)
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _dropout_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), p, seed, offset, BLOCK)
    return y


def _check(p: float):
    if not 0 <= p < 1:
        raise ValueError(f"p = {p!r}, but the share of values to drop is at least 0 and below 1")


SCALE = 4.6566127342e-10  # just under 2^-31
BLOCK = 1 << 16 if INTERPRETED else 1024

IMPLS = available({"numpy": dropout_np, "torch": dropout_torch, "triton": dropout_triton})
BACKWARDS = {"numpy": dropout_np}  # of dy
AOT = [
    Build(_dropout_kernel, "*bf16 *bf16 i32 fp32 i64 i64", {"BLOCK": 1024}),
    Build(_dropout_kernel, "*fp32 *fp32 i32 fp32 i64 i64", {"BLOCK": 1024}),
]
