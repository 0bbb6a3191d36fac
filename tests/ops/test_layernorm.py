"""LayerNorm against PyTorch's own operator in double precision; Welford's one pass against two."""

import numpy as np
import pytest
import torch
from op_checks import SHAPES, check_backward, check_forward, randn, run, strided
from torch.nn.functional import layer_norm

from llmstack.ops.layernorm import BACKWARDS, IMPLS, layernorm_triton, welford_np

reference = lambda x, g, b=None: layer_norm(x, g.shape, g, b)
inputs = lambda shape: (randn(*shape), randn(shape[-1], seed=1), randn(shape[-1], seed=2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl, shape):
    x, g, b = inputs(shape)
    check_forward(IMPLS[impl], impl, reference, x, g, b, terms=x.shape[-1])
    check_forward(IMPLS[impl], impl, reference, x, g, terms=x.shape[-1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", BACKWARDS)
def test_backward(impl, shape):
    x, g, b = inputs(shape)
    check_backward(BACKWARDS[impl], impl, reference, [x, g, b], randn(*shape, seed=3), x, g)


@pytest.mark.parametrize("impl", IMPLS)
def test_shifting_and_rescaling_change_nothing_and_strides_do_not_matter(impl):
    x, g, b = inputs((40, 24))
    norm = lambda x: run(IMPLS[impl], impl, x, g, b)[0]
    torch.testing.assert_close(norm(strided(x)), norm(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm(100 * x + 7), norm(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("offset", [0, 1e4])
def test_welford_one_pass_equals_two(offset):
    """No further from the exact values than two passes in fp32 are, up to the roundoff of D steps."""
    x = (randn(5, 1000) + offset).numpy()
    exact = x.astype(np.float64)
    floor = 1000 * np.finfo(np.float32).eps / 2
    for got, two_passes, want in zip(welford_np(x), (x.mean(-1), x.var(-1)), (exact.mean(-1), exact.var(-1))):
        allowed = 2 * np.abs(two_passes - want) + floor * max(1.0, offset)
        assert got.dtype == np.float32 and (np.abs(got - want) <= allowed).all()


def test_mean_of_squares_cancels_where_welford_does_not():
    x = (randn(5, 1000) + 1e4).numpy()
    naive = np.mean(x * x, -1) - np.mean(x, -1) ** 2
    exact = x.astype(np.float64).var(-1)
    assert np.abs(naive - exact).max() > 100 * np.abs(welford_np(x)[1] - exact).max()


@pytest.mark.skipif("triton" not in IMPLS, reason="Triton is not installed")
def test_few_programs_take_many_rows_each(monkeypatch):
    monkeypatch.setattr("llmstack.ops.rmsnorm.PROGRAMS", 2)
    x, g, b = inputs((1500, 100))
    check_backward(BACKWARDS["triton"], "triton", reference, [x, g, b], randn(1500, 100, seed=3), x, g)


@pytest.mark.skipif("triton" not in IMPLS, reason="Triton is not installed")
def test_a_wrong_scale_or_shift_is_refused():
    with pytest.raises(ValueError, match=r"g acts on the last axis.*expected shape \[8\], got \[7\]"):
        layernorm_triton(torch.ones(2, 8), torch.ones(7))
    with pytest.raises(ValueError, match=r"b acts on the last axis"):
        layernorm_triton(torch.ones(2, 8), torch.ones(8), torch.ones(1))


@pytest.mark.skipif("triton" not in BACKWARDS, reason="Triton has no build here")
def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"dy has the shape of x: expected \[2, 4\], got \[1, 4\]"):
        BACKWARDS["triton"](torch.ones(1, 4), torch.ones(2, 4), torch.ones(4))
