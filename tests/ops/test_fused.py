"""Fused operations against PyTorch's own, one after the other, and the bytes that fusing saves."""

import pytest
import torch
from op_checks import NATIVE, SHAPES, check, check_backward, check_forward, randn, run, strided
from torch.nn.functional import cross_entropy, gelu, layer_norm, rms_norm

from llmstack.ops import cross_entropy as unfused_loss
from llmstack.ops import fused, layernorm, rmsnorm, traffic
from llmstack.ops._triton import HAVE_TRITON, INTERPRETED, tl, triton

needs_counts = pytest.mark.skipif(not (HAVE_TRITON and INTERPRETED), reason="bytes are counted in the interpreter")
needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
NORMS = {
    "rmsnorm": (lambda s, g, b: rms_norm(s, g.shape, g, 1e-6), lambda s, g, b: rmsnorm.IMPLS["triton"](s, g)),
    "layernorm": (lambda s, g, b: layer_norm(s, g.shape, g, b, 1e-6), lambda *a: layernorm.IMPLS["triton"](*a, 1e-6)),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("impl", fused.ADD_NORM)
def test_add_norm(impl, kind, shape):
    x, r, g, b = randn(*shape), randn(*shape, seed=1), randn(shape[-1], seed=2), randn(shape[-1], seed=3)
    reference = lambda x, r, g, b: (x + r, NORMS[kind][0](x + r, g, b))
    got = run(fused.ADD_NORM[impl], impl, x, r, g, b, kind=kind)
    check(got, reference(*(t.double() for t in (x, r, g, b))), reference(x, r, g, b))


@pytest.mark.parametrize("shape", [*SHAPES, (3, 1025)], ids=str)
@pytest.mark.parametrize("impl", fused.BIAS_GELU)
def test_bias_gelu(impl, shape):
    x, b, dy = 2 * randn(*shape), randn(shape[-1], seed=1), randn(*shape, seed=2)
    reference = lambda x, b: gelu(x + b)
    check_forward(fused.BIAS_GELU[impl], impl, reference, x, b)
    if impl in fused.BIAS_GELU_BACKWARDS:
        check_backward(fused.BIAS_GELU_BACKWARDS[impl], impl, reference, [x, b], dy, x, b)


LOSS = lambda x, w, targets: cross_entropy(x.flatten(0, -2) @ w.T, targets.flatten(), ignore_index=-1)


def words(shape, V):
    x, w = randn(*shape), randn(V, shape[-1], seed=1)
    targets = (torch.arange(x[..., 0].numel()) * 37 % V).view(shape[:-1])
    return x, w, targets.masked_fill(targets % 5 == 2, -1)


@pytest.mark.parametrize(("shape", "V"), [((1, 1), 7), ((3, 5, 63), 100), ((150, 40), 1000)], ids=str)
@pytest.mark.parametrize("impl", fused.LINEAR_CROSS_ENTROPY)
def test_linear_cross_entropy(monkeypatch, impl, shape, V):
    monkeypatch.setattr(fused, "CHUNK", 300)
    x, w, targets = words(shape, V)
    fn = fused.LINEAR_CROSS_ENTROPY[impl]
    sums = dict(terms=shape[-1], size=(x @ w.T).abs().max().item())  # of logits
    check_forward(fn, impl, LOSS, x, w, targets, **sums, ignore_index=-1)
    backward = fused.linear_cross_entropy_np_backward
    if impl != "numpy":

        def backward(dloss, x, w, targets, **options):
            x, w = x.requires_grad_(), w.requires_grad_()
            return torch.autograd.grad(fn(x, w, targets, **options), [x, w], dloss)

    reference = lambda x, w: LOSS(x, w, targets)
    check_backward(backward, impl, reference, [x, w], torch.tensor(0.7), x, w, targets, **sums, ignore_index=-1)


@pytest.mark.parametrize("impl", fused.LINEAR_CROSS_ENTROPY)
def test_losses_of_positions_of_none_of_large_logits_and_strides(impl):
    x, w, targets = words((6, 40), 100)
    fn = lambda *args: run(fused.LINEAR_CROSS_ENTROPY[impl], impl, *args, -1, "none")[0]
    want = cross_entropy(x @ w.T, targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(fn(strided(x), strided(w), targets), want)
    assert torch.isfinite(fn(1000 * x, w, targets)).all()
    assert fn(x[:0], w, targets[:0]).shape == (0,)
    with pytest.raises(ValueError, match="targets"):
        fn(x, w, targets[:3])


def test_no_more_than_a_chunk_of_the_logits_exists(monkeypatch):
    """Fifty rows of a vocabulary of 20,000: no tensor, forward or backward, is larger than W's 20,000 x 8."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        values = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = [] if func.is_view or "expand" in str(func) else tree_leaves(out)
            self.values = max([self.values, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
            return out

    monkeypatch.setattr(fused, "CHUNK", 1000)
    x, w, targets = words((50, 8), 20_000)
    with Largest() as largest:
        fused.linear_cross_entropy_torch(x.requires_grad_(), w.requires_grad_(), targets, -1).backward()
    assert largest.values <= w.numel() < 50 * len(w)


def test_narrow_inputs_are_summed_in_fp32_and_the_norm_is_that_of_the_stored_sum():
    x, r, g = randn(4, 4096).half(), (200 * randn(4, 4096, seed=1)).half(), randn(4096, seed=2).half()
    want = x + r, rmsnorm.rmsnorm_torch(x + r, g)
    for impl in set(fused.ADD_NORM) - {"numpy"}:
        s, y = (t.cpu() for t in fused.ADD_NORM[impl](*(t.to(NATIVE) for t in (x, r, g))))
        assert s.dtype == y.dtype == torch.float16 and torch.equal(s, want[0])
        torch.testing.assert_close(y, want[1], rtol=1e-3, atol=1e-3)
        assert torch.equal(y, run(rmsnorm.IMPLS[impl], impl, s, g)[0])
    x, w, targets = words((50, 64), 3000)
    exact = LOSS(x.half().double(), w.half().double(), targets)
    got = fused.linear_cross_entropy_torch(x.half().requires_grad_(), w.half(), targets, -1)
    assert got.dtype == torch.float32 and abs(got - exact) < 2e-3


@triton.jit
def _add_kernel(x_ptr, r_ptr, s_ptr, R, D, BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    inside = (row < R) & (col < D)
    r = tl.load(r_ptr + col, mask=col < D) if BIAS else tl.load(r_ptr + row * D + col, mask=inside)
    tl.store(s_ptr + row * D + col, tl.load(x_ptr + row * D + col, mask=inside) + r, mask=inside)


@triton.jit
def _gelu_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N)
    tl.store(y_ptr + at, 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)), mask=at < N)


def moved(*launches):
    with traffic.counting() as counted:
        out = [launch() for launch in launches]
    return counted.loaded, counted.stored, counted.launches, out[-1]


@needs_counts
@pytest.mark.parametrize("kind", NORMS)
def test_add_norm_saves_the_reading_of_the_sum(kind):
    R, D, w = 9, 100, 4
    x, r, g, b, s = randn(R, D), randn(R, D, seed=1), randn(D, seed=2), randn(D, seed=3), torch.empty(R, D)
    add = lambda: _add_kernel[(1,)](x, r, s, R, D, False, 16, 128)
    loaded, stored, launches, y = moved(add, lambda: NORMS[kind][1](s, g, b))
    once, written, one, (s2, y2) = moved(lambda: fused.add_norm_triton(x, r, g, b, kind=kind))
    torch.testing.assert_close(s2, s), torch.testing.assert_close(y2, y)
    parameters = w * D * (1 if kind == "rmsnorm" else 2)
    assert (once, written, one, launches) == (2 * w * R * D + parameters, 2 * w * R * D, 1, 2)
    assert (loaded - once, stored - written) == (w * R * D, 0)


@needs_counts
def test_bias_gelu_saves_the_intermediate_twice():
    R, F, w = 9, 100, 4
    x, b, s, y = randn(R, F), randn(F, seed=1), torch.empty(R, F), torch.empty(R, F)
    add = lambda: _add_kernel[(1,)](x, b, s, R, F, True, 16, 128)
    loaded, stored, *_ = moved(add, lambda: _gelu_kernel[(1,)](s, y, R * F, 1024))
    once, written, one, y2 = moved(lambda: fused.bias_gelu_triton(x, b))
    torch.testing.assert_close(y2, y)
    assert (once, written, one) == (w * (R * F + F), w * R * F, 1)
    assert (loaded - once, stored - written) == (w * s.numel(), w * s.numel())
    assert moved(lambda: fused.bias_gelu_triton(x, b, y))[:3] == (w * (2 * R * F + F), w * R * F, 1)


@needs_counts
def test_linear_cross_entropy_never_moves_logits():
    R, V, D, w = 200, 300, 40, 4
    x, weight, targets = words((R, D), V)
    P, Q, _ = fused.TILES
    loaded, stored, launches, _ = moved(lambda: fused.linear_cross_entropy_triton(x, weight, targets, -1))
    assert loaded == w * (R * D * -(-V // Q) + V * D * -(-R // P)) + 8 * R
    assert (stored, launches) == (12 * R, 1)
    logits = x @ weight.T
    read, *_ = moved(lambda: unfused_loss.cross_entropy_triton(logits, targets, -1))
    assert read > w * R * V  # by the loss alone, after a matmul has written as much


@needs_triton
def test_what_does_not_fit_is_refused():
    x, g = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"r has the shape of x: expected \[2, 8\], got \[1, 8\]"):
        fused.add_norm_triton(x, x[:1], g)
    with pytest.raises(ValueError, match=r"expected shape \[8\], got \[7\]"):
        fused.bias_gelu_triton(x, g[:7])
    for leaf in (x, g):
        with pytest.raises(RuntimeError, match="no gradient"):
            fused.bias_gelu_triton(*(t.clone().requires_grad_() if t is leaf else t for t in (x, g)))
        with pytest.raises(RuntimeError, match="no gradient"):
            fused.add_norm_triton(x, *(t.clone().requires_grad_() if t is leaf else t for t in (x, g)))


@pytest.mark.parametrize("impl", fused.ADD_NORM)
def test_an_unknown_norm_is_refused(impl):
    x, g = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="kind = 'layer', but a norm is 'rmsnorm' or 'layernorm'"):
        run(fused.ADD_NORM[impl], impl, x, x, g, kind="layer")


@pytest.mark.parametrize("impl", [impl for impl in fused.LINEAR_CROSS_ENTROPY if impl != "numpy"])
def test_the_losss_refusals(impl):
    """Rows of another width would be read past their end; the second derivative would lack the statistics'."""
    x, w, targets = words((3, 8), 20)
    fn = fused.LINEAR_CROSS_ENTROPY[impl]
    for wrong in (w[:, :7], w[0]):
        with pytest.raises(ValueError, match=r"x \[..., D\] meets w \[V, D\], got \[3, 8\] and"):
            run(fn, impl, x, wrong, targets, -1)
    x = x.to(NATIVE).requires_grad_()
    (dx,) = torch.autograd.grad(fn(x, w.to(NATIVE), targets.to(NATIVE), -1), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        torch.autograd.grad(dx.pow(2).sum(), x)


@needs_triton
def test_rows_of_no_width():
    assert fused.bias_gelu_triton(torch.ones(2, 0), torch.ones(0)).shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_run_natively(dtype):
    if NATIVE != "cuda":
        pytest.skip("torch finds no GPU, or TRITON_INTERPRET=1 is set")
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}[dtype]
    near = lambda a, b: torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)
    x, r, g, b = (randn(*shape, seed=i).to("cuda", dtype) for i, shape in enumerate([(70, 1000)] * 2 + [(1000,)] * 2))
    for kind in NORMS:
        s, y = fused.add_norm_triton(x, r, g, b, kind=kind)
        near(s, x + r), near(y, NORMS[kind][0](s.double(), g.double(), b.double()))
    near(fused.bias_gelu_triton(x, b), gelu(x.double() + b.double()))
    want = fused.bias_gelu_np_backward(*(t.double().cpu().numpy() for t in (r, x, b)))
    near(fused.bias_gelu_triton_backward(r, x, b)[0].cpu(), torch.as_tensor(want[0]))
    x, w, targets = words((150, 100), 3000)
    x, w = ((t / 10).to("cuda", dtype).requires_grad_() for t in (x, w))
    targets = targets.cuda()
    loss, exact = fused.linear_cross_entropy_triton(x, w, targets, -1), LOSS(x.double(), w.double(), targets)
    near(loss, exact)
    for a, e in zip(torch.autograd.grad(loss, [x, w]), torch.autograd.grad(exact, [x, w])):
        assert (a.double() - e).norm() <= 2 * tolerance * e.norm()
