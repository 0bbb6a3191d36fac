"""What must hold of any decoder: causality, the cache, GPT-3's bands, PaLM's block, the NumPy twin, clear refusals."""

import numpy as np
import pytest
import torch

from llmstack import preset
from llmstack.architectures import build, decoder_np
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.layers import Pass
from llmstack.config import ConfigError
from llmstack.ops.attention import attention_formula

SMALL = dict(d_model=32, n_layers=3, n_heads=4, d_head=8, d_ff=48, vocab_size=99, max_seq_len=64)
NAMES = {"gpt-1": "gpt-1", "gpt2": "gpt2", "gpt3": "gpt3-small", "llama": "llama-7b", "llama3": "llama3-8b"}
NAMES |= {
    "qwen2": "qwen2.5-7b",
    "palm": "palm-8b",
    "mistral": "mistral-7b-v0.1",
    "opt": "opt-125m",
    "bloom": "bloom-560m",
}
NAMES |= {"falcon": "falcon-7b", "gptj": "gpt-j-6b", "gpt-neox": "gpt-neox-20b"}


def small(family):
    """The preset with its dials as they are and its sizes made tiny."""
    config = preset(NAMES[family])
    shared = {1: 1, config.n_heads: 4}.get(config.n_kv_heads, 2)
    dims, window = 4 * bool(config.rope_dims), 5 * bool(config.sliding_window)
    return config.with_(
        **SMALL, n_kv_heads=shared, rope_dims=dims, sliding_window=window, d_embedding=32, attention_scale=0.0
    )


def model_of(family):
    """Built, and every weight moved away from its start."""
    model = build(small(family), seed=1)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=rng)
    return model.eval()


def ids_of(B, T, seed=1):
    return torch.randint(99, (B, T), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("family", NAMES)
def test_a_token_changes_nothing_before_it(family):
    model, ids = model_of(family), ids_of(2, 12)
    before = model(ids)
    for t in (0, 5, 11):
        changed = ids.clone()
        changed[:, t] = (changed[:, t] + 1) % 99
        after = model(changed)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.isclose(before[:, t], after[:, t]).all()


def test_the_jacobian_is_triangular_in_a_decoder_and_full_in_an_encoder():
    """d output at t / d input at s: zero for s > t with the causal mask, not without it."""
    bert = preset("bert-base-uncased").with_(**SMALL)
    for model, causal in ((model_of("llama"), True), (build(bert), False)):
        x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
        y = x
        for block in model.blocks:
            y = block(y, Pass(causal=causal))
        reach = torch.stack(
            [torch.autograd.grad(y[0, t, 0], x, retain_graph=True)[0][0].abs().sum(-1) for t in range(6)]
        )
        seen = reach > 0  # [output, input]
        assert torch.equal(seen, torch.ones(6, 6, dtype=torch.bool).tril() if causal else torch.ones(6, 6) > 0)


@torch.no_grad()
@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("side", ["none", "left"])
def test_a_cached_pass_is_a_whole_pass(family, side):
    model, ids = model_of(family), ids_of(3, 14)
    real = torch.ones(3, 14, dtype=torch.bool)
    if side == "left":
        real[1, :3], real[2, :6] = False, False
    whole = model(ids, real if side == "left" else None)
    cache = ContiguousCache(model.config, 3, 14)
    parts, start = [], 0
    for stop in (8, 9, 10, 13, 14):  # a prompt, single tokens, a chunk
        step = slice(start, stop)
        parts.append(model(ids[:, step], real[:, step] if side == "left" else None, cache))
        start = stop
    assert cache.length == 14
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", NAMES)
def test_padding_left_or_right_changes_nothing(family):
    model, ids = model_of(family), ids_of(1, 9)
    alone = model(ids)
    for left, right in ((4, 0), (0, 4), (2, 3)):
        wide = torch.cat([ids_of(1, left, seed=7), ids, ids_of(1, right, seed=8)], 1)
        real = (torch.arange(wide.shape[1]) >= left) & (torch.arange(wide.shape[1]) < left + 9)
        torch.testing.assert_close(model(wide, real[None])[:, left : left + 9], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_gpt3_alternates_dense_and_banded_layers():
    """Against the same blocks with masks written out: layers 1, 3, … see only the last five tokens."""
    model, ids = model_of("gpt3"), ids_of(2, 12)
    x = model.embed(ids, torch.arange(12)[None])
    for layer, block in enumerate(model.blocks):
        n, at = block.norm1(x), block.attention
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in (at.q(n), at.k(n), at.v(n)))
        mask = torch.zeros(12, 12, dtype=torch.bool)
        for t in range(12):
            for s in range(12):
                mask[t, s] = s <= t and (layer % 2 == 0 or t - s < 5)
        x = x + at.o(attention_formula(q, k, v, mask).transpose(1, 2).flatten(2))
        x = x + block.ffn(block.norm2(x))
    torch.testing.assert_close(model(ids), model.out(model.norm(x)), rtol=1e-4, atol=1e-5)
    reach = model.hidden_states(ids)  # one banded layer alone: token 0 reaches token 4 and no further
    shaken = ids.clone()
    shaken[:, 0] = (shaken[:, 0] + 1) % 99
    assert len(reach) == 4 and model.config.windowed(1) and not model.config.windowed(0)
    banded = build(model.config.with_(window_every=1, n_layers=1))
    same = torch.isclose(banded(ids), banded(shaken)).all(-1)
    assert same[:, 5:].all() and not same[:, :5].any()


def test_palms_parallel_block():
    """y = x + Attention(LN x) + FFN(LN x), its gradient by finite differences, and one shared key-value head."""
    config = preset("palm-8b").with_(d_model=8, n_heads=4, d_head=4, d_ff=6, n_layers=1, vocab_size=9)
    block = build(config, dtype=torch.float64).blocks[0]
    assert [name for name, _ in block.named_parameters() if "norm" in name or "bias" in name] == ["norm1.weight"]
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    now = Pass(causal=True)
    n = torch.nn.functional.layer_norm(x, (8,), block.norm1.weight, eps=config.norm_eps)
    torch.testing.assert_close(block(x, now), x + block.attention(n, now) + block.ffn(n))
    with torch.no_grad():
        for p in block.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: block(x, now), x)


def test_the_cache_of_shared_heads_is_smaller_by_the_group():
    size = lambda config: ContiguousCache(config, 2, 10).k.nbytes
    config = small("palm").with_(n_kv_heads=1)
    assert size(config.with_(n_kv_heads=4)) == 4 * size(config) == 4 * 3 * 2 * 10 * 8 * 4


@torch.no_grad()
@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("block", [4, 128])
def test_the_numpy_decoder_gives_the_same_logits(family, block):
    model, ids = model_of(family), ids_of(2, 13)
    got = decoder_np.forward(ids.numpy(), decoder_np.weights_of(model), model.config, block)
    want = model(ids).numpy()
    assert got.dtype == np.float32
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_the_numpy_decoder_refuses_what_it_lacks():
    model = build(small("llama").with_(norm="deepnorm", norm_place="post"))
    with pytest.raises(ConfigError, match="neither DeepNorm"):
        decoder_np.forward(ids_of(1, 3).numpy(), decoder_np.weights_of(model), model.config)


def test_keep_gives_the_last_logits():
    model, ids = model_of("llama"), ids_of(2, 7)
    torch.testing.assert_close(model(ids, keep=2), model(ids)[:, -2:])


@pytest.mark.parametrize("ids", [torch.zeros(1, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.int32)])
def test_an_empty_prompt(ids):
    with pytest.raises(ValueError, match="ids are empty.*one token at least"):
        model_of("llama")(ids)


@pytest.mark.parametrize("token", [99, -1, 1000])
def test_a_token_id_out_of_range(token):
    with pytest.raises(ValueError, match=f"ids hold token {token}.*vocab_size = 99.*0 to 98"):
        model_of("gpt2")(torch.tensor([[1, token]]))


@pytest.mark.parametrize("ids", [torch.zeros(3, dtype=torch.long), torch.zeros(1, 3)])
def test_ids_of_another_kind(ids):
    with pytest.raises(ValueError, match="whole numbers of shape"):
        model_of("gpt2")(ids)


def test_longer_than_the_position_table():
    model = model_of("gpt2")
    with pytest.raises(ValueError, match="end at position 65.*position table of 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
    cache = ContiguousCache(model.config, 1, 70)
    model(torch.zeros(1, 64, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="end at position 65"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    assert model_of("llama")(torch.zeros(1, 65, dtype=torch.long)).shape == (1, 65, 99)  # rotations have no table


def test_a_cache_that_is_full_or_of_another_batch():
    model = model_of("llama")
    cache = ContiguousCache(model.config, 2, 5)
    model(ids_of(2, 4), cache=cache)
    with pytest.raises(ValueError, match="room for 5 tokens, 6 are needed"):
        model(ids_of(2, 2), cache=cache)
    assert cache.length == 4
    with pytest.raises(ValueError, match="made for batch 2, got 1"):
        model(ids_of(1, 1), cache=cache)


def test_the_numpy_decoder_refuses_too():
    model = build(small("llama"))
    w = decoder_np.weights_of(model)
    with pytest.raises(IndexError, match="ids has -1"):
        decoder_np.forward(np.array([[1, -1]]), w, model.config)
    assert decoder_np.forward(np.zeros((0, 3), int), w, model.config).shape == (0, 3, model.config.vocab_size)
    other = build(small("llama").with_(norm_place="none"))
    with pytest.raises(ConfigError, match="neither DeepNorm"):
        decoder_np.forward(np.array([[1]]), decoder_np.weights_of(other), other.config)
