"""Reach against the Jacobian, cross-attention's weights against the output that they make."""

import pytest
import torch

from llmstack import architectures
from llmstack.config import preset
from llmstack.course import look

SMALL = dict(n_layers=2, d_model=32, n_heads=4, d_ff=64, vocab_size=50)


def small(name):
    config = preset(name).with_(**SMALL, **({"d_head": 8} if name == "t5-small" else {}))
    return architectures.build(config, seed=1).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.tensor([[7, 3, 9, 3, 11]])


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "bert-base-uncased"])
def test_reach_is_the_jacobian(name, ids):
    model = small(name)
    x = model.embed(ids, torch.arange(5)[None]).detach()

    def from_embedding(x):
        hook = model.embed.register_forward_hook(lambda *_: x)
        try:
            return model(ids)[0]
        finally:
            hook.remove()

    r = torch.randn(from_embedding(x).shape[-1], generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(lambda x: from_embedding(x) @ r, x)[:, 0]  # [T, S, D]
    found = look.reach(model, ids)
    torch.testing.assert_close(found, jacobian.norm(dim=-1), rtol=1e-4, atol=1e-7)
    allowed = torch.ones(5, 5, dtype=torch.bool) if model.config.kind == "encoder" else torch.ones(5, 5).tril().bool()
    assert torch.equal(found > 0, allowed)


def test_an_encoder_decoder_reaches_all_of_the_source_and_its_own_past(ids):
    model, source = small("t5-small"), torch.tensor([[4, 8, 15]])
    found = look.reach(model, ids, source)  # [3 + 5, 3 + 5]
    allowed = torch.ones(8, 8).tril().bool()
    allowed[:3, :3] = True
    assert torch.equal(found > 0, allowed)


def test_cross_attention_weights_make_the_output_of_the_layer(ids):
    model, source = small("t5-small"), torch.tensor([[4, 8, 15]])
    weights = look.cross_attention(model, source, ids)  # [L, H, T, S]
    assert weights.shape == (2, 4, 5, 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))
    layer, kept = model.decoder.blocks[1].cross, {}
    layer.register_forward_hook(lambda m, args, out: kept.update(out=out))
    memory = model.encode(source)
    model.decode(ids, memory)
    v = layer.v(memory)[0].unflatten(-1, (4, 8)).transpose(0, 1)  # [H, S, Dh]
    out = layer.o((weights[1] @ v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(kept["out"][0], out, rtol=1e-5, atol=1e-6)


def test_cross_attention_needs_an_encoder(ids):
    with pytest.raises(ValueError, match="no cross-attention"):
        look.cross_attention(small("gpt2"), ids, ids)


def test_passes_count_each_side(ids):
    model = small("t5-small")
    with look.passes(model) as count:
        memory = model.encode(ids)
        for end in range(1, 4):
            model.decode(ids[:, :end], memory)
    assert count == {"encoder": 1, "decoder": 3}
    model.encode(ids)
    assert count["encoder"] == 1, "counting ends with the block"


def test_next_words_are_the_largest_probabilities(ids):
    class Letters:
        encode = staticmethod(lambda text: [ord(c) - 97 for c in text])
        decode = staticmethod(lambda ids: str(int(ids[0])))

    model = small("gpt2")
    found = look.next_words(model, Letters, "hdj", n=3)
    chance = model(torch.tensor([[7, 3, 9]]))[0, -1].softmax(-1)
    assert list(found) == [f"“{i}”" for i in chance.argsort(descending=True)[:3].tolist()]
    assert list(found.values()) == pytest.approx(chance.sort(descending=True).values[:3].tolist())


def test_apart_compares_the_beginning_that_two_texts_share():
    class Letters:
        encode = staticmethod(lambda text: [ord(c) - 97 for c in text])
        tokens = staticmethod(lambda ids: [chr(97 + i) for i in ids])

    assert look.apart(small("gpt2"), Letters, "abcd", "abcx") == {"a": 0.0, "b": 0.0, "c": 0.0}
    model = small("bert-base-uncased")
    with torch.no_grad():
        one, other = (model(torch.tensor([[0, 1, 2, last]]))[0, 1] for last in (3, 23))
    found = look.apart(model, Letters, "abcd", "abcx")
    assert list(found) == ["a", "b", "c"]
    assert found["b"] == round(100 * float((one - other).norm() / one.norm()), 1) > 0


def test_panels_show_each_pattern_with_its_axes(monkeypatch):
    shown = []
    monkeypatch.setattr(look.plots, "show", lambda fig, alt: shown.append((fig, alt)))
    pattern = [[0.0, 1.0], [0.5, 0.25]]
    for names in (["one"], ["one", "two"]):
        look.panels(dict.fromkeys(names, pattern), xlabel="key", ylabel="query", alt="what is seen")
        fig, alt = shown.pop()
        panels = [ax for ax in fig.axes if ax.get_title()]
        assert [ax.get_title() for ax in panels] == names and alt == "what is seen"
        assert {ax.get_xlabel() for ax in panels} == {"key"} and panels[0].get_ylabel() == "query"
        assert fig.get_figwidth() == pytest.approx(3.2 * len(names))
        assert all(ax.images[0].get_clim() == (0, 1) for ax in panels)
        assert all(ax.images[0].get_array().tolist() == pattern for ax in panels)
