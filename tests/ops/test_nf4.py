"""NF4 against bitsandbytes: table, bytes, values; FP8 levels against torch's own type; bits counted as stored."""

import numpy as np
import pytest
import torch

from llmstack.ops.nf4 import (
    IMPLS,
    decode_np,
    decode_torch,
    double_torch,
    encode_np,
    encode_torch,
    levels,
    nf4_pack_torch,
    nf4_weight_torch,
    single_torch,
)
from llmstack.ops.quantise import pack_torch, unpack_torch

randn = lambda *shape, seed=0: torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the reference, and is not installed")


def test_the_table_is_bitsandbytes(bnb):
    """Both its stored table and the one that it generates."""
    stored = bnb.get_4bit_type("nf4", device="cpu")
    np.testing.assert_allclose(levels("nf4"), stored, atol=1e-4)
    np.testing.assert_allclose(levels("nf4"), np.unique(bnb.create_normal_map()), atol=1e-6)
    assert len(levels("nf4")) == 16 and levels("nf4")[7] == 0 and levels("nf4")[[0, -1]].tolist() == [-1, 1]


@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (64, 192), (5, 63)], ids=str)
def test_packed_bytes_and_values_are_bitsandbytes(bnb, shape):
    """The same bytes: the first of two values in the high nibble. Values differ by the tables' last digit."""
    w = randn(*shape)
    packed, a = nf4_pack_torch(w)
    want, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4")
    assert torch.equal(packed, want.flatten())
    assert torch.equal(a, state.absmax)
    decoded = bnb.dequantize_4bit(want, state)
    torch.testing.assert_close(nf4_weight_torch(packed, a, shape), decoded, rtol=0, atol=1e-4 * float(a.max()))


@pytest.mark.parametrize("kind", ["nf2", "nf3", "nf4", "nf8", "fp4", "int4", "fp8"])
@pytest.mark.parametrize("size, block", [(0, 64), (1, 64), (1000, 64), (512, 16)])
def test_numpy_and_torch_store_the_same(kind, size, block):
    w = randn(size)
    codes, a = encode_np(w.numpy(), kind, block)
    mine, b = encode_torch(w, kind, block)
    np.testing.assert_array_equal(codes, mine)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(decode_np(codes, a, kind, block), decode_torch(mine, b, kind, block))
    nearest = np.abs(levels(kind)[None] * np.repeat(a, block)[:size, None] - w.numpy()[:, None])
    chosen = np.take_along_axis(nearest, codes[:, None].astype(int), 1)[:, 0]
    np.testing.assert_allclose(chosen, nearest.min(1), atol=1e-6)


def test_fp8_levels_are_torchs():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    want = np.unique(every[every.isfinite()].numpy()) / np.float32(448)
    np.testing.assert_allclose(levels("fp8"), want, atol=1e-7)
    assert levels("fp4")[8:].tolist() == pytest.approx([x / 6 for x in (0.5, 1, 1.5, 2, 3, 4, 6)])


def test_less_error_on_gaussian_weights_than_int4_and_fp4():
    w = randn(4096, 64).numpy()
    error = {k: float(np.mean((decode_np(*encode_np(w, k), k) - w.ravel()) ** 2)) for k in ("nf4", "int4", "fp4")}
    assert error["nf4"] < 0.9 * min(error["int4"], error["fp4"]), error


def test_each_level_gets_about_as_many_weights():
    """Of N(0, 1) itself in units of the outermost level; the two ends, which take the tails, apart."""
    from scipy.stats import norm

    table = levels("nf4") * norm.ppf(0.9677083)
    share = np.histogram(randn(1_000_000).numpy(), np.r_[-9, (table[1:] + table[:-1]) / 2, 9])[0] / 1e6
    assert share[1:-1] == pytest.approx(1 / 16, rel=0.25)
    assert 2 * share[0] == pytest.approx(2 * share[-1], rel=0.25)


def test_zeros_and_outliers_survive():
    w = torch.zeros(2, 64)
    w[1, 3] = -1e30
    packed, a = nf4_pack_torch(w)
    assert torch.equal(nf4_weight_torch(packed, a, (2, 64)), w)


def test_double_quantisation_takes_4_127_bits_as_stored():
    w = randn(1024, 1024)
    packed, a = nf4_pack_torch(w)
    parts = double_torch(a)
    mean = a.numpy().mean()
    codes, second = encode_np(a.numpy() - mean, "fp8", 256)
    for mine, theirs in zip(parts, (codes, second, mean)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    bits = lambda *tensors: 8 * sum(t.numel() * t.element_size() for t in tensors) / w.numel()
    assert bits(packed, a) == 4.5 == 4 + 32 / 64
    assert bits(packed, *parts) == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-4)
    assert bits(packed, *parts) == pytest.approx(4.127, abs=5e-4)
    back = single_torch(*parts)
    np.testing.assert_allclose(decode_np(codes, second, "fp8", 256) + mean, back, rtol=1e-6)
    assert (back / a - 1).abs().max() < 0.05
    once, twice = (float((nf4_weight_torch(packed, c, w.shape) - w).pow(2).mean()) for c in (a, back))
    assert twice < 1.01 * once


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows, shape", [(0, (4, 64)), (1, (7, 64)), (3, (5, 100)), (2, (3, 63))], ids=str)
def test_the_linear_layer_multiplies_by_the_decoded_weight(impl, rows, shape):
    x, w = randn(rows, shape[1]), randn(*shape, seed=1)
    packed, a = nf4_pack_torch(w)
    if impl == "numpy":
        codes, a = encode_np(w.numpy())
        packed = pack_torch(torch.from_numpy(np.pad(codes, (0, codes.size % 2))), 4).numpy()
    assert packed.dtype in (np.uint8, torch.uint8) and len(packed) == -(-w.numel() // 2)
    got = IMPLS[impl](x.numpy() if impl == "numpy" else x, packed, a, shape)
    codes = unpack_torch(torch.as_tensor(packed), 4)[: w.numel()].long()
    weight = torch.from_numpy(levels())[codes] * torch.as_tensor(a).repeat_interleave(64)[: w.numel()]
    torch.testing.assert_close(torch.as_tensor(got), x @ weight.view(shape).T, rtol=1e-5, atol=1e-5)


def test_an_unknown_format_is_named():
    with pytest.raises(ValueError, match="no format 'nf9'; there are nf2"):
        levels("nf9")
