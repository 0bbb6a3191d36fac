"""Softmax against torch.softmax in double precision, safe and online, and rows with nothing to choose from."""

import numpy as np
import pytest
import torch
from op_checks import SHAPES, check, check_backward, randn, run, strided

from llmstack.ops.softmax import BACKWARDS, IMPLS, online_softmax_np, softmax_np, softmax_triton

ALL = IMPLS | {"online": lambda x: torch.from_numpy(online_softmax_np(x.numpy(), block=7))}
softmax = lambda x: torch.softmax(x, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", ALL)
def test_forward(impl, shape):
    x = 5 * randn(*shape)
    check(run(ALL[impl], impl, x), [softmax(x.double())], [softmax(x)], terms=x.shape[-1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", BACKWARDS)
def test_backward(impl, shape):
    x, dy = randn(*shape), randn(*shape, seed=1)
    check_backward(BACKWARDS[impl], impl, softmax, [x], dy, softmax(x.double()))


@pytest.mark.parametrize("impl", ALL)
def test_rows_sum_to_one_and_large_scores_do_not_overflow(impl):
    x = randn(3, 100) + torch.tensor([[1e4], [-1e4], [0.0]])
    (y,) = run(ALL[impl], impl, x)
    torch.testing.assert_close(y.sum(-1), torch.ones(3))


@pytest.mark.parametrize("impl", ALL)
def test_a_masked_row_gives_zeros_and_others_skip_what_is_masked(impl):
    x = randn(3, 20)
    x[0], x[1, :15], x[2, 5:] = -torch.inf, -torch.inf, -torch.inf
    (y,) = run(ALL[impl], impl, x)
    assert (y[0] == 0).all() and (y[1, :15] == 0).all() and (y[2, 5:] == 0).all()
    torch.testing.assert_close(y[1:], softmax(x)[1:])


@pytest.mark.parametrize("impl", ALL)
def test_a_row_of_no_values_stays_empty(impl):
    (y,) = run(ALL[impl], impl, torch.ones(3, 0))
    assert y.shape == (3, 0)


@pytest.mark.parametrize("block", [1, 3, 64, 1000])
def test_online_equals_safe_for_any_block(block):
    x = randn(4, 130, dtype=torch.float64).numpy() * 30
    np.testing.assert_allclose(online_softmax_np(x, block), softmax_np(x), rtol=1e-12)


@pytest.mark.skipif("triton" not in IMPLS, reason="Triton is not installed")
def test_strides_do_not_matter_and_what_cannot_run_is_refused():
    x = randn(5, 30)
    assert torch.equal(run(softmax_triton, "triton", strided(x))[0], run(softmax_triton, "triton", x)[0])
    with pytest.raises(TypeError, match="float64"):
        softmax_triton(x.double())
    with pytest.raises(ValueError, match="at most 16384 values, got 20000"):
        softmax_triton(torch.ones(1, 20000))
    with pytest.raises(ValueError, match=r"expected \[5, 30\], got \[5, 3\]"):
        BACKWARDS["triton"](x[:, :3], x)
