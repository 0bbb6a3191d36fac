"""The sink cache: chunks equal single tokens, both equal a dense formula, its size stays; sinks save a real model."""

import math
import runpy

import pytest
import torch

from llmstack import architectures, facts
from llmstack.architectures import build
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.efficient_attention.streaming import SinkCache, stream_losses
from llmstack.architectures.layers import Attention
from llmstack.config import ModelConfig
from llmstack.ops.rope import rope_frequencies, rope_tables, rope_torch

CONFIG = ModelConfig("small", 32, 2, 4, 50, n_kv_heads=2, d_ff=48, max_seq_len=4096)


@pytest.fixture(scope="module")
def model():
    model = build(CONFIG).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model.double()


def ids(T, B=1):
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def stream(model, x, chunks, sinks=2, window=6):
    cache = SinkCache(model.config, len(x), sinks, window)
    parts, start = [], 0
    for n in chunks:
        parts.append(model(x[:, start : start + n], cache=cache))
        start += n
        assert cache.length == min(start, sinks + window - 1)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("sinks, window", [(2, 6), (0, 6), (4, 1), (1, 30)])
def test_chunks_equal_single_tokens(model, sinks, window, interleaved):
    turned = build(CONFIG.with_(rope_interleaved=interleaved)).double().eval()
    turned.load_state_dict(model.state_dict())
    x = ids(40, B=2)
    single = stream(turned, x, [1] * 40, sinks, window)
    for chunks in ([40], [7] * 5 + [5], [3, 20, 1, 1, 15]):
        torch.testing.assert_close(stream(turned, x, chunks, sinks, window), single, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_before_anything_is_dropped_it_is_the_plain_model(model):
    x = ids(8)
    torch.testing.assert_close(stream(model, x, [3, 1, 4]), model(x), rtol=1e-6, atol=1e-6)
    assert (stream(model, ids(12), [12])[:, -1] - model(ids(12))[:, -1]).abs().max() > 1e-3


@torch.no_grad()
def test_a_window_alone_is_sliding_window_attention(model):
    """RoPE knows distances only, so without sinks moving the positions changes nothing."""
    near = build(CONFIG.with_(sliding_window=6)).double().eval()
    near.load_state_dict(model.state_dict())
    torch.testing.assert_close(stream(model, ids(40), [9] * 4 + [4], sinks=0), near(ids(40)), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_one_layer_equals_a_dense_formula(model):
    """Each pair with rotations of its own: in the window by distance, to a sink by the slot the query would have."""
    layer: Attention = model.blocks[0].attention
    sinks, window, T = 2, 5, 20
    x = torch.randn(1, T, 32, generator=torch.Generator().manual_seed(1)).double()
    q, k, v = (y.unflatten(-1, (-1, 8))[0].transpose(0, 1) for y in (layer.q(x), layer.k(x), layer.v(x)))
    omega = rope_frequencies(8).double()
    complex_ = lambda y: torch.complex(y[..., :4], y[..., 4:])
    q, k = complex_(q), complex_(k).repeat_interleave(2, 0)  # [H, T, Dh / 2]
    out = torch.zeros(4, T, 8).double()
    for i in range(T):
        seen = [j for j in range(i + 1) if j < sinks or i - j < window]
        slot = min(i, sinks + window - 1)
        away = torch.tensor([slot - j if j < sinks else i - j for j in seen]).double()
        turned = q[:, i, None] * torch.exp(1j * away[:, None] * omega)  # [H, seen, Dh / 2]
        scores = (turned * k[:, seen].conj()).real.sum(-1) / math.sqrt(8)
        out[:, i] = (scores.softmax(-1)[..., None] * v.repeat_interleave(2, 0)[:, seen]).sum(1)
    expected = layer.o(out.transpose(0, 1).flatten(1))[None]

    from llmstack.architectures.ends import prepare

    cache, parts = SinkCache(CONFIG, 1, sinks, window), []
    for a, b in ((0, 9), (9, 10), (10, 20)):
        now, _ = prepare(CONFIG, ids(T)[:, a:b], cache=cache)
        parts.append(layer(x[:, a:b], now))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_kept_keys_stand_at_their_slots(model):
    """After 30 tokens the window's keys are rotated as slots 2 to 6, whatever chunks they came in."""
    x, cache = ids(30), SinkCache(CONFIG, 1, 2, 6)
    model(x[:, :19], cache=cache), model(x[:, 19:], cache=cache)
    h = model.blocks[0].norm1(model.embed(x, torch.arange(30)[None]))
    raw = model.blocks[0].attention.k(h).unflatten(-1, (-1, 8)).transpose(1, 2)
    wanted = rope_torch(raw[:, :, [0, 1, 25, 26, 27, 28, 29]], *rope_tables(torch.arange(7), rope_frequencies(8)))
    torch.testing.assert_close(cache.k[0], wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.slow
def test_the_cache_is_as_large_after_a_hundred_thousand_tokens():
    model = build(CONFIG).eval()
    x, chunk = ids(100_000), 500
    cache, sizes, last = SinkCache(CONFIG, 1, 4, 60), set(), None
    for start in range(0, 100_000, chunk):
        last = model(x[:, start : start + chunk], cache=cache, keep=1)
        sizes.add(sum(t.nbytes for part in (cache.k, cache.v) for t in part.values()))
    assert sizes == {2 * 2 * 2 * 63 * 8 * 4}, "2 L K (sinks + window − 1) Dh values of 4 bytes"
    assert last.isfinite().all()
    fresh = SinkCache(CONFIG, 1, 4, 60)
    recent = torch.cat([x[:, :4], x[:, -300:]], 1)  # two layers see two windows: older tokens cannot matter
    torch.testing.assert_close(last, model(recent, cache=fresh, keep=1), rtol=1e-3, atol=1e-4)


def test_bad_input(model):
    cases = [
        (lambda: SinkCache(CONFIG, window=0), "window = 0: a query sees itself"),
        (lambda: SinkCache(CONFIG, sinks=-1), "sinks = -1"),
        (lambda: SinkCache(CONFIG.with_(positions="alibi")), "takes plain RoPE"),
        (lambda: SinkCache(CONFIG.with_(sliding_window=8)), "takes plain RoPE"),
        (lambda: model(ids(4, B=2), cache=SinkCache(CONFIG)), r"streams 1 sequences without padding, got \[2, 4\]"),
        (
            lambda: model(ids(4), torch.tensor([[True, True, False, False]]), cache=SinkCache(CONFIG)),
            "without padding",
        ),
        (lambda: SinkCache(CONFIG).memory(0, None), "no encoder's output"),
    ]
    for call, says in cases:
        with pytest.raises(ValueError, match=says):
            call()


def test_a_contiguous_cache_grows_and_this_one_does_not(model):
    plain = ContiguousCache(CONFIG, 1, 64, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(8):
            model(ids(8), cache=plain)
    assert plain.length == 64


STORED = facts.table("streaming/sinks")
NAMES = ("all keys", "last 256", "first 4 and last 252")


def perplexity(losses):
    return math.exp(sum(losses) / len(losses))


def check_figure(losses):
    """Blocks of 64 tokens. Before anything is dropped all agree; then a window alone is lost, and sinks are not."""
    full, window, sinks = (losses[name] for name in NAMES)
    assert full[:4] == pytest.approx(window[:4], abs=2e-3) and full[:4] == pytest.approx(sinks[:4], abs=2e-3)
    assert perplexity(window[4:]) > 2 * perplexity(full[4:])
    assert perplexity(sinks[4:]) < 1.2 * perplexity(full[4:])
    assert all(w > s for w, s in zip(window[4:], sinks[4:])), "in every block"


def test_the_stored_figure_says_so():
    assert list(STORED["losses"]) == list(NAMES)
    check_figure(STORED["losses"])


@pytest.mark.slow
def test_sinks_keep_a_real_model_alive_and_a_window_alone_does_not():
    """SmolLM2 on 2,048 tokens of a play in chunks, as data/streaming/measure.py does: half a minute of one core."""
    measure = runpy.run_path(str(facts.data_path() / "streaming" / "measure.py"))
    model, tokenizer = architectures.pretrained("smollm2-135m")
    x = torch.tensor([tokenizer.encode(measure["text"]()[:20_000])[: STORED["tokens"] + 1]])
    losses = {}
    for name, cache in measure["caches"](model.config).items():
        losses[name] = stream_losses(model, x, cache).view(-1, STORED["block"]).mean(-1).tolist()
        assert losses[name] == pytest.approx(STORED["losses"][name], abs=0.02)
    check_figure(losses)


@torch.no_grad()
def test_streamed_losses_are_the_models_own(model):
    x = ids(20)
    own = torch.nn.functional.cross_entropy(model(x)[0, :-1], x[0, 1:], reduction="none")
    for chunk in (1, 6, 19, 64):
        cache = ContiguousCache(CONFIG, 1, 64, dtype=torch.float64)
        torch.testing.assert_close(stream_losses(model, x, cache, chunk).double(), own, rtol=1e-4, atol=1e-5)
