"""Whole-number formats against torch's observers and fake quantisation; packing is lossless and dense."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack.ops.quantise import (
    IMPLS,
    dequantise_np,
    dequantise_torch,
    pack_torch,
    quantise_torch,
    unpack_np,
    unpack_torch,
)

randn = lambda *shape, seed=0: torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 3, 4, 8]), st.integers(0, 5), st.integers(0, 9), st.integers(0, 99))
def test_packing_loses_nothing_and_wastes_nothing(bits, rows, words, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, 8 * words)).astype(np.uint8)
    packed = pack_torch(torch.from_numpy(codes), bits)
    assert packed.nbytes * 8 == codes.size * bits
    np.testing.assert_array_equal(unpack_np(packed.numpy(), bits), codes)
    np.testing.assert_array_equal(unpack_torch(packed, bits), codes)
    stream = np.unpackbits(codes[..., None], axis=-1)[..., 8 - bits :].reshape(rows, codes.shape[1] * bits)
    np.testing.assert_array_equal(np.packbits(stream, axis=-1), packed)  # NumPy's own bit order


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [0, 16])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
def test_codes_scales_and_values_are_torchs(bits, group, symmetric):
    """torch.ao's observer gives the scales and zero points, its fake quantisation the values."""
    from torch.ao.quantization.observer import PerChannelMinMaxObserver

    w = randn(6, 64) + 0.3
    codes, scale, zero = quantise_torch(w, bits, group, symmetric)
    rows = w.view(-1, group or 64)
    if symmetric:
        want, points = rows.abs().amax(1) / (2 ** (bits - 1) - 1), torch.full((len(rows),), 2 ** (bits - 1))
    else:
        how = dict(dtype=torch.quint8, quant_min=0, quant_max=2**bits - 1, qscheme=torch.per_channel_affine)
        observer = PerChannelMinMaxObserver(0, **how)
        observer(rows)
        want, points = observer.calculate_qparams()
    torch.testing.assert_close(scale.flatten(), want.float())
    assert torch.equal(zero.flatten().int(), points.int())
    fake = torch.fake_quantize_per_channel_affine(rows, scale.flatten(), zero.flatten().int(), 0, 0, 2**bits - 1)
    value = dequantise_torch(codes, scale, zero)
    # a weight halfway between two codes may go either way: torch multiplies by 1 / scale
    assert ((value - fake.view_as(w)).abs() > 1e-5).float().mean() < 0.01
    assert ((value - w).abs() <= scale.repeat_interleave(group or 64, 1) * 0.5001).all()
    np.testing.assert_allclose(dequantise_np(*(t.numpy() for t in (codes, scale, zero))), value, atol=1e-6)
    assert codes.dtype == torch.uint8 and (not symmetric or codes.min() >= 1)


def test_smaller_groups_and_more_bits_err_less_and_zero_points_help_one_sided_weights():
    w = randn(32, 128)
    error = lambda w, **how: float((dequantise_torch(*quantise_torch(w, **how)) - w).pow(2).mean())
    assert error(w, bits=8) < error(w, group=32) < error(w) < error(w, bits=2)
    assert error(w.abs()) < 0.5 * error(w.abs(), symmetric=True)
    assert error(torch.zeros(2, 8)) == 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_linear_layer_multiplies_by_the_dequantised_weight(impl, bits):
    x, w = randn(3, 5, 48), randn(7, 48, seed=1)
    codes, scale, zero = quantise_torch(w, bits, 16)
    args = (x, pack_torch(codes, bits), scale, zero)
    got = IMPLS[impl](*(t.numpy() for t in args), bits) if impl == "numpy" else IMPLS[impl](*args, bits)
    want = torch.nn.functional.linear(x.double(), dequantise_torch(codes, scale.double(), zero.double()))
    torch.testing.assert_close(torch.as_tensor(got).double(), want, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
    w = randn(4, 10)
    with pytest.raises(ValueError, match=r"in divides by group; got \[4, 10\] and 4"):
        quantise_torch(w, group=4)
    with pytest.raises(ValueError, match="bits = 5, but codes have 2, 3, 4, 8"):
        quantise_torch(w, bits=5)
    with pytest.raises(ValueError, match="7 codes of 4 bits do not fill whole words: pad them to 2s"):
        pack_torch(torch.zeros(7, dtype=torch.uint8), 4)
