"""Weights as the nearest of a few levels, times the largest value of their block: NF4, FP4, INT4, FP8.

    a = max |w| of a block         q = the level nearest to w / a, by rank         w ≈ a · level[q]

NormalFloat of b bits (Dettmers et al. 2023, arXiv:2305.14314, section 3): levels are quantiles of N(0, 1) at evenly
spaced probabilities from δ to ½ and from ½ to 1 − δ, 2ᵇ⁻¹ of them below and 2ᵇ⁻¹ + 1 from zero up, zero once, divided
by the largest; δ = (1/30 + 1/32) / 2 is the released offset 0.9677083. About as many weights of a trained (Gaussian)
matrix fall on each level, and zero is exact.

Double quantisation (ibid.): the blocks' a are numbers too. Less their mean, they are levels of FP8 (E4M3) in blocks of
256 with an fp32 scale each:

    bits a weight     4 + 32/64 = 4.5     →     4 + 8/64 + 32/(64 · 256) = 4.127         and 4 bytes a tensor: the mean

Packed layout: the weight [out, in] in row-major order, codes as ops.quantise packs them (4 bits: uint8 [out·in / 2],
value 2i in the high nibble), a fp32 [out·in / 64]. Blocks run on over the ends of rows; where 64 divides `in`, no block
crosses one. The last block may be short. The linear layer makes its weight anew from codes: 2R·out·in operations for
R rows, and half a byte read for each weight.
"""

from functools import cache
from math import prod

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from llmstack.ops.quantise import pack_torch, unpack_np

OFFSET = 1 - (1 / 30 + 1 / 32) / 2
ZERO = 7  # the rank of zero, with which an odd last byte is filled


@cache
def levels(kind: str = "nf4") -> np.ndarray:
    """The sorted levels of a format, fp32 in [-1, 1]: nf2 … nf8, int2 … int8 (symmetric), fp4 (E2M1), fp8 (E4M3)."""
    family, bits = kind[:-1], int(kind[-1]) if kind[-1:].isdigit() else 0
    if family == "nf" and 2 <= bits <= 8:
        up, down = (norm.ppf(np.linspace(OFFSET, 0.5, 2 ** (bits - 1) + more)[:-1]) for more in (1, 0))
        table = np.concatenate([-down, [0], up])
    elif family == "int" and 2 <= bits <= 8:
        table = np.arange(1 - 2 ** (bits - 1), 2 ** (bits - 1))
    elif kind in ("fp4", "fp8"):
        e, m = {"fp4": (2, 1), "fp8": (4, 3)}[kind]
        steps = [f * 2.0**-m if not x else (1 + f * 2.0**-m) * 2.0 ** (x - 1) for x in range(2**e) for f in range(2**m)]
        half = np.array(steps[: -1 if kind == "fp8" else None])  # E4M3's last code is NaN
        table = np.concatenate([-half[1:], half])
    else:
        raise ValueError(f"no format {kind!r}; there are nf2 … nf8, int2 … int8, fp4 and fp8")
    return np.sort(table / table.max()).astype(np.float32)


def encode_np(w: np.ndarray, kind: str = "nf4", block: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Ranks uint8 [w.size], one a value, and the largest value of each block, fp32."""
    flat, table = w.astype(np.float32).ravel(), levels(kind)
    blocks = np.pad(flat, (0, -flat.size % block)).reshape(-1, block)
    a = np.abs(blocks).max(1)
    scaled = (blocks * (1 / np.maximum(a, np.float32(1e-38)))[:, None]).ravel()[: flat.size]
    return np.searchsorted((table[1:] + table[:-1]) / 2, scaled).astype(np.uint8), a


def decode_np(codes: np.ndarray, a: np.ndarray, kind: str = "nf4", block: int = 64) -> np.ndarray:
    return levels(kind)[codes] * np.repeat(a, block)[: codes.size]


def nf4_linear_np(x: np.ndarray, packed: np.ndarray, a: np.ndarray, shape: tuple[int, int], block: int = 64):
    """y [..., out] of x [..., in]; packed uint8 [out·in / 2], a fp32 [out·in / block]; shape is (out, in)."""
    return x @ decode_np(unpack_np(packed, 4)[: prod(shape)], a, "nf4", block).reshape(shape).T


def encode_torch(w: Tensor, kind: str = "nf4", block: int = 64) -> tuple[Tensor, Tensor]:
    flat, table = w.detach().float().flatten(), torch.from_numpy(levels(kind)).to(w.device)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    a = blocks.abs().amax(1)
    scaled = (blocks * (1 / a.clamp(min=1e-38))[:, None]).flatten()[: len(flat)]
    return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8), a


def decode_torch(codes: Tensor, a: Tensor, kind: str = "nf4", block: int = 64) -> Tensor:
    table = torch.from_numpy(levels(kind)).to(codes.device)
    return table.index_select(0, codes.int()) * a.repeat_interleave(block)[: len(codes)]


def double_torch(a: Tensor, block: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    return *encode_torch(a - a.mean(), "fp8", block), a.mean()


def single_torch(codes: Tensor, second: Tensor, mean: Tensor, block: int = 256) -> Tensor:
    return decode_torch(codes, second, "fp8", block) + mean


def nf4_weight_torch(packed: Tensor, a: Tensor, shape: tuple[int, int], block: int = 64) -> Tensor:
    """The weight, [out, in] fp32. A byte finds its two values in a table of 256 pairs: at most 6 bytes a weight."""
    table = torch.from_numpy(levels("nf4")).to(packed.device)
    w = torch.cartesian_prod(table, table).index_select(0, packed.int()).flatten()[: prod(shape)]
    w = w.view(-1, block).mul_(a[:, None]) if len(w) % block == 0 else w * a.repeat_interleave(block)[: len(w)]
    return w.view(shape)


def nf4_linear_torch(x: Tensor, packed: Tensor, a: Tensor, shape: tuple[int, int], block: int = 64) -> Tensor:
    return x @ nf4_weight_torch(packed, a, shape, block).T


def nf4_pack_torch(w: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    codes, a = encode_torch(w, "nf4", block)
    return pack_torch(torch.nn.functional.pad(codes, (0, len(codes) % 2), value=ZERO), 4), a


IMPLS = {"numpy": nf4_linear_np, "torch": nf4_linear_torch}
