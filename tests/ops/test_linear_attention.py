"""Linear attention: the table, chunks and recurrence agree; FAVOR+ estimates softmax's kernel without bias."""

import math

import pytest
import torch
from op_checks import check, check_backward, randn, run
from torch.nn.functional import scaled_dot_product_attention

from llmstack.ops.linear_attention import (
    BACKWARDS,
    IMPLS,
    elu_features,
    favor_directions,
    favor_features,
    linear_attention_step,
    linear_attention_torch,
)


def table(causal):
    def attend(phi_q, phi_k, v):
        weights = torch.einsum("bhtm,bhsm->bhts", phi_q, phi_k)
        weights = weights.tril() if causal else weights
        return torch.einsum("bhts,bhsd->bhtd", weights / weights.sum(-1, keepdim=True), v)

    return attend


def inputs(T, M=6, Dv=5):
    return elu_features(randn(2, 3, T, M)), elu_features(randn(2, 3, T, M, seed=1)), randn(2, 3, T, Dv, seed=2)


@pytest.mark.parametrize("T", [1, 7, 64, 100])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl, causal, T):
    args = inputs(T)
    exact = table(causal)(*(x.double() for x in args))
    check(run(IMPLS[impl], impl, *args, causal=causal), [exact], [table(causal)(*args)])


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_backward(causal):
    args, dy = inputs(11), randn(2, 3, 11, 5, seed=5)
    check_backward(BACKWARDS["numpy"], "numpy", table(causal), args, dy, *args, causal=causal)
    leaves = [x.double().requires_grad_() for x in args]
    ours = torch.autograd.grad(linear_attention_torch(*leaves, causal=causal, chunk=4), leaves, dy.double())
    theirs = torch.autograd.grad(table(causal)(*leaves), leaves, dy.double())
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("features", ["elu", "favor"])
def test_parallel_equals_recurrent(features):
    x = [randn(1, 2, 70, 8, seed=s) for s in range(3)]
    w = favor_directions(32, 8)
    phi = elu_features if features == "elu" else lambda x: favor_features(x, w)
    q, k, v = phi(x[0]), phi(x[1]), x[2]
    parallel = linear_attention_torch(q, k, v, causal=True, chunk=16)
    state = None
    for t in range(70):
        out, state = linear_attention_step(q[:, :, t], k[:, :, t], v[:, :, t], state)
        torch.testing.assert_close(out, parallel[:, :, t], rtol=1e-4, atol=1e-5)
    assert state.shape == (1, 2, q.shape[-1], 9), "the state is as large after 70 tokens as after one"


def estimates(M, orthogonal, draws=200):
    """(estimate − truth) / truth of exp(q·k / √Dh) for a few pairs and many draws of the directions."""
    q, k = 0.7 * randn(1, 1, 6, 8, dtype=torch.float64), 0.7 * randn(1, 1, 6, 8, seed=1, dtype=torch.float64)
    truth = torch.exp(q @ k.mT / math.sqrt(8))
    found = []
    for seed in range(draws):
        w = favor_directions(M, 8, orthogonal, seed).double()
        found.append(favor_features(q, w, stable=False) @ favor_features(k, w, stable=False).mT)
    return torch.stack(found) / truth - 1


@pytest.mark.parametrize("orthogonal", [False, True], ids=["independent", "orthogonal"])
def test_the_kernel_is_estimated_without_bias(orthogonal):
    errors = estimates(16, orthogonal)
    standard = errors.std(0) / math.sqrt(len(errors))
    assert (errors.mean(0).abs() < 4.5 * standard).all()


def test_error_falls_as_the_root_of_the_features_and_orthogonal_ones_are_better():
    spread = {M: estimates(M, False).pow(2).mean().sqrt() for M in (8, 32, 128)}
    slope = math.log(spread[128] / spread[8]) / math.log(16)
    assert -0.6 < slope < -0.4
    assert estimates(8, True).pow(2).mean() < 0.9 * estimates(8, False).pow(2).mean()


def test_directions():
    w = favor_directions(20, 8)
    assert w.shape == (20, 8)
    unit = torch.nn.functional.normalize(w, dim=-1)
    for group in (unit[:8], unit[8:16], unit[16:]):
        torch.testing.assert_close(group @ group.T, torch.eye(len(group)), atol=1e-5, rtol=0)
    assert 5 < favor_directions(800, 8).pow(2).sum(-1).mean() < 11, "lengths of Gaussian vectors: 8 on average"
    with pytest.raises(ValueError, match="M = 0"):
        favor_directions(0, 8)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_performer_comes_near_to_softmax_attention(causal):
    q, k, v = (0.4 * randn(1, 2, 40, 8, seed=s) for s in range(3))
    exact = scaled_dot_product_attention(q, k, v, is_causal=causal)
    errors = []
    for M in (8, 512):
        w = favor_directions(M, 8)
        out = linear_attention_torch(favor_features(q, w), favor_features(k, w), v, causal)
        errors.append(float((out - exact).norm() / exact.norm()))
    assert errors[1] < errors[0] / 4, "64 times the features, an eighth of the error"


def test_large_values_do_not_overflow():
    q, k, v = (100 * randn(1, 1, 10, 8, seed=s) for s in range(3))
    w = favor_directions(32, 8)
    assert linear_attention_torch(favor_features(q, w), favor_features(k, w), v, causal=True).isfinite().all()


def test_causal_needs_as_many_queries_as_keys():
    with pytest.raises(ValueError, match="causal features share a shape"):
        linear_attention_torch(randn(1, 1, 3, 4), randn(1, 1, 5, 4), randn(1, 1, 5, 4), causal=True)


def test_one_feature_of_one_dimension():
    assert favor_directions(1, 8).shape == (1, 8) and favor_directions(8, 1).shape == (8, 1)
    for M, Dh in ((0, 8), (8, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            favor_directions(M, Dh)
