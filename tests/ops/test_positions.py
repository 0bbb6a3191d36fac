"""Positions against transformers' functions (T5 buckets, ALiBi, sinusoids) and the papers' formulas."""

import math

import numpy as np
import pytest
import torch
from op_checks import check, check_backward, randn, run
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.whisper.modeling_whisper import sinusoids

from llmstack.ops import positions
from llmstack.ops.attention import attention_weights


@pytest.mark.parametrize("fn", [positions.sinusoidal_np, positions.sinusoidal], ids=["numpy", "torch"])
def test_sinusoidal_is_the_papers_formula(fn):
    table = torch.as_tensor(fn(512, 64))
    for p, i in [(0, 0), (1, 0), (7, 5), (511, 31)]:
        angle = p / 10000 ** (2 * i / 64)
        assert table[p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoidal_in_halves_equals_transformers():
    marian = MarianSinusoidalPositionalEmbedding(100, 64).create_weight()
    torch.testing.assert_close(positions.sinusoidal(100, 64, interleaved=False), marian)
    whisper = positions.sinusoidal(100, 64, base=10000 ** (64 / 62), interleaved=False)
    torch.testing.assert_close(whisper, sinusoids(100, 64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 7, 100])
def test_sinusoidal_shift_is_one_linear_map(k):
    """PE(p + k) = M PE(p): solved for M on one half of the positions, it holds on the other."""
    table = positions.sinusoidal_np(40_000, 16)  # the slowest pair turns twice
    here, there = table[:-k], table[k:]
    M = np.linalg.lstsq(here[:20_000], there[:20_000], rcond=None)[0]
    np.testing.assert_allclose(here[20_000:] @ M, there[20_000:], atol=1e-9)
    np.testing.assert_allclose(M @ M.T, np.eye(16), atol=1e-9)  # a rotation


def test_sinusoidal_of_odd_width_is_refused():
    with pytest.raises(ValueError, match="must be even, got 7"):
        positions.sinusoidal(4, 7)


@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (8, 20), (64, 512)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_equal_transformers(bidirectional, buckets, max_distance):
    distance = torch.arange(-512, 513)
    want = T5Attention._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    assert torch.equal(positions.relative_bucket(distance, bidirectional, buckets, max_distance), want)


@pytest.mark.parametrize("H", [1, 2, 3, 8, 12, 16, 40, 71, 112])
def test_alibi_slopes_equal_transformers(H):
    at_one = build_alibi_tensor(torch.ones(1, 2), H, torch.float32)[:, 0, 1]  # slope × key position 1
    torch.testing.assert_close(positions.alibi_slopes(H), at_one, rtol=1e-6, atol=0)
    if H & (H - 1) == 0:
        np.testing.assert_allclose(positions.alibi_slopes_np(H), [2 ** (-8 * h / H) for h in range(1, H + 1)])


def test_alibi_bias_falls_with_distance_and_gives_transformers_weights():
    """Bloom adds slope · j; a row's softmax does not see the difference from −slope · (i − j)."""
    q, k = randn(1, 6, 4, 8), randn(1, 6, 9, 8, seed=1)
    bias = positions.alibi_bias(4, 9, 6)
    assert bias.shape == (6, 4, 9) and (bias <= 0).all()
    assert torch.equal(bias[:, torch.arange(4), torch.arange(5, 9)], torch.zeros(6, 4))  # a query and its own key
    mask = torch.ones(4, 9).tril(5).bool()
    bloom = build_alibi_tensor(torch.ones(1, 9), 6, torch.float32).view(6, 1, 9)
    torch.testing.assert_close(attention_weights(q, k, mask, bias), attention_weights(q, k, mask, bloom))


def shaw_by_loops(q, a, S):
    B, H, T, _ = q.shape
    k = len(a) // 2
    scores = torch.empty(B, H, T, S, dtype=q.dtype)
    for i in range(T):
        for j in range(S):
            distance = max(-k, min(k, j - (i + S - T)))
            scores[:, :, i, j] = q[:, :, i] @ a[distance + k]
    return scores


@pytest.mark.parametrize("T, S, k", [(1, 1, 1), (5, 5, 2), (3, 9, 4), (7, 7, 63)])
def test_shaw_scores_equal_the_paper_pair_by_pair(T, S, k):
    q, a = randn(2, 3, T, 8), randn(2 * k + 1, 8, seed=1)
    check(
        run(positions.shaw_scores_np, "numpy", q, a, S),
        [shaw_by_loops(q.double(), a.double(), S)],
        [shaw_by_loops(q, a, S)],
    )


def test_shaw_scores_backward():
    q, a, ds = randn(2, 3, 4, 8), randn(7, 8, seed=1), randn(2, 3, 4, 6, seed=2)
    check_backward(positions.shaw_scores_np_backward, "numpy", lambda q, a: shaw_by_loops(q, a, 6), [q, a], ds, q, a)


def test_shaw_values_equal_the_paper_pair_by_pair():
    weights, a = randn(2, 3, 4, 6).softmax(-1), randn(5, 8, seed=1)
    rows = a[torch.tensor([[max(-2, min(2, j - i - 2)) + 2 for j in range(6)] for i in range(4)])]  # [T, S, Dh]
    reference = lambda w, r: (w[..., None] * r).sum(-2)
    check(
        run(positions.shaw_values_np, "numpy", weights, a),
        [reference(weights.double(), rows.double())],
        [reference(weights, rows)],
    )


def test_relative_scores_depend_on_distance_only():
    """One query at every place: Shaw's scores, T5's buckets and ALiBi's bias are constant along diagonals."""
    q = randn(1, 2, 1, 8).expand(1, 2, 12, 8)
    bucket = positions.relative_bucket(torch.arange(12) - torch.arange(12)[:, None])
    shaw = torch.from_numpy(positions.shaw_scores_np(q.numpy(), randn(7, 8).numpy(), 12))
    for scores in (shaw[0], positions.alibi_bias(12, 12, 2), bucket[None]):
        torch.testing.assert_close(scores[:, 1:, 1:], scores[:, :-1, :-1])


@pytest.mark.parametrize("how", [(True, 2, 128), (False, 1, 128), (False, 32, 16)], ids=str)
def test_too_few_buckets_or_too_short_a_distance(how):
    with pytest.raises(ValueError, match=f"buckets = {how[1]}, max_distance = {how[2]}, but"):
        positions.relative_bucket(torch.arange(-40, 5), *how)


def test_no_head_has_no_slope():
    with pytest.raises(ValueError, match="H = 0, but there is at least one head"):
        positions.alibi_slopes(0)
