"""Bytes counted at the loads and stores of kernels, against the formulas of their docstrings."""

import pytest
import torch
from op_checks import randn

from llmstack.ops import cross_entropy, glu, layernorm, rmsnorm, softmax, traffic
from llmstack.ops._triton import HAVE_TRITON, INTERPRETED, tl, triton

pytestmark = pytest.mark.skipif(not (HAVE_TRITON and INTERPRETED), reason="bytes are counted in Triton's interpreter")
R, D, b = 7, 100, 4
x, y, g = randn(R, D), randn(R, D, seed=1), randn(D, seed=2)
ids = torch.arange(R)

CASES = {  # launch: (bytes read, bytes written) by the docstrings' formulas
    "softmax": (lambda: softmax.softmax_triton(x), b * R * D, b * R * D),
    "softmax backward": (lambda: softmax.softmax_triton_backward(x, y), 2 * b * R * D, b * R * D),
    "rmsnorm": (lambda: rmsnorm.rmsnorm_triton(x, g), b * (R * D + D), b * R * D),
    "rmsnorm in fp16": (lambda: rmsnorm.rmsnorm_triton(x.half(), g.half()), 2 * (R * D + D), 2 * R * D),
    "rmsnorm backward": (lambda: rmsnorm.rmsnorm_triton_backward(x, y, g), b * (2 * R * D + D), b * (R * D + D)),
    "layernorm": (lambda: layernorm.layernorm_triton(x, g, g), b * (R * D + 2 * D), b * R * D),
    "swiglu": (lambda: glu.swiglu_triton(x, y), 2 * b * R * D, b * R * D),
    "swiglu backward": (lambda: glu.swiglu_triton_backward(x, y, y), 3 * b * R * D, 2 * b * R * D),
    "cross-entropy": (lambda: cross_entropy.cross_entropy_triton(x, ids), b * R * D + (8 + b) * R, 12 * R),
}


@pytest.mark.parametrize("case", CASES)
def test_counted_is_the_formula(case):
    launch, loaded, stored = CASES[case]
    with traffic.counting() as moved:
        launch()
    assert (moved.loaded, moved.stored, moved.bytes, moved.launches) == (loaded, stored, loaded + stored, 1)


@triton.jit
def _mixed_kernel(x_ptr, i_ptr, y_ptr, total_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0)
    again = tl.load(x_ptr + tl.load(i_ptr + at))
    tl.store(y_ptr + at, x + again, mask=at % 2 == 0)
    tl.atomic_add(total_ptr + at * 0, x, mask=at < 3)
    tl.atomic_add(total_ptr, 1.0)


def test_by_argument_way_and_dtype_masks_and_atomics():
    x, i, y, total = torch.ones(16), torch.arange(16, dtype=torch.int16), torch.zeros(16).half(), torch.zeros(1)
    with traffic.counting() as moved:
        _mixed_kernel[(2,)](x, i, y, total, 5, 16)
    assert total.item() == 2 * (3 + 1)
    one = {  # of one of two programs
        ("x_ptr", "load", "fp32"): 4 * (5 + 16),
        ("i_ptr", "load", "int16"): 2 * 16,
        ("y_ptr", "store", "fp16"): 2 * 8,
        ("total_ptr", "load", "fp32"): 4 * (3 + 1),
        ("total_ptr", "store", "fp32"): 4 * (3 + 1),
    }
    assert moved.by("argument", "way", "dtype") == {key: 2 * n for key, n in one.items()}
    assert moved.by("kernel") == {"_mixed_kernel": moved.bytes}


@triton.jit
def _descriptor_kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BLOCK, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK, BLOCK])
    y.store([0, 0], x.load([0, 0]))


def test_a_descriptor_moves_what_lies_inside():
    x, y = randn(5, 12), torch.zeros(5, 12)
    with traffic.counting() as moved:
        _descriptor_kernel[(1,)](x, y, 5, 12, 16)
    torch.testing.assert_close(x, y)
    assert moved.by("argument", "way") == {("x_ptr", "load"): 240, ("y_ptr", "store"): 240}


def test_counts_nest_and_end_with_the_block_also_after_an_error():
    with pytest.raises(ZeroDivisionError), traffic.counting() as outer:
        softmax.softmax_triton(x)
        with traffic.counting() as inner:
            softmax.softmax_triton(x)
        raise ZeroDivisionError
    softmax.softmax_triton(x)
    assert (outer.launches, inner.launches) == (2, 1) and outer.bytes == 2 * inner.bytes == 4 * b * R * D


def test_it_says_where_it_cannot_count(monkeypatch):
    monkeypatch.setattr(traffic, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), traffic.counting():
        pass
