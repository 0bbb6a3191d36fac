"""Attention against PyTorch's fused operator and autograd: groups, masks, biases, queries that see nothing."""

import numpy as np
import pytest
import torch
from op_checks import check, check_backward, randn, run, strided
from torch.nn.functional import scaled_dot_product_attention

from llmstack.ops.attention import (
    BACKWARDS,
    attention_formula,
    attention_np,
    attention_torch,
    attention_weights,
    causal_mask,
)
from llmstack.ops.softmax import IMPLS as SOFTMAX
from llmstack.ops.softmax import online_softmax_np

IMPLS = {
    "numpy": attention_np,
    "torch": attention_torch,
    "formula": attention_formula,
    "online": lambda *a, **k: torch.from_numpy(
        attention_np(
            *(t.numpy() if torch.is_tensor(t) else t for t in a), **k, softmax=lambda s: online_softmax_np(s, 3)
        )
    ),
}
if "triton" in SOFTMAX:
    kernel = lambda scores: run(SOFTMAX["triton"], "triton", scores)[0]
    IMPLS["triton softmax"] = lambda *a, **k: attention_formula(*a, **k, softmax=kernel)

SHAPES = [(1, 1, 1, 1, 1, 1), (2, 6, 2, 7, 7, 8), (1, 4, 1, 5, 63, 16), (1, 2, 2, 63, 100, 32), (0, 2, 1, 3, 3, 4)]

CASES = [(shape, "bias") for shape in SHAPES]  # a bias comes with a causal mask
CASES += [(SHAPES[1], kind) for kind in ("plain", "causal", "scaled")] + [(SHAPES[3], "banded")]


def inputs(B, H, K, T, S, Dh):
    return randn(B, H, T, Dh), randn(B, K, S, Dh, seed=1), randn(B, K, S, Dh, seed=2)


def reference(q, k, v, mask=None, bias=None, scale=None):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    added = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype) if bias is None else bias.to(q.dtype)
    added = added if mask is None else added.masked_fill(~mask, -torch.inf)
    return scaled_dot_product_attention(q, k, v, added, scale=scale)


def options(kind, H, T, S):
    return {
        "plain": {},
        "causal": {"mask": causal_mask(T, S)},
        "banded": {"mask": causal_mask(T, S, window=3)},
        "bias": {"bias": randn(H, T, S, seed=3), "mask": causal_mask(T, S)},
        "scaled": {"scale": 0.3},
    }[kind]


@pytest.mark.parametrize("shape, kind", CASES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl, shape, kind):
    qkv, o = inputs(*shape), options(kind, shape[1], *shape[3:5])
    args = (*qkv, o.get("mask"), o.get("bias"), o.get("scale"))
    exact = reference(*(t.double() for t in qkv), *args[3:])
    got = run(IMPLS[impl], impl, *args)
    check(got, [exact], [attention_formula(*args)])
    assert (got[0].double() - exact).abs().max().item() < 1e-5 if exact.numel() else True


@pytest.mark.parametrize("shape, kind", CASES, ids=str)
def test_backward(shape, kind):
    (q, k, v), o = inputs(*shape), options(kind, shape[1], *shape[3:5])
    mask, scale = o.get("mask"), o.get("scale")
    bias = o.get("bias", torch.zeros(shape[1], *shape[3:5])).expand(shape[0], -1, -1, -1)
    check_backward(
        BACKWARDS["numpy"], "numpy", lambda q, k, v, bias: reference(q, k, v, mask, bias, scale), [q, k, v, bias],
        randn(*q.shape, seed=4), q, k, v, mask, bias, scale,
    )  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
def test_a_query_that_may_see_no_key_gets_zeros(impl):
    q, k, v = inputs(2, 4, 2, 5, 7, 8)
    mask = causal_mask(5, 7).repeat(2, 1, 1, 1)
    mask[0, 0, 3] = False  # one row of one batch entry
    for bias in (None, randn(4, 5, 7)):
        (out,) = run(IMPLS[impl], impl, q, k, v, mask, bias)
        assert (out[0, :, 3] == 0).all() and (out[1] != 0).all()
        torch.testing.assert_close(out[1:], reference(q, k, v, mask, bias)[1:], rtol=1e-5, atol=1e-5)
    (none,) = run(IMPLS[impl], impl, q, k[:, :, :0], v[:, :, :0])
    assert none.shape == q.shape and (none == 0).all()


@pytest.mark.parametrize("impl", ["torch", "formula", "numpy"])
def test_gradients_of_such_a_query_are_zero_and_none_is_nan(impl):
    q, k, v = inputs(1, 4, 2, 5, 7, 8)
    mask = causal_mask(5, 7)
    mask[3] = False
    if impl == "numpy":
        dq, dk, dv, _ = run(BACKWARDS["numpy"], "numpy", torch.ones_like(q), q, k, v, mask)
    else:
        leaves = [t.requires_grad_() for t in (q, k, v)]
        dq, dk, dv = torch.autograd.grad(IMPLS[impl](*leaves, mask).sum(), leaves)
    assert (dq[:, :, 3] == 0).all()
    assert all(torch.isfinite(d).all() for d in (dq, dk, dv))


@pytest.mark.parametrize("impl", IMPLS)
def test_without_positions_attention_is_permutation_equivariant(impl):
    q, k, v = inputs(2, 4, 2, 9, 9, 8)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    mixed = run(IMPLS[impl], impl, *(t[:, :, order] for t in (q, k, v)))[0]
    torch.testing.assert_close(mixed, run(IMPLS[impl], impl, q, k, v)[0][:, :, order], rtol=1e-5, atol=1e-6)


def test_causal_gradients_reach_no_key_ahead():
    x = randn(1, 1, 6, 8).requires_grad_()
    out = attention_torch(x, x, x, causal=True)
    for i in range(6):
        (dx,) = torch.autograd.grad(out[0, 0, i].sum(), x, retain_graph=True)
        assert (dx[0, 0, i + 1 :] == 0).all() and (dx[0, 0, : i + 1].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("T, S", [(5, 5), (1, 9), (2, 2), (2, 9), (4, 9), (9, 4)])
def test_causal_flag_equals_the_mask(T, S):
    q, k, v = inputs(2, 4, 2, T, S, 8)
    mask, seen = causal_mask(T, S), randn(2, 1, 1, S) > -1
    torch.testing.assert_close(attention_torch(q, k, v, causal=True), attention_torch(q, k, v, mask))
    got = attention_torch(q, k, v, seen, causal=True)
    torch.testing.assert_close(got, attention_torch(q, k, v, seen & mask))
    bias = randn(4, T, S)
    torch.testing.assert_close(attention_torch(q, k, v, bias=bias, causal=True), attention_torch(q, k, v, mask, bias))


def test_causal_mask_is_aligned_at_the_end_and_its_band_is_as_wide_as_the_window():
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert causal_mask(2, 4, window=2).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert torch.equal(causal_mask(7, 7), torch.ones(7, 7).tril().bool())
    assert causal_mask(50, 50, window=5).sum(1).max() == 5
    with pytest.raises(ValueError, match="window = -1"):
        causal_mask(3, 3, -1)


def test_rows_of_weights_sum_to_one_and_scores_have_variance_one():
    q, k = randn(1, 4, 200, 64), randn(1, 4, 200, 64, seed=1)
    weights = attention_weights(q, k)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 200))
    seen = []
    attention_weights(q, k, softmax=lambda scores: seen.append(scores) or scores)
    assert seen[0].var().item() == pytest.approx(1, abs=0.02)
    assert (q @ k.mT).var().item() == pytest.approx(64, rel=0.02)


@pytest.mark.parametrize("impl", IMPLS)
def test_strides_do_not_matter(impl):
    qkv = inputs(2, 4, 2, 5, 7, 8)
    got = run(IMPLS[impl], impl, *(strided(t) for t in qkv))[0]
    torch.testing.assert_close(got, run(IMPLS[impl], impl, *qkv)[0], rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused():
    q, k, v = inputs(1, 4, 2, 5, 7, 8)
    with pytest.raises(ValueError, match=r"H divides by K: got q \[1, 4, 5, 8\], k \[1, 3, 7, 8\]"):
        attention_torch(q, k[:, :1].expand(-1, 3, -1, -1), v)
    with pytest.raises(ValueError, match="H divides by K"):
        attention_torch(q, k, v[:, :, :3])
    with pytest.raises(TypeError, match="mask is boolean.*float32"):
        attention_torch(q, k, v, torch.zeros(5, 7))


def test_numpy_keeps_single_precision():
    assert attention_np(*(t.numpy() for t in inputs(1, 2, 1, 3, 3, 4))).dtype == np.float32
