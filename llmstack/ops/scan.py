"""The selective scan, a linear recurrence whose coefficients the input chooses (Gu and Dao 2023, Mamba,
arXiv:2312.00752, eqs. 1a, 1b, 2a and section 3.5).

    h_t = exp(Δ_t A) ⊙ h_{t−1} + (Δ_t ⊙ x_t) B_tᵀ            y_t = h_t C_t + D ⊙ x_t

    x, Δ, y [B, T, I]     A [I, N], negative     B, C [B, T, N]     D [I]     h [B, I, N], h_0 zero unless given

Δ is how long a token is looked at: near 0 the state passes by unchanged, large the past is forgotten and x written in.
With g_t = dL/dh_t = dy_t C_tᵀ + exp(Δ_{t+1} A) ⊙ g_{t+1} and e_t = g_t ⊙ h_{t−1} ⊙ exp(Δ_t A), sums over what is left:

    dΔ = Σ_n e A + g x B     dA = Σ e Δ     dx = Δ Σ_n g B + D dy     dB = Σ_i g Δ x     dC = Σ_i h dy     dD = Σ x dy

One step after the other is T deep. But a step is a pair (a, b), h ↦ a h + b, and pairs compose, whatever the brackets:

    (a₁, b₁) then (a₂, b₂)  =  (a₁ a₂, a₂ b₁ + b₂)

so that halves, or chunks, can be computed at the same time (Blelloch 1990; Martin and Cundy 2018, arXiv:1709.04057):

                operations of the recurrence     depth
    sequential  2 B T I N                        T
    doubling    3 B T I N log₂ T                 log₂ T
    chunked     about 5 B T I N                  2 √T

All in all 7 B T I N forward (the product and the exponential in exp(Δ A), the input's product, 2 for the recurrence, 2
for y). The kernel reads x, Δ, B, C and writes y, 3 B T I + 2 B T N values, because h stays in registers; the torch
forms write exp(Δ A), the input and h to memory, N times as much.
"""

import numpy as np
import torch
from numpy import ndarray as Array
from torch import Tensor

from llmstack.ops._triton import INTERPRETED, Build, available, tl, triton


def scan_np(
    x: Array, delta: Array, a: Array, b: Array, c: Array, d: Array, h: Array | None = None
) -> tuple[Array, Array]:
    y, h = np.empty_like(x), np.zeros((len(x), *a.shape), x.dtype) if h is None else h  # [B, T, I], [B, I, N]
    for t in range(x.shape[1]):
        h = np.exp(delta[:, t, :, None] * a) * h + (delta * x)[:, t, :, None] * b[:, t, None]  # [B, I, N]
        y[:, t] = (h * c[:, t, None]).sum(-1) + d * x[:, t]
    return y, h


def scan_np_backward(dy: Array, x: Array, delta: Array, a: Array, b: Array, c: Array, d: Array) -> tuple[Array, ...]:
    """dx, dΔ, dA, dB, dC, dD for h_0 = 0; nothing flows in from the last state."""
    keep = np.exp(delta[..., None] * a)  # [B, T, I, N]
    h, g = np.zeros((*keep.shape[:1], keep.shape[1] + 1, *a.shape), x.dtype), np.zeros_like(keep)
    for t in range(x.shape[1]):
        h[:, t + 1] = keep[:, t] * h[:, t] + (delta * x)[:, t, :, None] * b[:, t, None]
    after = np.zeros_like(h[:, 0])  # exp(Δ_{t+1} A) ⊙ g_{t+1}
    for t in reversed(range(x.shape[1])):
        g[:, t] = dy[:, t, :, None] * c[:, t, None] + after
        after = keep[:, t] * g[:, t]
    e, gb = g * h[:, :-1] * keep, (g * b[:, :, None]).sum(-1)  # [B, T, I, N], [B, T, I]
    dx, ddelta = delta * gb + d * dy, (e * a).sum(-1) + x * gb
    db, dc = (g * (delta * x)[..., None]).sum(2), (h[:, 1:] * dy[..., None]).sum(2)  # [B, T, N]
    return dx, ddelta, (e * delta[..., None]).sum((0, 1)), db, dc, (x * dy).sum((0, 1))


def recur_sequential(a: Tensor, b: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t along dimension 1, h_{-1} = 0; a and b [B, T, ...] of one shape."""
    states = [b[:, 0]]
    for at, bt in zip(a.unbind(1)[1:], b.unbind(1)[1:]):
        states.append(at * states[-1] + bt)
    return torch.stack(states, 1)


def recur_doubling(a: Tensor, b: Tensor) -> Tensor:
    """After round r every pair stands for the 2^r steps that end with it (Hillis and Steele 1986)."""
    reach = 1
    while reach < a.shape[1]:
        b = torch.cat([b[:, :reach], a[:, reach:] * b[:, :-reach] + b[:, reach:]], 1)
        a = torch.cat([a[:, :reach], a[:, reach:] * a[:, :-reach]], 1)
        reach *= 2
    return b


def recur_chunked(a: Tensor, b: Tensor, chunk: int = 0) -> Tensor:
    """√T steps in all chunks at once, then √T over their ends, then the state before each chunk is passed in."""
    T = a.shape[1]
    chunk = chunk or max(1, round(T**0.5))
    short = -T % chunk
    fill = lambda x: torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], 1) if short else x
    a, b = (fill(x).unflatten(1, (-1, chunk)) for x in (a, b))  # [B, chunks, chunk, ...]
    decay, inside = [a[:, :, 0]], [b[:, :, 0]]
    for at, bt in zip(a.unbind(2)[1:], b.unbind(2)[1:]):
        inside.append(at * inside[-1] + bt)
        decay.append(at * decay[-1])
    ends = recur_sequential(decay[-1], inside[-1])  # [B, chunks, ...]
    before = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)[:, :, None]
    return (torch.stack(inside, 2) + torch.stack(decay, 2) * before).flatten(1, 2)[:, :T]


RECURRENCES = {"sequential": recur_sequential, "doubling": recur_doubling, "chunked": recur_chunked}


def scan_torch(
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    h: Tensor | None = None,
    method: str | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, T, I] and the last state [B, I, N]. Raises ValueError on other shapes.

    `method` is one of RECURRENCES; by default the chunked one, but on a CPU where a step is wide (B I N ≥ 1024) the
    sequential one: there the processor is busy with one step, and the parallel orders only read and write more.
    """
    _check(x, delta, a, b, c, d, h)
    if x.shape[1] == 0:
        return torch.empty_like(x), x.new_zeros(len(x), *a.shape) if h is None else h
    keep = torch.exp(delta[..., None] * a)  # [B, T, I, N]
    put = (delta * x)[..., None] * b[:, :, None]  # [B, T, I, N]
    if h is not None:
        put = torch.cat([put[:, :1] + keep[:, :1] * h[:, None], put[:, 1:]], 1)
    wide = keep.device.type == "cpu" and keep[:, 0].numel() >= 1024
    states = RECURRENCES[method or ("sequential" if wide else "chunked")](keep, put)  # [B, T, I, N]
    return (states @ c[..., None]).squeeze(-1) + d * x, states[:, -1]


@triton.jit
def _scan_kernel(
    x_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, d_ptr, h_ptr, y_ptr, T, I, N, CHANNELS: tl.constexpr, STATES: tl.constexpr
):
    """A program walks through time with the states of CHANNELS channels: x, Δ, y cross memory once, B and C once a
    program, h at the two ends."""
    i, n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    row = tl.program_id(1).to(tl.int64)
    square = (i < I)[:, None] & (n < N)[None, :]
    a = tl.load(a_ptr + i[:, None] * N + n[None, :], mask=square, other=0.0).to(tl.float32)  # [CHANNELS, STATES]
    d = tl.load(d_ptr + i, mask=i < I, other=0.0).to(tl.float32)
    at_h = h_ptr + (row * I + i[:, None]) * N + n[None, :]
    h = tl.load(at_h, mask=square, other=0.0)
    for t in range(T):
        at = row * T + t
        x = tl.load(x_ptr + at * I + i, mask=i < I, other=0.0).to(tl.float32)  # [CHANNELS]
        delta = tl.load(delta_ptr + at * I + i, mask=i < I, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at * N + n, mask=n < N, other=0.0).to(tl.float32)  # [STATES]
        c = tl.load(c_ptr + at * N + n, mask=n < N, other=0.0).to(tl.float32)
        h = tl.exp(delta[:, None] * a) * h + (delta * x)[:, None] * b[None, :]
        tl.store(y_ptr + at * I + i, tl.sum(h * c[None, :], axis=1) + d * x, mask=i < I)
    tl.store(at_h, h, mask=square)


def scan_triton(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """fp32, fp16 or bf16, contiguous or not; the state is fp32."""
    _check(x, delta, a, b, c, d, h)
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"the kernel computes in fp32 on fp32, fp16 or bf16 values, got {x.dtype}; use scan_torch")
    (B, T, I), N = x.shape, a.shape[1]
    last = torch.zeros(B, I, N, device=x.device)
    if h is not None:
        last.copy_(h)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    CHANNELS = triton.next_power_of_2(max(I, 1)) if INTERPRETED else 64
    if y.numel():
        inputs = (t.contiguous() for t in (x, delta, a, b, c, d))
        grid = (triton.cdiv(I, CHANNELS), B)
        _scan_kernel[grid](*inputs, last, y, T, I, N, CHANNELS, triton.next_power_of_2(N))
    return y, last


def _check(x, delta, a, b, c, d, h):
    if x.ndim != 3 or a.ndim != 2:
        raise ValueError(f"x is [B, T, I] and a [I, N], got {list(x.shape)} and {list(a.shape)}")
    (B, T, I), N = x.shape, a.shape[1]
    wanted = dict(delta=(delta, (B, T, I)), a=(a, (I, N)), b=(b, (B, T, N)), c=(c, (B, T, N)), d=(d, (I,)))
    for name, (given, shape) in wanted.items() if h is None else [*wanted.items(), ("h", (h, (B, I, N)))]:
        if given.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} where x is {[B, T, I]}, got {list(given.shape)}")


IMPLS = available({"numpy": scan_np, "torch": scan_torch, "triton": scan_triton})
BACKWARDS = {"numpy": scan_np_backward}
AOT = [
    Build(_scan_kernel, "*bf16 *bf16 *fp32 *bf16 *bf16 *fp32 *fp32 *bf16 i32 i32 i32", {"CHANNELS": 64, "STATES": 16}),
    Build(_scan_kernel, "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 i32 i32 i32", {"CHANNELS": 64, "STATES": 16}),
]
