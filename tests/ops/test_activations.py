"""Activations against torch's own, slopes against autograd, and how far GELU's approximations are off."""

import numpy as np
import pytest
import torch
from op_checks import SHAPES, check, check_backward, randn, run
from torch.nn import functional as F

from llmstack.ops.activations import ACTIVATIONS_NP, ACTIVATIONS_NP_BACKWARD, ACTIVATIONS_TORCH
from llmstack.ops.linear import linear_np, linear_torch

REFERENCE = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}
IMPLS = {"numpy": ACTIVATIONS_NP, "torch": ACTIVATIONS_TORCH}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", REFERENCE)
def test_forward(name, impl, shape):
    x = 3 * randn(*shape)
    (got,) = run(IMPLS[impl][name], impl, x)
    assert got.dtype == x.dtype
    check([got], [REFERENCE[name](x.double())], [REFERENCE[name](x)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", REFERENCE)
def test_backward(name, shape):
    x, dy = 3 * randn(*shape), randn(*shape, seed=1)
    check_backward(ACTIVATIONS_NP_BACKWARD[name], "numpy", REFERENCE[name], [x], dy, x)


@pytest.mark.parametrize("name", REFERENCE)
def test_large_values_do_not_overflow(name):
    x = np.array([-1e4, 1e4], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_array_equal(ACTIVATIONS_NP[name](x), [0, 1e4])


@pytest.mark.parametrize("name, most", [("gelu_tanh", 4.74e-4), ("gelu_sigmoid", 2.04e-2)])
def test_gelu_approximations_are_off_by(name, most):
    x = np.linspace(-8, 8, 160_001)
    worst = np.abs(ACTIVATIONS_NP[name](x) - F.gelu(torch.from_numpy(x)).numpy()).max()
    assert 0.98 * most < worst < most


def test_relu_leaves_half_of_a_normal_sample_at_zero():
    y = ACTIVATIONS_NP["relu"](randn(100_000).numpy())
    assert np.mean(y == 0) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("impl, linear", [("numpy", linear_np), ("torch", linear_torch)])
def test_ffn_formula_is_a_sequential_and_treats_tokens_alike(impl, linear):
    """ReLU(x W1 + b1) W2 + b2, position by position."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    w1, b1, w2, b2 = (p.detach() for p in layers.parameters())
    relu = IMPLS[impl]["relu"]
    ffn = lambda x: run(lambda x, w1, b1, w2, b2: linear(relu(linear(x, w1, b1)), w2, b2), impl, x, w1, b1, w2, b2)[0]
    x, order = randn(2, 7, 8), torch.randperm(7)
    torch.testing.assert_close(ffn(x), layers(x).detach())
    torch.testing.assert_close(ffn(x[:, order]), ffn(x)[:, order])
