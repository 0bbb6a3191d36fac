"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, eq. 15 and 34).

    (a, b) at position p  →  (a cos pω_i − b sin pω_i,  b cos pω_i + a sin pω_i)           ω_i = θ^(−2i/d), i < d/2

    x, y [B, H, T, Dh]            cos, sin [T, d/2], or [B, T, d/2] where each row has its own positions

Each pair of a query or key turns by an angle that grows with the position, so ⟨R_m q, R_n k⟩ depends on m − n alone.
Which dimensions pair up is a convention, and a checkpoint's projections are stored for one of them:

    half-split     i with i + d/2          Llama and Qwen in Hugging Face's layout, GPT-NeoX, Mistral
    interleaved    2i with 2i + 1          the paper, GPT-J, PaLM, Meta's own Llama files, Llama in GGUF

`half_to_interleaved` and `interleaved_to_half` reorder the rows of W_q and W_k, after which the other convention gives
the same scores. With d < Dh (partial rotary) the leading d dimensions turn and the rest pass through.

Backward is a turn the other way: dx = rope(dy, cos, −sin). For N turned values: 3N operations either way, each value
read and written once, and the tables read once for each head at worst.
"""

import math

import numpy as np
import torch

from llmstack.ops._triton import INTERPRETED, Build, available, rows_of, tl, triton

GROWING = ("dynamic", "longrope")  # whose frequencies follow the length of the text; a cached key keeps its turn


def rope_frequencies(d: int, theta: float = 10000.0, scaling: tuple | None = None, length: int = 0) -> torch.Tensor:
    """ω [d/2] in fp32, radians a position, stretched beyond the trained length as `scaling` says. `length`: the text's.

    (factor, low, high, L)    Llama 3.1 (Meta's llama-models, `apply_scaling`): a frequency that turns `high` times or
                              more within the original length L stays, one that turns `low` times or fewer is divided
                              by the factor, between them it is blended
    "linear", factor          all are divided (Chen et al. 2023, arXiv:2306.15595)
    "dynamic", factor, L      a greater θ from a text's length of L on, and the greater the longer (NTK-aware)
    "yarn", factor, fast, slow, L, amplitude, truncate       as Llama 3.1's with the blend linear in the pair's number
                              between those that turn `fast` and `slow` times (Peng et al. 2023, arXiv:2309.00071)
    "longrope", L, amplitude, short, long       a factor for each pair (Ding et al. 2024, arXiv:2402.13753)

    Raises ValueError on odd d.
    """
    if d % 2:
        raise ValueError(f"RoPE rotates pairs: the rotary dimension must be even, got {d}")
    kind = scaling[0] if scaling else None
    if kind == "dynamic":
        _, factor, most = scaling
        theta = theta * (factor * max(length, most) / most - (factor - 1)) ** (d / (d - 2))
    frequency = 1.0 / theta ** (torch.arange(0, d, 2).float() / d)  # fp32, as checkpoints were trained
    if kind in (None, "dynamic"):
        return frequency
    if kind == "linear":
        return frequency / scaling[1]
    if kind == "longrope":
        _, most, _, short, long = scaling
        return frequency / torch.tensor(long if length > most else short)
    if kind == "yarn":
        factor, keep = scaling[1], _yarn_kept(d, theta, *scaling[2:5], scaling[6])
    else:
        factor, low, high, most = scaling
        turns = most * frequency / (2 * math.pi)  # within the original length
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / factor


def _yarn_kept(d: int, theta: float, fast: float, slow: float, length: int, truncate: bool) -> torch.Tensor:
    """[d/2]: 1 where a pair turns more than `fast` times within the length, 0 where fewer than `slow`."""
    pair = lambda turns: d * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))  # that turns so often
    first, last = pair(fast), pair(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    last += 0.001 * (first == last)
    return 1 - ((torch.arange(d // 2).float() - first) / (last - first)).clamp(0, 1)


def rope_amplitude(scaling: tuple | None) -> float:
    """What multiplies cosines and sines: YaRN and LongRoPE sharpen attention over a longer text with it."""
    return {"yarn": lambda: scaling[5], "longrope": lambda: scaling[2]}.get(scaling and scaling[0], lambda: 1.0)()


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """0.1 w ln(factor) + 1 (arXiv:2309.00071, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position × frequency: positions [T] or [B, T] -> two tables [..., T, d/2] in fp32."""
    angle = positions[..., None].float() * frequencies.to(positions.device)
    return angle.cos() * amplitude, angle.sin() * amplitude


def rope_np(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool = False) -> np.ndarray:
    d = 2 * cos.shape[-1]
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, d/2]
    first, second = (slice(0, d, 2), slice(1, d, 2)) if interleaved else (slice(0, d // 2), slice(d // 2, d))
    a, b = x[..., first], x[..., second]  # [B, H, T, d/2] each
    y = x.copy()  # [B, H, T, Dh]
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def rope_np_backward(dy: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool = False) -> np.ndarray:
    return rope_np(dy, cos, -sin, interleaved)


def rope_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    _check(x, cos, sin)
    d = 2 * cos.shape[-1]
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, d/2]
    turning = x[..., :d].unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x[..., :d].chunk(2, -1)
    a, b = turning  # [B, H, T, d/2] each
    pair = (a * cos - b * sin, b * cos + a * sin)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    y = y.to(x.dtype)
    return torch.cat([y, x[..., d:]], -1) if d < x.shape[-1] else y  # [B, H, T, Dh]


@triton.jit
def _rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, R, HT, T, table_stride, Dh, HALF, SIGN: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """A program turns ROWS rows of Dh values: x and y cross memory once; SIGN −1 turns back."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]: (batch, head, token)
    i = tl.arange(0, COLS)[None, :]  # [1, COLS]: the pair
    inside = (row < R) & (i < HALF)
    angle = ((row // HT) * table_stride + row % T) * HALF + i
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLS]
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32) * SIGN
    first = row * Dh + (2 * i if INTERLEAVED else i)
    second = first + (1 if INTERLEAVED else HALF)
    a = tl.load(x_ptr + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + first, a * cos - b * sin, mask=inside)
    tl.store(y_ptr + second, b * cos + a * sin, mask=inside)
    if REST > 0:
        col = 2 * HALF + tl.arange(0, REST)[None, :]
        passing = (row < R) & (col < Dh)
        tl.store(y_ptr + row * Dh + col, tl.load(x_ptr + row * Dh + col, mask=passing), mask=passing)


def rope_triton(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, sign: int = 1
) -> torch.Tensor:
    """x [B, H, T, Dh] of any strides; sign −1 turns back. Raises ValueError where the tables do not fit x."""
    _check(x, cos, sin)
    rows = rows_of(x)  # [B H T, Dh]
    y = torch.empty_like(rows)
    (H, T, Dh), half = x.shape[1:], cos.shape[-1]
    COLS = triton.next_power_of_2(max(half, 1))
    REST = triton.next_power_of_2(Dh - 2 * half) if Dh > 2 * half else 0
    ROWS = (1 << 15 if INTERPRETED else 2048) // COLS
    table_stride = T if cos.ndim == 3 and len(cos) > 1 else 0  # one table may serve every row of the batch
    if rows.numel():
        _rope_kernel[(triton.cdiv(len(rows), ROWS),)](
            rows, cos.contiguous(), sin.contiguous(), y, len(rows), H * T, T, table_stride, Dh, half,
            sign, interleaved, ROWS, COLS, REST,
        )  # fmt: skip
    return y.view(x.shape)


def rope_triton_backward(
    dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    return rope_triton(dy, cos, sin, interleaved, sign=-1)


def half_to_interleaved(w: torch.Tensor, heads: int, rotary: int = 0) -> torch.Tensor:
    """Rows of W_q or W_k [heads · Dh, D] (or of its bias) from half-split order to interleaved order.

    heads counts those of w (n_kv_heads for W_k); rotary: the leading dimensions of a head that turn, 0 for all.
    """
    return _reorder(w, heads, lambda order: order.view(2, -1).T.flatten(), rotary)


def interleaved_to_half(w: torch.Tensor, heads: int, rotary: int = 0) -> torch.Tensor:
    """The inverse of half_to_interleaved."""
    return _reorder(w, heads, lambda order: order.view(-1, 2).T.flatten(), rotary)


def _reorder(w: torch.Tensor, heads: int, rearranged, rotary: int) -> torch.Tensor:
    if heads < 1 or w.shape[0] % (2 * heads):
        raise ValueError(f"{w.shape[0]} rows are not {heads} heads of an even number of rows each")
    by_head = w.reshape(heads, -1, *w.shape[1:])  # [H, Dh, ...]
    order = torch.arange(by_head.shape[1], device=w.device)  # [Dh]
    d = rotary or len(order)
    if d % 2 or d > len(order):
        raise ValueError(f"rotary = {rotary}, but it must be even and at most {len(order)}, the width of a head")
    return by_head[:, torch.cat([rearranged(order[:d]), order[d:]])].reshape(w.shape)


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
    T, half = cos.shape[-2:]
    fits = x.ndim == 4 and x.shape[2] == T and 2 * half <= x.shape[3] and sin.shape == cos.shape
    if not fits or (cos.ndim == 3 and cos.shape[0] not in (1, x.shape[0])):
        raise ValueError(
            f"x is [B, H, T, Dh] and cos and sin are [T, d/2] or [B, T, d/2] with d <= Dh: "
            f"got x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
        )


IMPLS = available({"numpy": rope_np, "torch": rope_torch, "triton": rope_triton})
BACKWARDS = available({"numpy": rope_np_backward, "triton": rope_triton_backward})
_TYPES = "*bf16 *fp32 *fp32 *bf16 i32 i32 i32 i32 i32 i32"
AOT = [
    Build(_rope_kernel, _TYPES, {"SIGN": sign, "INTERLEAVED": pairs, "ROWS": 32, "COLS": 64, "REST": rest})
    for sign, pairs, rest in [(1, False, 0), (1, True, 0), (1, False, 64), (-1, False, 0), (-1, True, 64)]
]
