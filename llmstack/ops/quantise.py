"""Whole-number weights in groups: a scale and a zero point for each run of `group` neighbours in a row.

    w ≈ s (q − z)         q = clip(round(w / s) + z, 0, 2ᵇ − 1)        w, q [out, in]     s, z [out, in / group]

    asymmetric    s = (max − min) / (2ᵇ − 1)    z = round(−min / s)    min ≤ 0 ≤ max, so that zero is exact
    symmetric     s = max |w| / (2ᵇ⁻¹ − 1)      z = 2ᵇ⁻¹               the code 0 is not used

group = 0 is one scale a row (per channel). A weight is at most s / 2 off (Jacob et al. 2017, arXiv:1712.05877).
Codes are always unsigned and z stands apart, which is what GPTQ, AWQ and QA-LoRA files hold; z need not be whole.

Packed layout: codes of b bits follow each other in row-major order, most significant bit first. With b = 4 a byte holds
value 2i in its high nibble and 2i + 1 in its low one (bitsandbytes' order), with b = 8 one value; with b = 3, 3 bytes
hold 8 values. So a matrix of 4-bit codes is uint8 [out, in / 2]; with fp32 s and z a weight takes b + 64 / group bits.

The linear layer dequantises and multiplies: 2R·out·in operations for R rows, and b/8 bytes a weight in place of 4.
"""

from math import gcd

import numpy as np
import torch
from torch import Tensor

BITS = (2, 3, 4, 8)


def unpack_np(packed: np.ndarray, bits: int) -> np.ndarray:
    """Bytes [..., n bits / 8] -> uint8 codes [..., n]."""
    old, new = _layout(bits)
    words = sum(packed[..., i :: len(old)].astype(int) << shift for i, shift in enumerate(old))
    codes = (words[..., None] >> new & 2**bits - 1).astype(np.uint8)
    return codes.reshape(*packed.shape[:-1], words.shape[-1] * len(new))


def dequantise_np(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    g = codes.reshape(*scale.shape, -1).astype(scale.dtype)  # [out, in / group, group]
    return ((g - zero[..., None]) * scale[..., None]).reshape(codes.shape)


def int_linear_np(x: np.ndarray, packed: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int = 4) -> np.ndarray:
    """y [..., out] of x [..., in] and packed codes [out, in bits / 8]."""
    return x @ dequantise_np(unpack_np(packed, bits), scale, zero).T


def pack_torch(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., n] -> bytes [..., n bits / 8]."""
    into, shifts = _layout(bits, codes.shape[-1])
    return _regroup_torch(codes, shifts, into, 255)


def unpack_torch(packed: Tensor, bits: int) -> Tensor:
    into, shifts = _layout(bits)
    return _regroup_torch(packed, into, shifts, 2**bits - 1)


def _regroup_torch(x: Tensor, old: list[int], new: list[int], mask: int) -> Tensor:
    words = sum(x[..., i :: len(old)].int() << shift for i, shift in enumerate(old))
    return torch.stack([(words >> shift & mask).to(torch.uint8) for shift in new], -1).flatten(-2)


def quantise_torch(w: Tensor, bits: int = 4, group: int = 0, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [out, in], scales, zero points [out, in / group]. Raises ValueError where a group leaves a rest."""
    g = w.unflatten(1, (-1, _group(w, bits, group)))  # [out, in / group, group]
    if symmetric:
        scale = g.abs().amax(-1) / (2 ** (bits - 1) - 1)
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = g.amin(-1).clamp(max=0), g.amax(-1).clamp(min=0)
        scale = (high - low) / (2**bits - 1)
        zero = torch.round(-low / scale.masked_fill(scale == 0, 1))
    scale = scale.masked_fill(scale == 0, 1)  # a group of zeros
    q = (torch.round(g / scale[..., None]) + zero[..., None]).clamp(0, 2**bits - 1)
    return q.to(torch.uint8).flatten(1), scale, zero


def dequantise_torch(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    g = codes.view(*scale.shape, -1).to(scale.dtype)  # [out, in / group, group]
    return ((g - zero[..., None]) * scale[..., None]).flatten(1)


def int_linear_torch(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, bits: int = 4) -> Tensor:
    return x @ dequantise_torch(unpack_torch(packed, bits), scale, zero).T  # [..., out]


def _layout(bits: int, values: int | None = None) -> tuple[list[int], list[int]]:
    """Shifts of the bytes and of the values of one word, the shortest run of whole bytes that holds whole values."""
    if bits not in BITS:
        raise ValueError(f"bits = {bits!r}, but codes have {', '.join(map(str, BITS))}")
    size = bits * 8 // gcd(bits, 8)  # bits of a word
    if values is not None and values * bits % size:
        raise ValueError(f"{values} codes of {bits} bits do not fill whole words: pad them to {size // bits}s")
    return list(range(size - 8, -1, -8)), list(range(size - bits, -1, -bits))


def _group(w, bits: int, group: int) -> int:
    _layout(bits)
    if w.ndim != 2 or not w.shape[1] or group < 0 or group and w.shape[1] % group:
        raise ValueError(f"w is [out, in] and in divides by group; got {list(w.shape)} and {group} (0: a whole row)")
    return group or w.shape[1]


IMPLS = {"numpy": int_linear_np, "torch": int_linear_torch}
