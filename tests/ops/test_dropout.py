"""One mask in NumPy, torch and Triton, replayable from seed and index; what is dropped has the expected share."""

import numpy as np
import pytest
import torch

from llmstack.ops.dropout import BACKWARDS, IMPLS, dropout_np, dropout_torch, philox, random_np

SIZES = (0, 1, 7, 63, 1000)


def by(name, x, *args):
    return np.asarray(IMPLS[name](x if name == "numpy" else torch.tensor(x), *args))


def test_philox_has_the_published_words():
    """Known answers of the authors' Random123 library (kat_vectors, philox4x32-10): counter and key zero."""
    assert int(philox(np.array([0]), 0)[0]) == 0x6627E8D5


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("size", SIZES)
def test_every_implementation_draws_the_same_mask(name, size):
    x = np.random.default_rng(0).normal(size=size).astype(np.float32)
    for seed, offset in ((0, 0), (7, 12345), (2**40 + 3, 2**33)):
        np.testing.assert_allclose(by(name, x, 0.3, seed, offset), dropout_np(x, 0.3, seed, offset), rtol=1e-6)


@pytest.mark.parametrize("name", IMPLS)
def test_the_mean_stays_and_the_share_is_p(name):
    y = by(name, np.ones((500, 400), np.float32), 0.25, 3)
    assert y.mean() == pytest.approx(1, abs=0.01) and (y == 0).mean() == pytest.approx(0.25, abs=0.005)
    assert set(np.unique(y)) == {0, np.float32(1 / 0.75)}


@pytest.mark.parametrize("name", IMPLS)
def test_a_mask_is_drawn_again_whole_or_in_parts(name):
    """As recomputation and sharding need it: the same seed and place, the same mask; another seed, another."""
    x = np.ones(1000, np.float32)
    whole = by(name, x, 0.5, 11)
    np.testing.assert_array_equal(by(name, x, 0.5, 11), whole)
    np.testing.assert_array_equal(by(name, x[600:], 0.5, 11, 600), whole[600:])
    assert (by(name, x, 0.5, 12) != whole).mean() == pytest.approx(0.5, abs=0.1)


def test_gradients_are_autograds_and_recomputation_gives_them_too():
    x = torch.randn(64, 3, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(64, 3, dtype=torch.float64)
    dropout_torch(x, 0.4, 5).backward(dy)
    np.testing.assert_allclose(BACKWARDS["numpy"](dy.numpy(), 0.4, 5), x.grad)
    direct, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(
        lambda x: dropout_torch(x, 0.4, 5), x, use_reentrant=False, preserve_rng_state=False
    ).backward(dy)
    assert torch.equal(x.grad, direct)


def test_numbers_are_uniform_and_neighbours_unrelated():
    u = random_np((100_000,), 1)
    assert 0 <= u.min() and u.max() < 1
    assert np.histogram(u, 20, (0, 1))[0] / 5000 == pytest.approx(1, abs=0.06)
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.01
    assert abs(np.corrcoef(u, random_np((100_000,), 2))[0, 1]) < 0.01


@pytest.mark.parametrize("name", IMPLS)
def test_a_share_outside_0_to_1_is_refused(name):
    with pytest.raises(ValueError, match=r"p = 1\.0"):
        by(name, np.ones(2, np.float32), 1.0, 0)
