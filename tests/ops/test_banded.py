"""Banded attention against masked dense attention: runs, kernel and specification; work and memory that grow as T."""

import pytest
import torch
from op_checks import check, check_backward, randn, run, strided
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from llmstack.ops._triton import HAVE_TRITON
from llmstack.ops.banded import BACKWARDS, IMPLS, banded_lse, banded_torch, banded_triton

BANDS = [(0, 0), (3, 0), (5, 2), (200, 0), (0, 4)]
SIZES = [1, 7, 63, 100]


def dense(back, ahead):
    def attend(q, k, v):
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        return scaled_dot_product_attention(q, k, v, (distance <= back) & (distance >= -ahead))

    return attend


def triple(T, Dh=16, B=2, H=2):
    return [randn(B, H, T, Dh, seed=s) for s in range(3)]


def test_all_three_are_here():
    assert list(IMPLS) == ["numpy", "torch"] + ["triton"] * HAVE_TRITON


@pytest.mark.parametrize("T", SIZES)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("impl", ["numpy", "torch"])
def test_forward(impl, band, T):
    q, k, v = triple(T)
    exact = dense(*band)(q.double(), k.double(), v.double())
    check(run(IMPLS[impl], impl, q, k, v, *band), [exact], [dense(*band)(q, k, v)])


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("T, Dh, band", [(1, 16, (3, 0)), (7, 5, (3, 0)), (300, 16, (130, 0)), (300, 20, (40, 9))])
def test_kernel(T, Dh, band):
    """300 is three programs of 128 queries, each with a run of up to three tiles of keys. With the gradients."""
    q, k, v = triple(T, Dh, B=1)
    exact = dense(*band)(q.double(), k.double(), v.double())
    check(run(banded_triton, "triton", *map(strided, (q, k, v)), *band), [exact], [dense(*band)(q, k, v)])

    def backward(dy, *tensors):
        leaves = [x.requires_grad_() for x in tensors]
        return torch.autograd.grad(banded_triton(*leaves, *band), leaves, dy)

    dy = randn(*q.shape, seed=5)
    size = (dy @ v.mT).abs().max().item()  # softmax's gradient is a difference of such sums of Dh terms, 0 where T = 1
    check_backward(backward, "triton", dense(*band), [q, k, v], dy, q, k, v, terms=Dh, size=size)


@pytest.mark.parametrize("band", [(3, 0), (5, 2)], ids=str)
def test_backward(band):
    q, k, v = triple(23, 4)
    dy = randn(*q.shape, seed=5)
    check_backward(BACKWARDS["numpy"], "numpy", dense(*band), [q, k, v], dy, q, k, v, *band)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    ours = torch.autograd.grad(banded_torch(*leaves, *band), leaves, dy.double())
    theirs = torch.autograd.grad(dense(*band)(*leaves), leaves, dy.double())
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("block", [0, 1, 7, 64])
def test_any_block_and_keys_that_nobody_sees(block):
    q, k, v = triple(40)
    keep = randn(40, seed=7) > 0
    out, lse = banded_lse(q, k, v, 6, 1, keep, block)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    scores = (q @ k.mT / 4).masked_fill(~((distance <= 6) & (distance >= -1) & keep), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1).nan_to_num(0) @ v)


def test_work_grows_as_the_length():
    def operations(T):
        q = randn(1, 1, T, 4)
        with FlopCounterMode(display=False) as counter:
            banded_torch(q, q, q, 32)
        return counter.get_total_flops()

    assert operations(512) == 2 * operations(256) == 4 * operations(128)


@pytest.mark.parametrize("impl", IMPLS)
def test_bad_input(impl):
    q, k, v = triple(8)
    with pytest.raises(ValueError, match="back = -1 and ahead = 0, but a query sees itself"):
        run(IMPLS[impl], impl, q, k, v, -1)
    with pytest.raises(ValueError, match=r"one shape.*\[2, 1, 8, 16\].*repeat shared key-value heads"):
        run(IMPLS[impl], impl, q, k[:, :1], v[:, :1], 2)


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_the_kernel_says_what_it_takes():
    wide = randn(1, 1, 4, 300)
    with pytest.raises(ValueError, match="heads of up to 256 values, got 300; use the torch version"):
        banded_triton(wide, wide, wide, 2)
    with pytest.raises(TypeError, match="got .torch.float64"):
        banded_triton(*(x.double() for x in triple(4)), 2)
