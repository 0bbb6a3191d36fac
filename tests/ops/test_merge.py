"""Attention over parts, merged, against attention over the whole; sets without keys; gradients."""

import pytest
import torch
from op_checks import check, check_backward, randn, run

from llmstack.ops.merge import BACKWARDS, IMPLS, attention_lse

SHAPES = [(1, 1, 1, 1), (2, 3, 7, 5), (1, 2, 63, 8)]


def merged(*parts):
    """The formula with plain exponentials."""
    outs, lses = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    shares = torch.stack([lse.exp() for lse in lses])
    return (torch.stack(outs) * (shares / shares.sum(0))[..., None]).sum(0)


def parts(shape, n, dtype=torch.float32):
    return [randn(*shape, seed=s, dtype=dtype) for s in range(n)], [randn(*shape[:-1], seed=9 + s) for s in range(n)]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl, shape, n):
    outs, lses = parts(shape, n)
    exact = merged(*(x.double() for x in (*outs, *lses)))
    as_lists = lambda *x: IMPLS[impl](x[:n], x[n:])
    check(run(as_lists, impl, *outs, *lses), [exact], [merged(*outs, *lses)])


@pytest.mark.parametrize("impl", BACKWARDS)
def test_backward(impl):
    outs, lses = parts((2, 3, 7, 5), 3)
    as_lists = lambda dy, *x: BACKWARDS[impl](dy, x[:3], x[3:])
    check_backward(as_lists, impl, merged, [*outs, *lses], randn(2, 3, 7, 5, seed=20), *outs, *lses)


@pytest.mark.parametrize("cuts", [[0, 10], [0, 1, 10], [0, 3, 3, 8, 10]], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_parts_of_the_keys_make_the_whole(impl, cuts):
    q, k, v = randn(2, 3, 6, 4), randn(2, 3, 10, 4, seed=1), randn(2, 3, 10, 5, seed=2)
    mask = randn(6, 10, seed=3) > -0.3
    mask[2], mask[3, :8] = False, False
    pieces = [attention_lse(q, k[:, :, a:b], v[:, :, a:b], mask[:, a:b]) for a, b in zip(cuts, cuts[1:]) if a < b] + [
        attention_lse(q, k, v, torch.zeros(6, 10, dtype=torch.bool))
    ]  # a set that nobody sees
    outs, lses = zip(*pieces)
    (out,) = run(lambda *x: IMPLS[impl](x[: len(outs)], x[len(outs) :]), impl, *outs, *lses)
    weights = (q @ k.mT / 2).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)
    torch.testing.assert_close(out, weights @ v)
    assert (out[:, :, 2] == 0).all()


def test_scores_far_from_zero_and_biases():
    q, k, v, bias = (
        randn(1, 1, 4, 8) * 100,
        randn(1, 1, 9, 8, seed=1) * 10,
        randn(1, 1, 9, 3, seed=2),
        randn(4, 9, seed=3),
    )
    out, lse = attention_lse(q, k, v, bias=bias)
    scores = (q @ k.mT).double() * 8**-0.5 + bias
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1))
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), rtol=1e-4, atol=1e-4)


def test_gradients_pass_a_query_without_keys():
    q, k, v = (randn(1, 2, 5, 4, seed=s, dtype=torch.float64).requires_grad_() for s in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)  # the first query sees nothing
    both = lambda q, k, v: (
        attention_lse(q, k, v, mask)[0].sum(-1) + attention_lse(q, k, v, mask)[1][:, :, 1:].sum(-1)[..., None]
    )
    assert torch.autograd.gradcheck(both, (q, k, v))
    grads = torch.autograd.grad(both(q, k, v).sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, 0] == 0).all()
