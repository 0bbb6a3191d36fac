"""The forward kernel of FlashAttention-2, and what forward and backward kernels share.

A program takes ROWS queries of one head and walks over the keys that they may see, KEYS at a time, with the running
maximum and sum of the online softmax. It reads its queries once and writes out and the log-sum-exp once; no score
leaves the chip. For one head, in bytes, b for a value of q and 4 for a log-sum-exp:

    b (2 T Dh + 2 S Dh ⌈T/ROWS⌉) + 4 T        half of the second term where causal; a bias adds its T S values

Scores are kept in units of log₂, as a GPU has exp2 but no exp. Offsets are in rows of Dh values, so that one set of
three strides serves q, out, dq, and the log-sum-exp alike.
"""

import torch

from llmstack.ops._triton import INTERPRETED, Build, operands, tl, triton
from llmstack.ops.flash.ref import check


@triton.jit
def _begin(cu_ptr, heads, T, S, sqb, sqt, skb, skt):
    """A program's sequence and head, where the sequence begins in q and in k, and its lengths (packed with cu_ptr)."""
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    q_row, k_row = b * sqb, b * skb
    if cu_ptr is not None:
        start = tl.load(cu_ptr + b).to(tl.int64)
        T = (tl.load(cu_ptr + b + 1).to(tl.int64) - start).to(tl.int32)
        S, q_row, k_row = T, start * sqt, start * skt
    return b, h, q_row, k_row, T, S


@triton.jit
def _load(ptr, base, first, stride, length, Dh, ROWS: tl.constexpr, COLS: tl.constexpr):
    """ROWS rows of Dh values from the first on, as [ROWS, COLS]; zeros beyond the length and the width."""
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]  # [ROWS, 1], [1, COLS]
    start = ptr + (base + first * stride) * Dh  # one wide address for all, so that offsets need 32 bits
    return tl.load(start + (row * stride * Dh + col), mask=(first + row < length) & (col < Dh), other=0.0)


@triton.jit
def _store(ptr, base, first, stride, length, Dh, tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]  # [ROWS, 1], [1, COLS]
    at = ptr + (base + first * stride) * Dh + (row * stride * Dh + col)
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=(first + row < length) & (col < Dh))


@triton.jit
def _key_range(first, S, edge, window, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The keys that ROWS queries from the first on may see, from a multiple of KEYS."""
    low, high = 0, S
    if CAUSAL:
        low = tl.maximum(first + edge - window + 1, 0) // KEYS * KEYS
        high = tl.minimum(first + ROWS + edge, S)
    return low, high


@triton.jit
def _scores(
    x, y, i, j, row, key, b, h, T, S, scale, bias_ptr, alibi_ptr, sbb, sbh, sbt, sbs, edge, window, ahead,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """x yᵀ as scores in log₂, −∞ where row + i may not see key + j: [ROWS, KEYS], or transposed, as i and j are."""
    s = tl.dot(x, tl.trans(y), input_precision="ieee") * (scale * 1.4426950408889634)
    away = row + edge - key + i - j
    seen = (i < T - row) & (j < S - key)
    if CAUSAL:
        seen = seen & (away >= 0) & (away < window)
    if bias_ptr is not None:
        start = bias_ptr + (b * sbb + h * sbh + tl.cast(row, tl.int64) * sbt + tl.cast(key, tl.int64) * sbs)
        s += tl.load(start + (i * sbt + j * sbs), mask=seen, other=0.0).to(tl.float32) * 1.4426950408889634
    if alibi_ptr is not None:
        s -= tl.load(alibi_ptr + h) * 1.4426950408889634 * tl.abs(away - ahead)
    return tl.where(seen, s, -float("inf"))


@triton.jit
def _flash_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, alibi_ptr, cu_ptr, out_ptr, lse_ptr, T, S, H, G, Dh, window, ahead, scale,
    sqb, sqh, sqt, skb, skh, skt, sbb, sbh, sbt, sbs,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS queries of a head."""
    b, h, q_row, k_row, T, S = _begin(cu_ptr, H, T, S, sqb, sqt, skb, skt)
    first = tl.program_id(0) * ROWS
    if first >= T:
        return
    q_row, k_row, edge = q_row + h * sqh, k_row + h // G * skh, S - T + ahead
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    q = _load(q_ptr, q_row, first, sqt, T, Dh, ROWS, COLS)  # [ROWS, COLS]
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    low, high = _key_range(first, S, edge, window, CAUSAL, ROWS, KEYS)
    for start in range(low, high, KEYS):
        k = _load(k_ptr, k_row, start, skt, S, Dh, KEYS, COLS)  # [KEYS, COLS]
        s = _scores(q, k, i[:, None], j[None, :], first, start, b, h, T, S, scale,
                    bias_ptr, alibi_ptr, sbb, sbh, sbt, sbs, edge, window, ahead, CAUSAL)  # fmt: skip
        new = tl.maximum(m, tl.max(s, axis=1))
        shift = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen no key yet stays at −∞
        p = tl.exp2(s - shift[:, None])  # [ROWS, KEYS]
        shrink = tl.exp2(m - shift)
        v = _load(v_ptr, k_row, start, skt, S, Dh, KEYS, COLS)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new
    served = tl.where(total == 0.0, 1.0, total)
    _store(out_ptr, q_row, first, sqt, T, Dh, acc / served[:, None], ROWS, COLS)
    tl.store(lse_ptr + q_row + first * sqt + i * sqt, (m + tl.log2(served)) * 0.6931471805599453, mask=first + i < T)


class Call:
    """Checked tensors and what every kernel takes alike. cu, longest: where packed sequences begin [B + 1], and T.

    ahead: how many keys beyond the causal ones a query sees too.
    """

    def __init__(self, q, k, v, bias=None, causal=False, window=0, ahead=0, alibi=None, scale=None, cu=None, longest=0):
        _check(q, k, v, bias, causal, window, alibi, packed=cu is not None)
        q, k, v = operands(q, k, v)
        self.q, self.k = _dense(q), _dense(k)
        self.v, self.cu, self.causal, self.Dh = like(v, self.k), cu, causal, q.shape[-1]
        heads = lambda x: x if cu is None else x.transpose(0, 1)[None]  # [N, H, Dh] as [1, H, N, Dh]
        (B, self.H, T, _), (_, self.K, S, _) = heads(q).shape, heads(k).shape
        self.B, self.T, self.S = (B, T, S) if cu is None else (len(cu) - 1, longest, longest)
        self.bias = None if bias is None else bias.expand(B, self.H, T, S)
        self.alibi = None if alibi is None else alibi.float().contiguous()
        strides = [s // self.Dh for x in (self.q, self.k) for s in heads(x).stride()[:3]]
        scale, window = self.Dh**-0.5 if scale is None else scale, window or self.T + self.S
        self.sizes = self.T, self.S, self.H, self.H // self.K, self.Dh, window + ahead, ahead, scale, *strides
        self.sizes += (0,) * 4 if bias is None else self.bias.stride()

    def stat(self) -> torch.Tensor:
        """A number in fp32 for each row of q, laid out as its rows are."""
        strides = [s // self.Dh for s in self.q.stride()[:-1]]
        return torch.empty_strided(self.q.shape[:-1], strides, dtype=torch.float32, device=self.q.device)

    def tiles(self, table: dict) -> dict:
        COLS = max(16, triton.next_power_of_2(self.Dh))
        tile = (128, 128, 4, 1) if INTERPRETED else table[max(COLS, 64), self.q.dtype.itemsize]
        rows, keys, warps, stages = tile if INTERPRETED or self.bias is None else halved(*tile)
        return dict(ROWS=rows, KEYS=keys, COLS=COLS, num_warps=warps, num_stages=stages)


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, and the log-sum-exp of each row, −∞ where a query may see no key."""
    out, lse, tiles = torch.empty_like(call.q), call.stat(), call.tiles(TILES)
    if out.numel() and call.T:
        tensors = call.q, call.k, call.v, call.bias, call.alibi, call.cu, out, lse
        grid = triton.cdiv(call.T, tiles["ROWS"]), call.B * call.H
        _flash_kernel[grid](*tensors, *call.sizes, CAUSAL=call.causal, **tiles)
    return out, lse


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x itself where its values lie without gaps and the last axis is innermost, in any order of the others."""
    return x if x.stride(-1) == 1 and torch.empty_like(x).stride() == x.stride() else x.contiguous()


def like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """x with the strides of the other."""
    return x if x.stride() == other.stride() else torch.empty_like(other).copy_(x)


def _check(q, k, v, bias, causal, window, alibi, packed):
    check(q, k, v, causal, window, packed)
    if not 0 < q.shape[-1] <= 256:
        raise ValueError(f"the kernel takes heads of up to 256 values, got {q.shape[-1]}; use the torch version")
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"bias is added to scores, got {bias.dtype}: give a mask as 0 where allowed and −inf elsewhere")
    if alibi is not None and alibi.shape != q.shape[1:2]:
        raise ValueError(f"alibi is a slope for each of {q.shape[1]} heads, got {list(alibi.shape)}")


def halved(rows: int, keys: int, warps: int, stages: int) -> tuple[int, ...]:
    """The tile of a call with a bias, whose own tile takes registers too."""
    return max(rows // 2, 16), max(keys // 2, 16), warps, stages


def builds(kernel, outputs: str, table: dict) -> list[Build]:
    """Causal at every width and dtype of a table, once with bias and slopes, once packed. T: q's type."""

    def build(width: int, size: int, given: tuple = ()) -> Build:
        tile = table[width, size]
        rows, keys, warps, stages = halved(*tile) if "bias_ptr" in given else tile
        options = " ".join(OPTIONS[name] for name in given)
        types = f"T T T {options} {outputs} {'i32 ' * 7} fp32 {'i32 ' * 10}"
        constants = {n: None for n in OPTIONS if n not in given} | dict(CAUSAL=True, ROWS=rows, KEYS=keys, COLS=width)
        return Build(kernel, types.replace("T", {2: "*bf16", 4: "*fp32"}[size]), constants, warps, stages)

    given = ("bias_ptr", "alibi_ptr"), ("cu_ptr",)
    return [*(build(*key) for key in table), *(build(64, 2, g) for g in given)]


OPTIONS = {"bias_ptr": "T", "alibi_ptr": "*fp32", "cu_ptr": "*i32"}
TILES = {  # (width of a head at least, bytes of a value): ROWS, KEYS, warps, stages
    (64, 2): (128, 64, 8, 2),
    (128, 2): (128, 32, 8, 2),
    (256, 2): (64, 32, 8, 2),
    (64, 4): (64, 32, 8, 1),
    (128, 4): (32, 32, 8, 1),
    (256, 4): (32, 16, 8, 1),
}
AOT = [*builds(_flash_kernel, "T *fp32", TILES)]
