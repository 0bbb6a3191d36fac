"""The selective scan: every implementation against an unrolled one in double precision, gradients against autograd."""

import pytest
import torch
from op_checks import NATIVE, check, randn, run, strided

from llmstack.ops import scan
from llmstack.ops.scan import BACKWARDS, IMPLS, RECURRENCES, scan_torch

SHAPES = [(1, 1, 1, 1), (2, 7, 5, 3), (3, 20, 6, 4), (1, 13, 3, 16), (2, 0, 3, 2), (0, 4, 3, 2)]


def inputs(B, T, I, N, seed=0):
    """x, Δ, A, B, C, D in the ranges that Mamba has them in."""
    x, delta, b, c = (randn(B, T, w, seed=seed + s) for s, w in enumerate((I, I, N, N)))
    return x, torch.nn.functional.softplus(delta), -randn(I, N, seed=seed + 5).exp(), b, c, randn(I, seed=seed + 6)


def unrolled(x, delta, a, b, c, d, h=None):
    """y_t = D x_t + Σ_s C_t · exp(A Σ_{s<r<=t} Δ_r) Δ_s x_s B_s: the sum that the recurrence stands for."""
    T = x.shape[1]
    passed = delta.cumsum(1)
    since = (passed[:, :, None] - passed[:, None]).clamp(min=0)  # [B, T, S, I]
    decay = torch.exp(since[..., None] * a) * torch.ones(T, T, dtype=x.dtype).tril()[:, :, None, None]
    y = torch.einsum("btsin,bsi,bsn,btn->bti", decay, delta * x, b, c) + d * x
    if h is not None:
        y = y + torch.einsum("btin,bin,btn->bti", torch.exp(passed[..., None] * a), h, c)
    return y


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl, shape):
    args = inputs(*shape)
    exact = unrolled(*(t.double() for t in args))
    y, h = run(IMPLS[impl], impl, *args)
    check([y], [exact], [unrolled(*args)])
    assert h.shape == (shape[0], *shape[2:]) and not h.isnan().any()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_state_carries_a_sequence_over(impl):
    """Two halves give what the whole gives, from any first state; inputs need not be contiguous."""
    args, start = inputs(2, 11, 4, 3), randn(2, 4, 3, seed=9)
    exact = unrolled(*(t.double() for t in args), start.double())
    pick = lambda s: [strided(t[:, s]) if t.ndim == 3 else t for t in args]
    first, middle = run(IMPLS[impl], impl, *pick(slice(0, 5)), start)
    second, last = run(IMPLS[impl], impl, *pick(slice(5, None)), middle)
    check([torch.cat([first, second], 1)], [exact], [unrolled(*args, start)])
    torch.testing.assert_close(last, run(IMPLS[impl], impl, *args, start)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", RECURRENCES)
@pytest.mark.parametrize("T", [1, 2, 7, 63, 100])
def test_every_bracketing_is_the_recurrence(method, T):
    """Also with complex coefficients, on which S4D runs, and past decays that underflow."""
    a, b = torch.randn(2, 2, T, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(T))
    a = a / (1 + a.abs()) * (torch.arange(T) % 5 != 3)[:, None]
    h, states = torch.zeros(2, 3, dtype=a.dtype), []
    for t in range(T):
        states.append(h := a[:, t] * h + b[:, t])
    torch.testing.assert_close(RECURRENCES[method](a, b), torch.stack(states, 1))


def test_chunks_of_any_length():
    a, b = randn(2, 2, 10, 3, dtype=torch.float64) / 2
    for chunk in (1, 3, 10, 64):
        torch.testing.assert_close(scan.recur_chunked(a, b, chunk), scan.recur_sequential(a, b))


@pytest.mark.parametrize("how", [*BACKWARDS, *RECURRENCES])
def test_backward(how):
    args, dy = [t.double() for t in inputs(2, 9, 4, 3)], randn(2, 9, 4, seed=8, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in args]
    want = torch.autograd.grad(unrolled(*leaves), leaves, dy)
    if how in BACKWARDS:
        got = run(BACKWARDS[how], how, dy, *args)
    else:
        got = torch.autograd.grad(scan_torch(*leaves, method=how)[0], leaves, dy)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_other_shapes_are_refused():
    x, delta, a, b, c, d = inputs(2, 5, 4, 3)
    for impl in [i for i in IMPLS if i != "numpy"]:
        with pytest.raises(ValueError, match=r"b must be \[2, 5, 3\] where x is \[2, 5, 4\], got \[2, 4, 3\]"):
            IMPLS[impl](x, delta, a, b[:, 1:], c, d)
        with pytest.raises(ValueError, match=r"x is \[B, T, I\]"):
            IMPLS[impl](x[0], delta, a, b, c, d)
        with pytest.raises(ValueError, match=r"h must be \[2, 4, 3\]"):
            IMPLS[impl](x, delta, a, b, c, d, torch.zeros(4, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_runs_natively(dtype):
    if NATIVE != "cuda":
        pytest.skip("torch finds no GPU, or TRITON_INTERPRET=1 is set")
    args = [t.cuda() if i in (2, 5) else t.to("cuda", dtype) for i, t in enumerate(inputs(2, 100, 130, 16))]
    y, h = IMPLS["triton"](*args)
    want = unrolled(*(t.double().cpu() for t in args)).cuda()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (y.double() - want).abs().max() <= tolerance * want.abs().max() and h.dtype == torch.float32
