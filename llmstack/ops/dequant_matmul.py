"""Weight-only quantised products: the weight stays packed in memory and is dequantised in registers, tile by tile.

    y = x Wᵀ        W[n, k] = s[n, k/g] (q[n, k] − z[n, k/g])        as ops/quantise.py packs it: 4 or 8 bits
                    W[n, k] = a[n, k/64] · level[q[n, k]]            as ops/nf4.py does

x [..., K], W [N, K] packed: 4 bits uint8 [N, K/2], the even k in the high nibble; 8 bits uint8 [N, K]. s, z [N, K/g]; a
scale for each row alone is g = K. NF4's a is taken as fp32 [N·K/64]; if it is quantised itself, `single_torch` first.

Values become x's dtype, products are added up in fp32. A program has BN rows of W against up to 64 rows of x (W first,
as in the flat product of ops/matmul.py). M rows of n bytes need ⌈M/64⌉ passes; bytes read, with b bits a code and c
bytes of constants for a group (8 for s and z in fp32, 4 for a):

    NK (b/8 + c/g) ⌈M/64⌉  +  nMK ⌈N/BN⌉                      written nMN                     2MNK operations

against nNK of plain weights: for g = 64 and fp16, 0.31 with 4 bits, 0.28 for NF4; with 8 bits a row 0.5. At few rows
that is the time; at many, operations are, and a weight's dequantisation comes on top. (On a GPU a group of more than
128 has its constants loaded again every 128 values.)
"""

import torch

from llmstack.ops._triton import INTERPRETED, Build, available, operands, tl, triton
from llmstack.ops.matmul import padded
from llmstack.ops.nf4 import levels, nf4_linear_np, nf4_linear_torch
from llmstack.ops.quantise import int_linear_np, int_linear_torch


@triton.jit
def _dequant_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, level_ptr, y_ptr, M, N, K, groups, GROUP: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y [M, N], a tile [BN, BM] of yᵀ a program. GROUP = 0: one scale a row. LEVELS: a code's rank in a table of 16."""
    PER_BYTE: tl.constexpr = 8 // BITS
    row = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)  # [BN]
    m = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)  # [BM]
    byte = tl.arange(0, BK // PER_BYTE)
    acc = tl.zeros([BN, BM], tl.float32)
    table = tl.load(level_ptr + tl.arange(0, 16)) if LEVELS else 0.0
    if not GROUP:
        scale = tl.load(scale_ptr + row, mask=row < N, other=0.0)[:, None]
        zero = tl.load(zero_ptr + row, mask=row < N, other=0.0)[:, None]
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
        at = start // PER_BYTE + byte
        inside = (row[:, None] < N) & (at[None, :] < K // PER_BYTE)
        code = tl.load(w_ptr + row[:, None] * (K // PER_BYTE) + at[None, :], mask=inside, other=0)
        if BITS == 4:
            code = tl.interleave(code >> 4, code & 15)  # [BN, BK]
        if GROUP:
            group = row * groups + start // GROUP
            scale = tl.load(scale_ptr + group, mask=row < N, other=0.0)[:, None]
            if not LEVELS:
                zero = tl.load(zero_ptr + group, mask=row < N, other=0.0)[:, None]
        if LEVELS:
            value = tl.reshape(tl.gather(table, tl.reshape(code, [BN * BK]).to(tl.int32), 0), [BN, BK])
        else:
            value = code.to(tl.float32) - zero
        acc = tl.dot((value * scale).to(x.dtype), x, acc, input_precision="ieee")
    inside = (row[:, None] < N) & (m[None, :] < M)
    tl.store(y_ptr + m[None, :] * N + row[:, None], acc, mask=inside)


def int_linear_triton(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int = 4):
    """y [..., out] of x [..., in], packed [out, in bits / 8] of 4 or 8 bits; a group is 16, 32, 64 … or a whole row."""
    if bits not in (4, 8) or scale.shape != zero.shape:
        raise ValueError(f"the kernel takes 4 or 8 bits, a zero point a scale; got {bits} bits: use int_linear_torch")
    N, K = len(packed), packed.shape[1] * 8 // bits
    if scale.ndim != 2 or len(scale) != N or not scale.shape[1] or K % scale.shape[1]:
        raise ValueError(f"scale and zero are [out = {N}, in / group], groups fill in = {K}; got {list(scale.shape)}")
    return _launch(x, packed, scale.float(), zero.float(), bits, N, K, K // scale.shape[1])


def nf4_linear_triton(x: torch.Tensor, packed: torch.Tensor, a: torch.Tensor, shape: tuple[int, int], block: int = 64):
    """y [..., out] of x [..., in] and NF4 codes of a weight `shape` = (out, in); `block` divides `in`."""
    N, K = shape
    if block < 1 or K % block or packed.numel() * 2 != N * K or a.numel() * block != N * K:
        given = f"{packed.numel()} bytes and {a.numel()} constants"
        raise ValueError(f"{given} for {N} rows of {K} whole blocks of {block}: use nf4_linear_torch")
    return _launch(x, packed.view(N, K // 2), a.float().view(N, K // block), None, 4, N, K, block)


def _launch(x, packed, scale, zero, bits: int, N: int, K: int, group: int) -> torch.Tensor:
    if not x.ndim or x.shape[-1] != K:
        raise ValueError(f"x is [..., in = {K}], got {list(x.shape)}")
    row_scale = group == K and zero is not None
    if not row_scale and (group < 16 or group & (group - 1)):
        raise ValueError(f"groups of {group}, but the kernel takes 16, 32, 64 … or whole rows: use the torch version")
    (rows,) = operands(x.reshape(x.shape[:-1].numel(), K).contiguous())
    M = len(rows)
    y = torch.empty(M, N, dtype=rows.dtype, device=x.device)
    BN, BK = (256, 256) if INTERPRETED else (64, 256 // x.element_size())
    BM, BK = padded(M) if M <= 64 else 64, BK if row_scale else min(group, BK)
    if y.numel():
        nf4, scale = zero is None, scale.contiguous()
        zero, table = (scale, torch.from_numpy(levels("nf4")).to(x.device)) if nf4 else (zero.contiguous(), scale)
        settings = 0 if row_scale else group, bits, nf4, BM, BN, BK
        grid = (triton.cdiv(N, BN), triton.cdiv(M, BM))
        arrays, warps = (rows, packed.contiguous(), scale, zero, table, y), 8 if rows.element_size() == 4 else 4
        _dequant_kernel[grid](*arrays, M, N, K, K // group, *settings, num_warps=warps)
    return y.view(*x.shape[:-1], N).to(x.dtype)


IMPLS = available({"numpy": int_linear_np, "torch": int_linear_torch, "triton": int_linear_triton})
NF4_IMPLS = available({"numpy": nf4_linear_np, "torch": nf4_linear_torch, "triton": nf4_linear_triton})
_TYPES = "*bf16 *u8 *fp32 *fp32 *fp32 *bf16 i32 i32 i32 i32"
AOT = [  # bits, group, rows of x, NF4
    Build(_dequant_kernel, _TYPES, dict(GROUP=g, BITS=bits, LEVELS=nf4, BM=rows, BN=64, BK=g or 128))
    for bits, g, rows, nf4 in [(4, 128, 8, False), (4, 64, 64, False), (8, 0, 16, False), (4, 64, 8, True)]
]
