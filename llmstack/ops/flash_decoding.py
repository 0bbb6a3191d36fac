"""FlashDecoding: one query a sequence against a long cache, the keys cut into splits that run at the same time (Dao,
Haziza, Massa and Sizov 2023, "Flash-Decoding for long-context inference", crfm.stanford.edu/2023/10/12).

    part i   out_i = softmax(s_i) V_i,  lse_i = log Σ exp s_i,  s_i = scale · q K_iᵀ         over the keys of split i
    whole    out = Σ_i w_i out_i,  w = softmax(lse_1, lse_2, …)                              (ops/merge.py)

    q, out [B, H, Dh]     k, v [B, K, S, Dh]     lengths [B], the keys that a sequence has, S where None

One program a batch and KV head would leave most of a GPU idle at small batches; with splits there are B · K · splits.
The H/K heads of a group share a program, so each key and value is read once. With b bytes a value and N = Σ lengths:

    read      b (2 N K Dh + B H splits Dh) + 4 B K splits for lengths      written  4 B H splits (Dh + 1)
    merge     reads those parts, writes b B H Dh                           one split: b B H Dh and no merge

4 N H Dh operations over about 2 b N K Dh bytes: 2 H / (b K) operations a byte, bound by memory at any batch.

FlashDecoding++ (Hong et al. 2023, arXiv:2311.01282, section 3) puts one number φ in the place of every maximum: then no
tile waits for the one before it. That is right while low < s − φ < high for every score of a row; a row with one
outside is computed again with its maximum. The bounds are what exp may reach in the type in which weights meet v:
NARROW fits fp16's normal numbers, WIDE leaves room for sums in bf16 and fp32. It matters: over a paragraph a sixth of
the rows of the small checkpoint llama-2m leave NARROW around φ = 0, none WIDE. A program that runs again reads its
queries, keys and values a second time, and every program first 4 bytes a split, to see whether it must.
"""

import numpy as np
import torch
from numpy import ndarray as Array
from torch import Tensor

from llmstack.ops._triton import INTERPRETED, Build, available, operands, tl, triton
from llmstack.ops.merge import attention_lse, merge_np, merge_torch
from llmstack.ops.softmax import softmax_np

LOG2E = np.log2(np.e).item()
NARROW, WIDE = (-9.0, 11.0), (-70.0, 70.0)


def flash_decoding_np(
    q: Array, k: Array, v: Array, splits: int = 1, lengths: Array | None = None, scale: float | None = None
) -> Array:
    _check(q, k, v, splits, lengths)
    (B, H, Dh), (K, S) = q.shape, k.shape[1:3]
    out, scale = np.empty_like(q), Dh**-0.5 if scale is None else scale
    for b, n in enumerate([S] * B if lengths is None else lengths.tolist()):
        rows = q[b].reshape(K, H // K, Dh) * scale  # [K, H/K, Dh]
        out[b] = merge_np(*zip(*(_part_np(rows, k[b, :, c], v[b, :, c]) for c in cuts(n, splits)))).reshape(H, Dh)
    return out


def cuts(n: int, splits: int) -> list[slice]:
    """n keys in runs of ⌈n / splits⌉; the last runs may be shorter, or empty."""
    run = -(-n // splits)
    return [slice(min(i * run, n), min((i + 1) * run, n)) for i in range(splits)]


def _part_np(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    s = q @ k.swapaxes(-1, -2)  # [K, H/K, s]
    m = s.max(-1, keepdims=True, initial=-np.inf)  # [K, H/K, 1]
    e = np.exp(s - np.where(m == -np.inf, 0, m))
    total = np.maximum(e.sum(-1, keepdims=True), 1)  # its largest term is 1, where there is a key
    return e @ v / total, (m + np.log(total))[..., 0]  # [K, H/K, Dh], [K, H/K]


def unified_softmax_np(
    x: Array, phi: float = 0.0, bounds: tuple[float, float] = WIDE, weights: type | None = None
) -> tuple[Array, Array]:
    """FlashDecoding++'s softmax of x [..., S], and which rows [...] left the bounds and were computed again.

    −∞ (a hidden key) leaves no bound. weights: the type in which exp(x − φ) is kept, x's own where None.
    """
    away = x - phi
    again = ((away <= bounds[0]) & (away != -np.inf) | (away >= bounds[1])).any(-1)  # [...]
    e = np.exp(np.minimum(away, bounds[1])).astype(weights or x.dtype).astype(x.dtype)  # [..., S]
    total = e.sum(-1, keepdims=True)
    return np.where(again[..., None], softmax_np(x), e / np.where(total == 0, 1, total)), again


def flash_decoding_torch(
    q: Tensor, k: Tensor, v: Tensor, splits: int = 1, lengths: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Here the cuts are of all S keys, so that a batch goes at once."""
    _check(q, k, v, splits, lengths)
    (B, H, Dh), (K, S) = q.shape, k.shape[1:3]
    rows = q.reshape(B, K, H // K, Dh) * (1 if scale is None else scale * Dh**0.5)  # [B, K, H/K, Dh]
    there = torch.arange(S, device=q.device) < (S if lengths is None else lengths[:, None, None, None])  # [.., S]
    if lengths is not None:
        v = v.masked_fill(~there.mT, 0)  # a weight of 0 hides no NaN
    parts = [attention_lse(rows, k[:, :, c], v[:, :, c], there[..., c]) for c in cuts(S, splits)]
    return merge_torch(*zip(*parts)).reshape(B, H, Dh)


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lengths_ptr, flags_ptr, out_ptr, lse_ptr, K, G, Dh, splits, pages, page,
    scale2, phi2, low2, high2, stride_page, stride_key, stride_head,
    UNIFIED: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program takes one split of the keys for the G queries that share a KV head.

    Keys lie in pages (ops/paged_attention.py); without tables_ptr a sequence is one page. UNIFIED: φ is every maximum,
    and flags say where that fails; flags without UNIFIED: only groups with a flag run. Scores are in log₂.
    """
    i, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = b * K + g
    if flags_ptr is not None and not UNIFIED:
        at = tl.arange(0, SPLITS)
        if tl.max(tl.load(flags_ptr + group * splits + at, mask=at < splits, other=0), axis=0) == 0:
            return
    n = pages * page
    if lengths_ptr is not None:
        n = tl.minimum(tl.load(lengths_ptr + b), n)
    run = tl.cdiv(n, splits)
    end = tl.minimum((i + 1) * run, n)
    row = tl.arange(0, ROWS)  # [ROWS]
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    head = group * G + row
    inside = (row < G)[:, None] & (col < Dh)
    q = tl.load(q_ptr + head[:, None] * Dh + col, mask=inside, other=0.0)  # [ROWS, COLS]
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    left = tl.zeros([ROWS], tl.int32)
    for start in range(i * run, end, KEYS):
        key = start + tl.arange(0, KEYS)  # [KEYS]
        there = (key < end)[:, None] & (col < Dh)
        here = b
        if tables_ptr is not None:
            here = tl.load(tables_ptr + b * pages + key // page, mask=key < end, other=0).to(tl.int64)
        at = (here * stride_page + (key % page).to(tl.int64) * stride_key + g * stride_head)[:, None] + col
        k = tl.load(k_ptr + at, mask=there, other=0.0)  # [KEYS, COLS]
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2  # [ROWS, KEYS]
        seen = (key < end)[None, :]
        if UNIFIED:
            s -= phi2
            out_of = seen & (row < G)[:, None] & ((s <= low2) | (s >= high2))
            left = tl.maximum(left, tl.max(out_of.to(tl.int32), axis=1))
            p = tl.exp2(tl.where(seen, tl.minimum(s, high2), -float("inf")))  # no infinity, though it runs again
        else:
            s = tl.where(seen, s, -float("inf"))
            new = tl.maximum(m, tl.max(s, axis=1))  # finite: a tile has a key
            p = tl.exp2(s - new[:, None])
            shrink = tl.exp2(m - new)
            total, acc, m = total * shrink, acc * shrink[:, None], new
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        total += tl.sum(p, axis=1)
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
    if UNIFIED:
        tl.store(flags_ptr + group * splits + i, tl.max(left, axis=0))
        m = tl.where(total == 0.0, -float("inf"), phi2)
    total = tl.where(total == 0.0, 1.0, total)
    part = head * splits + i  # [ROWS]
    tl.store(out_ptr + part[:, None] * Dh + col, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + part, m + tl.log2(total), mask=row < G)


@triton.jit
def _merge_kernel(parts_ptr, lse_ptr, out_ptr, splits, Dh, SPLITS: tl.constexpr, COLS: tl.constexpr):
    """A program takes the parts of one head."""
    row = tl.program_id(0).to(tl.int64)
    at = row * splits + tl.arange(0, SPLITS)  # [SPLITS]
    there = (tl.arange(0, SPLITS) < splits)[:, None]
    col = tl.arange(0, COLS)[None, :]  # [1, COLS]
    lse = tl.load(lse_ptr + at[:, None], mask=there, other=-float("inf"))  # [SPLITS, 1]
    m = tl.max(lse, axis=0)[None, :]
    w = tl.exp2(lse - tl.where(m == -float("inf"), 0.0, m))
    total = tl.sum(w, axis=0)[None, :]
    part = tl.load(parts_ptr + at[:, None] * Dh + col, mask=there & (col < Dh), other=0.0)  # [SPLITS, COLS]
    out = tl.sum(part * (w / tl.where(total == 0.0, 1.0, total)), axis=0)[None, :]
    tl.store(out_ptr + row * Dh + col, out.to(out_ptr.dtype.element_ty), mask=col < Dh)


def flash_decoding_triton(
    q: Tensor, k: Tensor, v: Tensor, splits: int = 1, lengths: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Heads of up to 256 values, groups of up to 16 Ki, at most 128 splits; fp32, fp16 or bf16."""
    _check(q, k, v, splits, lengths)
    return launch(q, k.transpose(1, 2), v.transpose(1, 2), None, lengths, splits, scale)[0]


def unified_decoding_triton(
    q: Tensor, k: Tensor, v: Tensor, splits: int = 1, lengths: Tensor | None = None, scale: float | None = None,
    phi: float = 0.0, bounds: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashDecoding++: out, and which groups of heads [B, K] left the bounds and were computed again.

    bounds: NARROW for fp16 and WIDE else, where None.
    """
    _check(q, k, v, splits, lengths)
    bounds = bounds or (NARROW if v.dtype == torch.float16 else WIDE)
    return launch(q, k.transpose(1, 2), v.transpose(1, 2), None, lengths, splits, scale, phi, bounds)


def launch(q, k, v, tables, lengths, splits: int, scale: float | None, phi: float | None = None, bounds=WIDE):
    """Runs the kernels over k, v [B or pages, page, K, Dh], tables [B, pages] or None: out, flags [B, K] or None."""
    (B, H, Dh), (_, page, K, _) = q.shape, k.shape
    ROWS, COLS = (max(16, triton.next_power_of_2(n)) for n in (H // K, Dh))
    if Dh > 256 or splits > 128 or ROWS * COLS > 1 << 14:
        raise ValueError(
            "the kernel takes at most 256 values a head, 16384 a group (both filled to powers of 2) and 128 splits, "
            f"got {Dh}, {H // K} heads a group and {splits} splits; use the torch version"
        )
    out = torch.empty(B, H, Dh, dtype=q.dtype, device=q.device)
    q, k, v = operands(q, k, v)
    if k.stride() != v.stride() or k.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    lengths, tables = (None if x is None else x.to(q.device, torch.int32).contiguous() for x in (lengths, tables))
    SPLITS = triton.next_power_of_2(splits)
    KEYS = 256 if INTERPRETED else min(max(8192 // (COLS * q.element_size()), 16), 64)  # two stages of k, v: 32 KiB
    new = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device=q.device)
    parts, lse = (new(B, H, splits, Dh), new(B, H, splits)) if splits > 1 else (out, None)
    flags = None if phi is None else new(B, K, splits, dtype=torch.int32)
    in_log2 = (x * LOG2E for x in (Dh**-0.5 if scale is None else scale, phi or 0.0, *bounds))
    args = (q.contiguous(), k, v, tables, lengths, flags, parts, lse, K, H // K, Dh, splits)
    args += (1 if tables is None else tables.shape[1], page, *in_log2, *k.stride()[:3])
    for unified in (False,) if phi is None else (True, False):
        warps = 4 if ROWS * COLS <= 4096 else 4 * q.element_size()
        _decode_kernel[(splits, K, B)](*args, unified, SPLITS, ROWS, KEYS, COLS, num_warps=warps)
    if splits > 1:
        warps = min(max(SPLITS * COLS // 2048, 4), 16)
        _merge_kernel[(B * H,)](parts, lse, out, splits, Dh, SPLITS, COLS, num_warps=warps)
    return out, None if flags is None else flags.amax(-1) > 0


def _check(q, k, v, splits: int, lengths):
    fits = [q.ndim, k.ndim] == [3, 4] and k.shape == v.shape and q.shape[::2] == k.shape[::3] and k.shape[1]
    if not fits or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q is [B, H, Dh], k and v are [B, K, S, Dh], and H divides by K: "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if splits < 1:
        raise ValueError(f"splits = {splits}, but the keys are cut into 1 or more")
    check_lengths(lengths, len(q), k.shape[2])


def check_lengths(lengths, B: int, S: int):
    """Values are looked at on the CPU alone: on a GPU that would wait for it, and the kernel stays within S anyway."""
    if lengths is not None and list(lengths.shape) != [B]:
        raise ValueError(f"lengths is [B] = [{B}], got {list(lengths.shape)}")
    if lengths is not None and str(lengths.device) == "cpu" and not ((lengths >= 0) & (lengths <= S)).all():
        raise ValueError(f"lengths are between 0 and the {S} keys that there is room for, got {lengths.tolist()}")


def build(types: str, ROWS: int = 16, KEYS: int = 32, COLS: int = 128, **constants) -> Build:
    """How _decode_kernel is compiled; types of its pointers up to `flags_ptr`, but for those among the constants."""
    sizes = {"UNIFIED": False, "SPLITS": 16, "ROWS": ROWS, "KEYS": KEYS, "COLS": COLS}
    numbers = " *fp32 *fp32 i32 i32 i32 i32 i32 i32 fp32 fp32 fp32 fp32 i32 i32 i32"
    return Build(_decode_kernel, types + numbers, sizes | constants, num_warps=8 if ROWS > 16 else 4)


IMPLS = available({"numpy": flash_decoding_np, "torch": flash_decoding_torch, "triton": flash_decoding_triton})
AOT = [
    build("*bf16 *bf16 *bf16 *i32", tables_ptr=None, flags_ptr=None),
    build("*bf16 *bf16 *bf16 *i32", 64, 16, 256, tables_ptr=None, flags_ptr=None),
    build("*fp32 *fp32 *fp32 *i32", 16, 16, tables_ptr=None, flags_ptr=None),
    build("*fp16 *fp16 *fp16 *i32 *i32", tables_ptr=None, UNIFIED=True),
    Build(_merge_kernel, "*fp32 *fp32 *bf16 i32 i32", {"SPLITS": 16, "COLS": 128}),
]
