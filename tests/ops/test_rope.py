"""RoPE in both layouts against transformers' Llama and GPT-J; Llama 3.1's frequencies; the property that it is for."""

import pytest
import torch
from op_checks import check, check_backward, randn, run, strided
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

from llmstack.ops import rope
from llmstack.ops.rope import BACKWARDS, IMPLS, rope_frequencies, rope_tables, rope_torch

LAYOUTS = [False, True]
SHAPES = [((1, 1, 1, 2), 2), ((2, 3, 7, 8), 8), ((1, 2, 63, 100), 100), ((2, 3, 5, 80), 32), ((1, 1, 100, 64), 64)]


def tables(T, d, start=0):
    return rope_tables(torch.arange(start, start + T), rope_frequencies(d))


def by_matrix(x, cos, sin, interleaved):
    """The rotation matrix of arXiv:2104.09864, eq. 15, written out for each position."""
    d, Dh = 2 * cos.shape[-1], x.shape[-1]
    R = torch.eye(Dh, dtype=x.dtype).repeat(*cos.shape[:-1], 1, 1)  # [..., T, Dh, Dh]
    for i in range(d // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + d // 2)
        R[..., a, a] = R[..., b, b] = cos[..., i].to(x.dtype)
        R[..., b, a] = sin[..., i].to(x.dtype)
        R[..., a, b] = -sin[..., i].to(x.dtype)
    R = R[:, None] if cos.ndim == 3 else R
    return (R @ x[..., None])[..., 0]


@pytest.mark.parametrize("interleaved", LAYOUTS, ids=["half", "interleaved"])
@pytest.mark.parametrize("shape, d", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl, shape, d, interleaved):
    x, (cos, sin) = randn(*shape), tables(shape[2], d)
    want = by_matrix(x.double(), cos, sin, interleaved)
    check(run(IMPLS[impl], impl, x, cos, sin, interleaved), [want], [by_matrix(x, cos, sin, interleaved)])
    own = rope_tables(torch.arange(shape[2]) + torch.arange(shape[0])[:, None], rope_frequencies(d))  # [B, T, d/2]
    got = run(IMPLS[impl], impl, strided(x), *own, interleaved)
    check(got, [by_matrix(x.double(), *own, interleaved)], [by_matrix(x, *own, interleaved)])


@pytest.mark.parametrize("interleaved", LAYOUTS, ids=["half", "interleaved"])
@pytest.mark.parametrize("shape, d", SHAPES, ids=str)
@pytest.mark.parametrize("impl", BACKWARDS)
def test_backward(impl, shape, d, interleaved):
    (cos, sin), dy = tables(shape[2], d, start=3), randn(*shape, seed=1)
    turn = lambda x: by_matrix(x, cos, sin, interleaved)
    check_backward(BACKWARDS[impl], impl, turn, [randn(*shape)], dy, cos, sin, interleaved)


@pytest.mark.parametrize("impl", IMPLS)
def test_half_split_equals_transformers_llama(impl):
    config = LlamaConfig(hidden_size=96, num_attention_heads=4, max_position_embeddings=64)
    q, k, at = randn(2, 4, 9, 24), randn(2, 2, 9, 24, seed=1), torch.arange(5, 14)
    want = llama.apply_rotary_pos_emb(q, k, *llama.LlamaRotaryEmbedding(config)(q, at[None]))
    frequencies = rope_frequencies(24, config.rope_parameters["rope_theta"])
    for x, y in zip((q, k), want):
        torch.testing.assert_close(run(IMPLS[impl], impl, x, *rope_tables(at, frequencies))[0], y)


@pytest.mark.parametrize("impl", IMPLS)
def test_interleaved_and_partial_equals_transformers_gptj(impl):
    x, at = randn(2, 4, 9, 24), torch.arange(5, 14)
    sin, cos = gptj.create_sinusoidal_positions(64, 16)[at].chunk(2, -1)
    turned = gptj.apply_rotary_pos_emb(x[..., :16].transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
    (got,) = run(IMPLS[impl], impl, x, *rope_tables(at, rope_frequencies(16)), True)
    torch.testing.assert_close(got, torch.cat([turned, x[..., 16:]], -1))


@pytest.mark.parametrize(
    "factor, low, high, length, theta", [(8, 1, 4, 8192, 5e5), (32, 1, 4, 8192, 5e5), (2, 2, 9, 64, 1e4)]
)
def test_llama31_frequencies_equal_transformers(factor, low, high, length, theta):
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    scaling |= {"original_max_position_embeddings": length, "rope_theta": theta}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    got = rope_frequencies(128, theta, (factor, low, high, length))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    plain = rope_frequencies(128, theta)
    assert (got == plain).any() and (got == plain / factor).any() and len(torch.unique(got)) == 64


@pytest.mark.parametrize("interleaved", LAYOUTS, ids=["half", "interleaved"])
@pytest.mark.parametrize("impl", IMPLS)
def test_scores_depend_on_distance_only(impl, interleaved):
    """⟨R_m q, R_n k⟩ for one q and k at 64 places: every diagonal of the scores is constant, and no two are equal."""
    q, k = (randn(1, 1, 1, 32, seed=s).expand(1, 1, 64, 32) for s in (0, 1))
    turn = lambda x: run(IMPLS[impl], impl, x, *tables(64, 32), interleaved)[0].double()
    scores = (turn(q) @ turn(k).mT)[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-4)
    assert len(torch.unique(scores[-1].round(decimals=4))) > 60
    torch.testing.assert_close(turn(q).norm(dim=-1), q.double().norm(dim=-1))


@pytest.mark.parametrize("d", [8, 6])
def test_reordered_weights_give_the_same_scores_in_the_other_layout(d):
    """4 query heads and 2 key heads of width 8, all or 6 dimensions of which turn."""
    wq, wk, x = randn(32, 16), randn(16, 16, seed=1), randn(5, 16, seed=2)

    def scores(wq, wk, interleaved):
        heads = lambda w: (x @ w.T).view(1, 5, -1, 8).transpose(1, 2)  # [1, H, T, Dh]
        q, k = (rope_torch(heads(w), *tables(5, d), interleaved) for w in (wq, wk))
        return q @ k.repeat_interleave(2, 1).mT

    other = rope.half_to_interleaved(wq, 4, d), rope.half_to_interleaved(wk, 2, d)
    torch.testing.assert_close(scores(*other, True), scores(wq, wk, False))
    assert not torch.equal(other[0], wq)
    for w, v, heads in ((wq, other[0], 4), (wk, other[1], 2)):
        assert torch.equal(rope.interleaved_to_half(v, heads, d), w)
    bias = randn(32)
    assert torch.equal(rope.half_to_interleaved(bias, 4), rope.half_to_interleaved(bias[:, None], 4)[:, 0])


def test_reordering_is_the_one_of_published_llama_files():
    """Meta's interleaved rows become Hugging Face's halves by splitting a head's rows into pairs and transposing."""
    w = randn(32, 16)
    assert torch.equal(rope.interleaved_to_half(w, 4), w.view(4, 4, 2, 16).transpose(1, 2).reshape(32, 16))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="must be even, got 7"):
        rope_frequencies(7)
    with pytest.raises(ValueError, match=r"got x \[1, 2, 5, 8\], cos \[4, 4\]"):
        rope_torch(randn(1, 2, 5, 8), *tables(4, 8))
    with pytest.raises(ValueError, match="not 3 heads of an even number of rows"):
        rope.half_to_interleaved(randn(32, 4), 3)


@pytest.mark.parametrize("name", IMPLS)
def test_tables_with_a_batch_of_one_serve_every_row(name):
    x = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(torch.arange(4), rope_frequencies(8))
    args = (x, cos[None], sin[None])
    got = IMPLS[name](*(a.numpy() for a in args)) if name == "numpy" else IMPLS[name](*args)
    assert torch.allclose(torch.as_tensor(got), rope_torch(x, cos, sin), atol=1e-6)
    nothing = torch.zeros(4, 0)
    got = (
        IMPLS[name](x.numpy(), nothing.numpy(), nothing.numpy())
        if name == "numpy"
        else IMPLS[name](x, nothing, nothing)
    )
    assert torch.equal(torch.as_tensor(got), x)  # no dimension turns


@pytest.mark.parametrize("rotary", [3, 6])
def test_reordering_refuses_what_no_head_has(rotary):
    with pytest.raises(ValueError, match=f"rotary = {rotary}, but it must be even and at most 4"):
        rope.half_to_interleaved(torch.zeros(8, 2), 2, rotary)
    with pytest.raises(ValueError, match="not 0 heads"):
        rope.half_to_interleaved(torch.zeros(8, 2), 0)
