"""Packed weights times activations against dequantising by hand (and bitsandbytes) first; bytes against the formula."""

import pytest
import torch
from op_checks import NATIVE, randn, run, strided
from torch.nn import functional as F

from llmstack.ops import dequant_matmul, traffic
from llmstack.ops._triton import HAVE_TRITON, INTERPRETED
from llmstack.ops.dequant_matmul import IMPLS, NF4_IMPLS, int_linear_triton, nf4_linear_triton
from llmstack.ops.nf4 import double_torch, nf4_pack_torch, nf4_weight_torch, single_torch
from llmstack.ops.quantise import pack_torch, quantise_torch

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")


def quantised(N, K, bits, group, seed=1):
    """Packed codes, scales, zero points that are not whole, and the weight in double, by hand."""
    codes, scale, zero = quantise_torch(randn(N, K, seed=seed), bits, group)
    zero = zero + randn(*zero.shape, seed=seed + 1) / 4
    wide = lambda t: t.double().repeat_interleave(K // t.shape[1], 1)
    return pack_torch(codes, bits), scale, zero, (codes.double() - wide(zero)) * wide(scale)


def close(got, want, tolerance=2e-6):
    assert got.shape == want.shape and ((got.double() - want).norm() <= tolerance * want.norm())


@pytest.mark.parametrize(
    "M, N, K, bits, group",
    [(1, 1, 16, 4, 16), (7, 63, 128, 4, 64), (3, 100, 256, 4, 128), (5, 300, 100, 4, 0), (70, 40, 96, 4, 32)]
    + [(1, 1, 1, 8, 0), (7, 63, 1001, 8, 0), (5, 100, 192, 8, 64)],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_is_dequantise_then_multiply(impl, M, N, K, bits, group):
    packed, scale, zero, w = quantised(N, K, bits, group)
    x = randn(M, K)
    (got,) = run(IMPLS[impl], impl, x, packed, scale, zero, bits=bits)
    close(got, F.linear(x.double(), w))


@pytest.mark.parametrize("impl", NF4_IMPLS)
def test_nf4_is_what_bitsandbytes_dequantises(impl):
    bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the reference, and is not installed")
    w, x = randn(100, 192), randn(2, 3, 192, seed=1)
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4")
    (got,) = run(NF4_IMPLS[impl], impl, x, packed.flatten(), state.absmax, shape=(100, 192))
    close(got, F.linear(x.double(), bnb.dequantize_4bit(packed, state).double()))


@needs_triton
def test_constants_that_are_quantised_themselves():
    w, x = randn(64, 128), randn(5, 128, seed=1)
    packed, a = nf4_pack_torch(w)
    twice = single_torch(*double_torch(a))
    assert not torch.equal(twice, a)
    (got,) = run(nf4_linear_triton, "triton", x, packed, twice, shape=(64, 128))
    close(got, F.linear(x.double(), nf4_weight_torch(packed, twice, (64, 128)).double()))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_strides_and_no_rows(dtype):
    packed, scale, zero, w = quantised(33, 512, 4, 64)
    x = randn(4, 512).to(dtype)
    (got,) = run(int_linear_triton, "triton", strided(x), packed, scale, zero)
    assert got.dtype == dtype
    close(got, F.linear(x.double(), w), 2 * torch.finfo(dtype).eps)
    assert run(int_linear_triton, "triton", x[:0], packed, scale, zero)[0].shape == (0, 33)


@pytest.mark.skipif(not (HAVE_TRITON and INTERPRETED), reason="counted in Triton's interpreter")
@pytest.mark.parametrize(
    "kind, bits, group, constants, share", [("int", 4, 64, 8, 0.32), ("int", 8, 0, 8, 0.51), ("nf4", 4, 64, 4, 0.29)]
)
def test_bytes_are_the_formula_and_a_quarter_or_half_of_fp16(kind, bits, group, constants, share):
    M, N, K = 3, 512, 1024
    x = randn(M, K).half()
    if kind == "int":
        launch, arguments = int_linear_triton, (*quantised(N, K, bits, group)[:3], bits)
    else:
        launch, arguments = nf4_linear_triton, (*nf4_pack_torch(randn(N, K)), (N, K))
    with traffic.counting() as moved:
        launch(x, *arguments)
    by = moved.by("argument")
    by.pop("level_ptr", None)  # 16 levels a program
    weight = by.pop("w_ptr") + by.pop("scale_ptr") + by.pop("zero_ptr", 0)
    assert weight == N * K * bits // 8 + constants * N * (K // group if group else 1)
    assert weight / (2 * N * K) < share
    assert by == {"x_ptr": 2 * M * K * N // 256, "y_ptr": 2 * M * N}


@needs_triton
def test_what_the_kernel_does_not_take_is_refused():
    packed, scale, zero, _ = quantised(4, 48, 4, 24)
    x = torch.ones(2, 48)
    with pytest.raises(
        ValueError, match="groups of 24, but the kernel takes 16, 32, 64 … or whole rows: use the torch version"
    ):
        int_linear_triton(x, packed, scale, zero)
    with pytest.raises(ValueError, match="takes 4 or 8 bits, .*got 3 bits: use int_linear_torch"):
        int_linear_triton(x, packed, scale, zero, 3)
    with pytest.raises(ValueError, match=r"x is \[\.\.\., in = 48\], got \[2, 40\]"):
        int_linear_triton(x[:, :40], packed, scale[:, :1], zero[:, :1])
    with pytest.raises(
        ValueError, match="96 bytes and .* constants for 4 rows of 48 whole blocks of 64: use nf4_linear_torch"
    ):
        nf4_linear_triton(x, packed.flatten(), scale, (4, 48))
    for wrong in (scale[:3, :1], scale[:, :0], scale[0], torch.ones(4, 5)):  # rows, groups, axes, what does not divide
        with pytest.raises(ValueError, match=r"scale and zero are \[out = 4, in / group\], groups fill in = 48"):
            int_linear_triton(x, packed, wrong, wrong)
    with pytest.raises(ValueError, match="groups of 48"):  # a level's product is by group, even where that is the row
        nf4_linear_triton(x, packed, scale[:, 0], (4, 48), 48)
    with pytest.raises(ValueError, match="3 constants for 4 rows of 48 whole blocks of 16"):
        nf4_linear_triton(x, packed, scale[:3, 0], (4, 48), 16)
    with pytest.raises(RuntimeError, match="no gradient.*torch.no_grad"):
        int_linear_triton(x.clone().requires_grad_(), packed, scale[:, :1], zero[:, :1])
    with pytest.raises(TypeError, match="torch.float64"):
        int_linear_triton(x.double(), packed, scale[:, :1], zero[:, :1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("M", [1, 8, 60, 300])
def test_kernels_run_natively(M, dtype):
    if NATIVE != "cuda":
        pytest.skip("torch finds no GPU, or TRITON_INTERPRET=1 is set")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    x = randn(M, 1024).to("cuda", dtype)
    for bits, group in ((4, 64), (4, 256), (8, 0)):
        packed, scale, zero, w = (t.cuda() for t in quantised(300, 1024, bits, group))
        close(dequant_matmul.int_linear_triton(x, packed, scale, zero, bits), F.linear(x.double(), w), tolerance)
    packed, a = (t.cuda() for t in nf4_pack_torch(randn(300, 1024)))
    want = F.linear(x.double(), nf4_weight_torch(packed, a, (300, 1024)).double())
    close(nf4_linear_triton(x, packed, a, (300, 1024)), want, tolerance)
