"""The backward kernels of FlashAttention-2 (arXiv:2307.08691, Algorithm 2), without atomic additions.

Only the log-sum-exp is kept: weights are computed again, p = exp(s − lse). One kernel sums δ = rowsum(dout · out), with
the gradient of the log-sum-exp taken off. A second owns KEYS keys of one key-value head and goes over the queries of
its whole group, so that dk and dv are each written once; a third owns ROWS queries and goes over the keys for dq. The
price of no atomics is that the second and third both compute s and dout vᵀ: 7 products of 2 T S Dh in place of 5.
Bytes for one head without masks and groups, b for a value of q:

    δ           2 b T Dh + 4 T
    dk, dv      4 b S Dh + ⌈S/KEYS⌉ (2 b T Dh + 8 T)
    dq          3 b T Dh + 8 T + 2 b S Dh ⌈T/ROWS⌉
"""

import torch

from llmstack.ops._triton import Build, tl, triton
from llmstack.ops.flash.kernel import Call, _begin, _key_range, _load, _scores, _store, builds, like


@triton.jit
def _delta_kernel(out_ptr, dout_ptr, dlse_ptr, delta_ptr, R, Dh, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A program takes ROWS of all R rows, in the order in which they lie."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)  # [ROWS]
    out = _load(out_ptr, 0, first, 1, R, Dh, ROWS, COLS).to(tl.float32)  # [ROWS, COLS]
    delta = tl.sum(out * _load(dout_ptr, 0, first, 1, R, Dh, ROWS, COLS).to(tl.float32), axis=1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row, mask=row < R, other=0.0)
    tl.store(delta_ptr + row, delta, mask=row < R)


@triton.jit
def _log_sum2(lse_ptr, at, inside):
    """The log-sum-exp in log₂; +∞, which leaves no weights, for rows beyond the end or without a key (lse −∞)."""
    lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse) * 1.4426950408889634


@triton.jit
def _flash_keys_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, alibi_ptr, cu_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    T, S, H, G, Dh, window, ahead, scale, sqb, sqh, sqt, skb, skh, skt, sbb, sbh, sbt, sbs,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program takes KEYS keys of a key-value head over the queries of G heads; tiles are [KEYS, ROWS]."""
    b, g, q_row, k_row, T, S = _begin(cu_ptr, H // G, T, S, sqb, sqt, skb, skt)
    first = tl.program_id(0) * KEYS
    if first >= S:
        return
    k_row, edge = k_row + g * skh, S - T + ahead
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    k = _load(k_ptr, k_row, first, skt, S, Dh, KEYS, COLS)  # [KEYS, COLS]
    v = _load(v_ptr, k_row, first, skt, S, Dh, KEYS, COLS)
    low, high = 0, T
    if CAUSAL:
        low = tl.maximum(first - edge, 0) // ROWS * ROWS
        high = tl.minimum(first + KEYS - 1 + window - edge, T)
    dk = tl.zeros([KEYS, COLS], tl.float32)
    dv = tl.zeros([KEYS, COLS], tl.float32)
    for head in range(0, G):
        h = g * G + head
        for start in range(low, high, ROWS):
            q = _load(q_ptr, q_row + h * sqh, start, sqt, T, Dh, ROWS, COLS)  # [ROWS, COLS]
            dout = _load(dout_ptr, q_row + h * sqh, start, sqt, T, Dh, ROWS, COLS)
            at = q_row + h * sqh + start * sqt + i * sqt  # [ROWS]
            s = _scores(k, q, i[None, :], j[:, None], start, first, b, h, T, S, scale,
                        bias_ptr, alibi_ptr, sbb, sbh, sbt, sbs, edge, window, ahead, CAUSAL)  # fmt: skip
            p = tl.exp2(s - _log_sum2(lse_ptr, at, i < T - start)[None, :])  # [KEYS, ROWS]
            dv += tl.dot(p.to(v.dtype), dout, input_precision="ieee")
            delta = tl.load(delta_ptr + at, mask=i < T - start, other=0.0)
            ds = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
            dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
    _store(dk_ptr, k_row, first, skt, S, Dh, dk * scale, KEYS, COLS)
    _store(dv_ptr, k_row, first, skt, S, Dh, dv, KEYS, COLS)


@triton.jit
def _flash_queries_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, alibi_ptr, cu_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr,
    T, S, H, G, Dh, window, ahead, scale, sqb, sqh, sqt, skb, skh, skt, sbb, sbh, sbt, sbs,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS queries of a head over their keys."""
    b, h, q_row, k_row, T, S = _begin(cu_ptr, H, T, S, sqb, sqt, skb, skt)
    first = tl.program_id(0) * ROWS
    if first >= T:
        return
    q_row, k_row, edge = q_row + h * sqh, k_row + h // G * skh, S - T + ahead
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    q = _load(q_ptr, q_row, first, sqt, T, Dh, ROWS, COLS)  # [ROWS, COLS]
    dout = _load(dout_ptr, q_row, first, sqt, T, Dh, ROWS, COLS)
    at = q_row + first * sqt + i * sqt  # [ROWS]
    lse, delta = _log_sum2(lse_ptr, at, i < T - first), tl.load(delta_ptr + at, mask=i < T - first, other=0.0)
    low, high = _key_range(first, S, edge, window, CAUSAL, ROWS, KEYS)
    dq = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(low, high, KEYS):
        k = _load(k_ptr, k_row, start, skt, S, Dh, KEYS, COLS)  # [KEYS, COLS]
        v = _load(v_ptr, k_row, start, skt, S, Dh, KEYS, COLS)
        s = _scores(q, k, i[:, None], j[None, :], first, start, b, h, T, S, scale,
                    bias_ptr, alibi_ptr, sbb, sbh, sbt, sbs, edge, window, ahead, CAUSAL)  # fmt: skip
        p = tl.exp2(s - lse[:, None])  # [ROWS, KEYS]
        ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    _store(dq_ptr, q_row, first, sqt, T, Dh, dq * scale, ROWS, COLS)


def backward(call: Call, out, lse, dout, dlse=None) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv laid out as q and k."""
    dout, delta, tiles = like(dout.to(call.q.dtype), call.q), call.stat(), call.tiles(TILES)
    dq, dk, dv = torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.k)
    if not dq.numel() or not dk.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    dlse = None if dlse is None else like(dlse, lse)
    rows, R = {name: tiles[name] for name in ("ROWS", "COLS")}, lse.numel()
    _delta_kernel[triton.cdiv(R, tiles["ROWS"]),](like(out, call.q), dout, dlse, delta, R, call.Dh, **rows)
    tensors = call.q, call.k, call.v, call.bias, call.alibi, call.cu, dout, lse, delta
    grid = triton.cdiv(call.T, tiles["ROWS"]), call.B * call.H
    _flash_queries_kernel[grid](*tensors, dq, *call.sizes, CAUSAL=call.causal, **tiles)
    tiles = call.tiles(OWN_KEYS)
    grid = triton.cdiv(call.S, tiles["KEYS"]), call.B * call.K
    _flash_keys_kernel[grid](*tensors, dk, dv, *call.sizes, CAUSAL=call.causal, **tiles)
    return dq, dk, dv


TILES = {  # (width of a head at least, bytes of a value): rows that a program owns, rows that go by, warps, stages
    (64, 2): (64, 32, 4, 1),
    (128, 2): (64, 32, 8, 1),
    (256, 2): (32, 16, 4, 1),
    (64, 4): (32, 32, 8, 1),
    (128, 4): (32, 16, 4, 1),
    (256, 4): (16, 16, 4, 1),
}
OWN_KEYS = {at: (by, own, *rest) for at, (own, by, *rest) in TILES.items()}
OWN_KEYS |= {(128, 2): (16, 64, 8, 1), (64, 4): (16, 32, 4, 1)}  # what gfx942 holds without spills
AOT = [
    *(Build(_delta_kernel, f"{t} {t} *fp32 *fp32 i32 i32", {"ROWS": 64, "COLS": 128}) for t in ("*bf16", "*fp32")),
    *builds(_flash_keys_kernel, "T *fp32 *fp32 T T", OWN_KEYS),
    *builds(_flash_queries_kernel, "T *fp32 *fp32 T", TILES),
]
