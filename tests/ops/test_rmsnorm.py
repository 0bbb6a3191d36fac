"""RMSNorm against PyTorch's own operator in double precision."""

import pytest
import torch
from op_checks import SHAPES, check_backward, check_forward, randn, run, strided
from torch.nn.functional import rms_norm

from llmstack.ops.rmsnorm import BACKWARDS, IMPLS, rmsnorm_torch, rmsnorm_triton

reference = lambda x, g: rms_norm(x, g.shape, g, eps=1e-6)
inputs = lambda shape: (randn(*shape), randn(shape[-1], seed=1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl, shape):
    check_forward(IMPLS[impl], impl, reference, *inputs(shape), terms=shape[-1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", BACKWARDS)
def test_backward(impl, shape):
    x, g = inputs(shape)
    check_backward(BACKWARDS[impl], impl, reference, [x, g], randn(*shape, seed=2), x, g)


@pytest.mark.parametrize("impl", IMPLS)
def test_rescaling_changes_nothing_and_strides_do_not_matter(impl):
    x, g = inputs((40, 24))
    norm = lambda x: run(IMPLS[impl], impl, x, g)[0]
    torch.testing.assert_close(norm(strided(x)), norm(x), rtol=0, atol=0)
    torch.testing.assert_close(norm(1000 * x), norm(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(norm(x + 1), norm(x), atol=0.1)


def test_narrow_inputs_are_summed_in_fp32_and_double_stays_double():
    x, g = inputs((4, 4096))
    got = rmsnorm_torch(200 * x.half(), g.half())  # squares over fp16's 65504
    torch.testing.assert_close(got, reference(200 * x, g).half(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(rmsnorm_torch(x.double(), g.double()), reference(x.double(), g.double()))


@pytest.mark.skipif("triton" not in IMPLS, reason="Triton is not installed")
def test_few_programs_take_many_rows_each(monkeypatch):
    monkeypatch.setattr("llmstack.ops.rmsnorm.PROGRAMS", 2)
    x, g = inputs((1500, 100))
    check_backward(BACKWARDS["triton"], "triton", reference, [x, g], randn(1500, 100, seed=3), x, g)


@pytest.mark.skipif("triton" not in IMPLS, reason="Triton is not installed")
def test_a_wrong_scale_is_refused():
    with pytest.raises(ValueError, match=r"expected shape \[8\], got \[7\]"):
        rmsnorm_triton(torch.ones(2, 8), torch.ones(7))
    for x, g in (
        (torch.ones(2, 8).requires_grad_(), torch.ones(8)),
        (torch.ones(2, 8), torch.ones(8).requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match="no gradient"):
            rmsnorm_triton(x, g)


@pytest.mark.skipif("triton" not in BACKWARDS, reason="Triton has no build here")
def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"dy has the shape of x: expected \[2, 4\], got \[1, 4\]"):
        BACKWARDS["triton"](torch.ones(1, 4), torch.ones(2, 4), torch.ones(4))
