"""Cross-entropy against torch's own: ignored positions, positions all ignored, rows longer than a block."""

import math

import pytest
import torch
from op_checks import check, check_backward, randn, run, strided
from torch.nn import functional as F

from llmstack.ops.cross_entropy import BACKWARDS, IMPLS, REDUCTIONS

SHAPES = [(1, 1), (7, 1), (1, 63), (3, 5, 100), (2, 1000), (0, 16)]


def inputs(shape, ignored=True):
    logits = 4 * randn(*shape)
    targets = torch.randint(0, shape[-1], shape[:-1], generator=torch.Generator().manual_seed(1))
    if ignored and targets.numel() > 2:
        targets.view(-1)[::3] = -100
    return logits, targets


def reference(logits, targets, reduction):
    flat = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    return {"none": flat, "sum": flat.sum(), "mean": flat.sum() / max((targets != -100).sum(), 1)}[reduction]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl, shape, reduction):
    z, t = inputs(shape)
    got = run(IMPLS[impl], impl, z, t, reduction=reduction)
    assert got[0].dtype == z.dtype
    check(got, [reference(z.double(), t, reduction)], [reference(z, t, reduction)], terms=shape[-1])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", ["torch", *BACKWARDS])
def test_backward(impl, shape, reduction):
    z, t = inputs(shape)
    dloss = randn(*(t.shape if reduction == "none" else ()), seed=2)
    fn = BACKWARDS.get(impl, lambda dloss, z, t, reduction: _autograd(dloss, z, t, reduction))
    check_backward(
        fn, impl, lambda z: reference(z, t, reduction), [z], dloss, z, t, terms=shape[-1], reduction=reduction
    )


def _autograd(dloss, z, t, reduction):
    leaf = z.requires_grad_()
    return torch.autograd.grad(IMPLS["torch"](leaf, t, reduction=reduction), leaf, dloss)


@pytest.mark.parametrize("impl", IMPLS)
def test_all_positions_ignored_is_zero_loss_and_zero_gradient(impl):
    z, t = randn(4, 9), torch.full((4,), 7)
    assert run(IMPLS[impl], impl, z, t, ignore_index=7)[0] == 0
    if impl in BACKWARDS:
        (dz,) = run(BACKWARDS[impl], impl, torch.tensor(1.0), z, t, ignore_index=7)
    else:
        leaf = z.requires_grad_()
        (dz,) = torch.autograd.grad(IMPLS[impl](leaf, t, ignore_index=7), leaf)
    assert dz.shape == z.shape and (dz == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_logits_cost_log_of_the_vocabulary_and_strides_do_not_matter(impl):
    z, t = torch.zeros(5, 50), torch.arange(5)
    assert run(IMPLS[impl], impl, strided(z), strided(t.float()).long())[0].item() == pytest.approx(math.log(50))


@pytest.mark.parametrize("impl", IMPLS)
def test_large_and_masked_logits_stay_finite(impl):
    z = torch.tensor([[1e4, 0.0, -torch.inf], [-torch.inf, -1e4, -1e4]])
    (got,) = run(IMPLS[impl], impl, z, torch.tensor([0, 1]), reduction="none")
    torch.testing.assert_close(got, torch.tensor([0.0, math.log(2)]))


@pytest.mark.skipif("triton" not in IMPLS, reason="Triton is not installed")
@pytest.mark.parametrize("V", [16, 100])
def test_kernels_take_rows_longer_than_a_block(V, monkeypatch):
    monkeypatch.setattr("llmstack.ops.cross_entropy.BLOCK", 16)
    z, t = inputs((3, V))
    ours, back = IMPLS["triton"], BACKWARDS["triton"]
    check(run(ours, "triton", z, t), [reference(z.double(), t, "mean")], [reference(z, t, "mean")])
    check_backward(back, "triton", lambda z: reference(z, t, "mean"), [z], torch.tensor(1.0), z, t)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_does_not_fit_is_refused(impl):
    z, t = randn(4, 9), torch.zeros(4, dtype=torch.long)
    call = lambda *a, **k: run(IMPLS[impl], impl, *a, **k)
    with pytest.raises(IndexError, match="targets has 9, but the table has rows 0 to 8"):
        call(z, t + 9)
    with pytest.raises(ValueError, match=r"got \[4, 9\] and \[3\]"):
        call(z, t[:3])
    with pytest.raises(ValueError, match="reduction = 'median', but it must be one of mean, sum, none"):
        call(z, t, reduction="median")


@pytest.mark.parametrize("name", IMPLS)
def test_targets_of_any_whole_type_and_of_no_other(name):
    logits, cast = torch.eye(2, 3), (lambda x: x.numpy()) if name == "numpy" else (lambda x: x)
    want = float(IMPLS[name](cast(logits), cast(torch.tensor([0, 2]))))
    assert float(IMPLS[name](cast(logits), cast(torch.tensor([0, 2], dtype=torch.uint8)))) == want
    with pytest.raises(TypeError, match="targets must be an array of whole numbers"):
        IMPLS[name](cast(logits), cast(torch.tensor([0.0, 2.0])))
