"""The one interface: what every method of METHODS keeps, what it trains, and what it refuses."""

import copy

import pytest
import torch

from llmstack import preset
from llmstack.architectures import build, load, save
from llmstack.config import ModelConfig
from llmstack.execution.finetune import METHODS, freeze, linears, prepare
from llmstack.execution.finetune.prompts import materialise
from llmstack.execution.generation import generate
from llmstack.execution.optimizers import adam

LLAMA = ModelConfig("small", 32, 2, 4, 99, n_kv_heads=2, d_ff=64, max_seq_len=64)
GPT2 = LLAMA.with_(norm="layernorm", norm_bias=True, activation="gelu", positions="learned", qkv_bias=True, tied=True)
IDENTITY = ("full", "lora", "adapter", "parallel-adapter")  # the prepared model is the base model
IDS = torch.randint(99, (3, 7), generator=torch.Generator().manual_seed(1))
BATCH = {"ids": IDS, "targets": torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)}
SETTINGS = {"fish": {"data": lambda step: BATCH}}  # of methods that need some


def small(config=LLAMA, seed=0):
    """A model whose weights are large enough that everything matters to the last digit."""
    model = build(config, seed)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    return model


def train(tuned, steps=3, lr=1e-2):
    losses, optimizer = [], adam(tuned.trainable, lr=lr)
    tuned.model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        logits = tuned.model(IDS)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        loss.backward()
        if tuned.after_backward:
            tuned.after_backward()
        optimizer.step()
        losses.append(loss.item())
    tuned.model.eval()
    return losses


@pytest.mark.parametrize("method", METHODS)
def test_what_is_frozen_stays(method):
    """Outputs have their shape, the loss falls; what is not trained has no gradient and keeps its bytes."""
    tuned = prepare(small(), method, **SETTINGS.get(method, {}))
    model, names = tuned.model, set(tuned.trainable)
    frozen = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if n not in names}
    assert frozen or method == "full"
    before, first = {n: t.clone() for n, t in frozen.items()}, tuned.state()
    losses = train(tuned)
    assert losses[-1] < losses[0] and model(IDS).shape == (3, 7, 99)
    assert all(t.grad is None for t in frozen.values())
    assert all(torch.equal(t, before[n]) for n, t in frozen.items())
    assert all(not torch.equal(p, first[n]) for n, p in tuned.trainable.items() if p.grad is not None)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == names


@pytest.mark.parametrize("method", METHODS)
def test_state_holds_what_was_trained(method):
    """Put into another preparation of the same base it gives the same model; a copy of the model is a model too."""
    how = SETTINGS.get(method, {})
    tuned, other = prepare(small(), method, **how), prepare(small(), method, **how)
    train(tuned)
    other.model.eval()
    assert not torch.equal(tuned.model(IDS), other.model(IDS))
    other.load(tuned.state())
    assert torch.equal(tuned.model(IDS), other.model(IDS))
    assert tuned.count == sum(tuned.state()[name].numel() for name in tuned.trainable)
    kept = copy.deepcopy(tuned.model)
    expected = tuned.model(IDS).detach()
    train(tuned)
    assert torch.equal(kept(IDS), expected)
    with pytest.raises(ValueError, match="another method, model or setting"):
        other.load({"elsewhere": torch.zeros(1)})


@pytest.mark.parametrize("method", METHODS)
def test_merged_is_unmerged(method, tmp_path):
    """Where a method merges, the plain model computes the same, is saved and loaded, and can be prepared again."""
    model = small()
    plain = set(dict(model.named_parameters()))
    tuned = prepare(model, method, **SETTINGS.get(method, {}))
    train(tuned)
    if tuned.merge is None:
        pytest.skip("this method adds what no matrix can hold")
    expected = tuned.model(IDS).detach()
    merged = tuned.merge()
    torch.testing.assert_close(merged(IDS), expected, rtol=1e-4, atol=1e-4)
    if set(dict(merged.named_parameters())) != plain:
        with pytest.raises(ValueError, match="in few bits, which no checkpoint holds"):
            save(merged, tmp_path)
        return
    save(merged, tmp_path)
    assert torch.equal(load(tmp_path)(IDS), merged(IDS))
    assert prepare(merged, "full").count == sum(p.numel() for p in merged.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_generation_with_a_cache(method):
    """A prepared model is called as before: token by token as at once, with prompts of different lengths."""
    tuned = prepare(small(), method, **SETTINGS.get(method, {}))
    train(tuned)
    real = torch.ones_like(IDS, dtype=torch.bool)
    real[1, :3] = False
    out = generate(tuned.model, IDS, 5, padding=real)
    padding = torch.nn.functional.pad(real, (0, 5), value=True)
    logits = tuned.model(out, padding=padding)[:, 6:-1]  # [3, 5, V]
    chosen = logits.gather(2, out[:, 7:, None])[..., 0]
    torch.testing.assert_close(chosen, logits.amax(-1), rtol=1e-4, atol=1e-4)
    assert tuned.model(IDS, keep=2).shape == (3, 2, 99) and len(tuned.model.hidden_states(IDS)) == 3


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("method", IDENTITY)
def test_it_starts_as_the_base_model(method, config):
    model = small(config)
    before = model(IDS).detach()
    assert torch.equal(prepare(model, method).model(IDS), before)


def test_adapters_on_both_sides_of_an_encoder_decoder():
    model = build(LLAMA.with_(kind="encoder-decoder", n_kv_heads=4))
    before = model(IDS, IDS).detach()
    tuned = prepare(model, "adapter", m=3, where=("attention", "cross", "ffn"))
    assert torch.equal(model(IDS, IDS), before)
    assert tuned.count == (2 + 3) * 2 * (
        2 * 32 * 3 + 3 + 32
    )  # two sublayers in the encoder's blocks, three in the others


@pytest.mark.parametrize("method, m", [("adapter", 1), ("adapter", 6), ("parallel-adapter", 5)])
def test_adapters_count(method, m):
    """2 L (2 h m) weights, and m + h biases each (Houlsby et al. 2019, section 2.1)."""
    L, h = 2, 32
    tuned = prepare(build(LLAMA), method, m=m)
    assert sum(p.numel() for p in tuned.trainable.values() if p.ndim == 2) == 2 * L * 2 * h * m
    assert tuned.count == 2 * L * (2 * h * m + m + h)


def test_adapters_stand_where_the_papers_put_them():
    """A serial one reads the sublayer's output, a parallel one its input: computed here by hand."""
    for method, beside, scale in (("adapter", False, 1.0), ("parallel-adapter", True, 4.0)):
        tuned = prepare(small(), method, m=4)
        train(tuned)
        ffn, x = tuned.model.blocks[0].ffn, torch.randn(2, 3, 32)
        y = ffn.base(x)
        a = torch.relu((x if beside else y) @ ffn.down.T + ffn.d) @ ffn.up.T + ffn.u
        torch.testing.assert_close(ffn(x), y + scale * a)


@pytest.mark.parametrize(
    "name, targets, r, printed",
    [
        ("gpt3-175b", ("q", "v"), 1, 4.7e6),
        ("gpt3-175b", ("q", "v"), 8, 37.7e6),
        ("gpt3-175b", ("q", "k", "v", "o"), 2, 18.8e6),
        ("bert-large-uncased", ("q", "v"), 8, 0.8e6),
    ],
)
def test_lora_counts_are_the_published_ones(name, targets, r, printed):
    """Hu et al. 2021, tables 4 and 2 (RoBERTa-large has BERT-large's blocks); without storage, on the meta device."""
    config = preset(name)
    tuned = prepare(build(config, device="meta"), "lora", r=r, targets=targets)
    assert tuned.count == len(targets) * 2 * config.n_layers * config.d_model * r
    assert tuned.count == pytest.approx(printed, rel=0.02)
    assert all(p.is_meta for p in tuned.trainable.values())


@pytest.mark.parametrize("r", [1, 4, 32])
def test_lora_has_at_most_its_rank(r):
    model = small()
    before = {name: linear.weight.detach().double() for name, _, _, linear in linears(model, ("q", "up"))}
    tuned = prepare(model, "lora", r=r, alpha=100.0, targets=("q", "up"))
    train(tuned, lr=0.1)
    deltas = {name: model.get_submodule(name).delta().double() for name in before}
    tuned.merge()
    for name, weight in before.items():
        rank = torch.linalg.matrix_rank(deltas[name], rtol=1e-5)
        assert 0 < rank <= r
        torch.testing.assert_close(model.get_submodule(name).weight.double() - weight, deltas[name], rtol=0, atol=1e-5)


def test_bytes_of_full_tuning():
    """16 a parameter, as the tensors of mixed precision with Adam have them; 2 + 16 ρ where a share ρ is added."""
    model = small()
    tuned = prepare(model, "full")
    train(tuned, steps=1)
    state = adam(masters := {n: p.detach().clone() for n, p in tuned.trainable.items()})
    state.step({n: torch.ones_like(p) for n, p in masters.items()})
    half = [t.bfloat16() for p in tuned.trainable.values() for t in (p, p.grad)]
    moments = [t for t in state.state_dict().values() if isinstance(t, torch.Tensor)]
    assert tuned.training_bytes == sum(t.nbytes for t in [*half, *masters.values(), *moments]) == 16 * tuned.count
    base, tuned = tuned.count, prepare(small(), "lora")
    assert tuned.training_bytes == 2 * base + 16 * tuned.count


def test_a_prefix_of_tokens_is_those_tokens():
    """A learned prompt that starts as tokens computes, before training, what the model computes behind them."""
    given = [5, 90, 17]
    behind = torch.cat([torch.tensor(given).expand(3, -1), IDS], 1)
    for config in (LLAMA, GPT2):
        expected = small(config)(behind)[:, len(given) :]
        for method in ("prompt", "p-tuning-v2"):
            tuned = prepare(small(config), method, ids=given)
            torch.testing.assert_close(tuned.model(IDS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["p-tuning", "prefix"])
def test_what_was_learned_stays_without_the_encoder(method):
    """The prompt of a trained encoder, put in its place: the same model to the last bit, and a table to train."""
    tuned = prepare(small(), method)
    train(tuned)
    expected, count = tuned.model(IDS), tuned.count
    kept = materialise(tuned)
    assert torch.equal(kept.model(IDS), expected) and list(kept.trainable) == ["prompt.table"] and kept.count < count
    losses = train(kept)
    assert losses[-1] < losses[0]


def test_prompts_count():
    """ℓ d of a prompt (Lester et al. 2021); 2 ℓ L K Dh of a prefix."""
    assert prepare(small(), "prompt", length=11).count == 11 * 32
    assert prepare(small(), "p-tuning-v2", length=11).count == 2 * 11 * 2 * 2 * 8


def test_freezing_takes_gradients_away():
    model = small()
    model(IDS).sum().backward()
    freeze(model)
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def test_linears():
    model = small()
    names = lambda targets: [name for name, *_ in linears(model, targets)]
    assert names(("q", "v")) == [f"blocks.{i}.attention.{x}" for i in (0, 1) for x in "qv"]
    assert names("ffn.up") == ["blocks.0.ffn.up", "blocks.1.ffn.up"]
    assert len(names("all")) == 2 * 7  # q k v o, gate up down; the head is outside the blocks
    for name, parent, attribute, linear in linears(model, "all"):
        assert getattr(parent, attribute) is linear is model.get_submodule(name)


T5 = LLAMA.with_(kind="encoder-decoder", n_kv_heads=4)


@pytest.mark.parametrize(
    "config, method, settings, message",
    [
        (LLAMA, "dora", {}, "no method 'dora' of fine-tuning; there are full, adapter"),
        (LLAMA, "lora", {"rank": 4}, "has no setting rank; it has r, alpha, targets, seed"),
        (LLAMA, "full", {"lr": 1}, "it has none"),
        (LLAMA, "lora", {"targets": ("q", "w")}, r"targets \['w'\] match no linear"),
        (LLAMA, "lora", {"r": 0}, "r = 0, but blocks.0.attention.q is 32×32: a rank is a whole number from 1 to 32"),
        (LLAMA, "lora", {"r": 17}, "r = 17, but blocks.0.attention.v is 16×32: .* from 1 to 16"),
        (LLAMA, "adapter", {"m": 0}, "m = 0"),
        (LLAMA, "parallel-adapter", {"where": ("cross",)}, r"where = \('cross',\): .* attention, cross, ffn"),
        (LLAMA, "adapter", {"where": ("norm1",)}, r"where = \('norm1',\)"),
        (LLAMA, "prompt", {"length": 0}, "length = 0"),
        (LLAMA, "prompt", {"ids": [1, 99]}, "hold token 99"),
        (LLAMA, "p-tuning", {"encoder": "gru"}, "encoder = 'gru'"),
        (LLAMA, "lora", {"r": 2.0}, "r = 2.0, but 'lora' takes a whole number, such as 8"),
        (LLAMA, "lora", {"r": True}, "r = True, but 'lora' takes a whole number"),
        (LLAMA, "lora", {"alpha": float("nan")}, "alpha = nan, but 'lora' takes a number, such as 16.0"),
        (LLAMA, "qlora", {"double": "no"}, "double = 'no', but 'qlora' takes true or false"),
        (LLAMA, "pafi", {"share": "all"}, "share = 'all', but 'pafi' takes a number"),
        (LLAMA, "lora", {"targets": []}, r"targets \[\] match no linear"),
        (LLAMA, "adapter", {"where": ()}, r"where = \(\)"),
        (LLAMA, "fish", SETTINGS["fish"] | {"samples": 0}, "samples = 0"),
        (LLAMA, "lq-lora", {"rounds": 0}, "rounds = 0"),
        (T5, "prefix", {}, "encoder-decoder small: .* for a decoder's heads"),
    ],
)
def test_what_is_refused_changes_nothing(config, method, settings, message):
    model = build(config)
    with pytest.raises(ValueError, match=message):
        prepare(model, method, **settings)
    assert all(p.requires_grad for p in model.parameters())
    assert prepare(model, "full").count == sum(p.numel() for p in build(config).parameters())


EXPERTS = LLAMA.with_(n_experts=4, top_k=2)
LATENT = LLAMA.with_(n_kv_heads=4, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)


@pytest.mark.parametrize("config", [EXPERTS, LATENT], ids=["experts", "latent"])
@pytest.mark.parametrize("method", ["lora", "qlora", "qa-lora"])
def test_linears_whose_weight_is_read_are_tuned_too(method, config):
    """A router's and a latent's matrix are used without a call: the model trains, and merged is unmerged."""
    how = {"targets": "all", "r": 2} | ({"group": 4} if method == "qa-lora" else {})
    tuned = prepare(small(config), method, **how)
    losses = train(tuned)
    assert losses[-1] < losses[0] and all(p.grad is not None for p in tuned.trainable.values())
    expected = tuned.model(IDS).detach()
    torch.testing.assert_close(tuned.merge()(IDS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["lora", "qlora", "qa-lora", "lq-lora"])
def test_a_model_in_bfloat16_is_tuned_in_bfloat16(method):
    tuned = prepare(small().bfloat16(), method, r=2)
    out = tuned.model(IDS)
    out.sum().backward()
    assert {p.dtype for p in tuned.trainable.values()} == {out.dtype} == {torch.bfloat16}
    assert (tuned.merge()(IDS) - out).abs().max() < 0.05 * out.abs().max()


@pytest.mark.parametrize("method", ["lora", "qa-lora"])
def test_merging_again_changes_nothing(method):
    """Neither the merged model nor one that has been prepared anew since."""
    tuned = prepare(small(), method)
    train(tuned)
    merged = tuned.merge()
    expected = merged(IDS)
    assert tuned.merge() is merged and torch.equal(merged(IDS), expected)
    if method == "lora":
        count = prepare(merged, "lora", r=3).count
        assert tuned.merge() is merged and sum(p.numel() for p in merged.parameters() if p.requires_grad) == count


def test_preparing_twice_is_refused():
    model = prepare(small(), "lora").model
    with pytest.raises(ValueError, match="prepared for 'lora' already"):
        prepare(model, "adapter")
    with pytest.raises(ValueError, match=r"prepared for 'lora'; merge\(\) first, or keep its state\(\)"):
        save(model, "nowhere")


def test_a_prompt_before_packed_documents_is_refused():
    """Their positions start again in the row, where the prompt is not."""
    for method in ("prompt", "p-tuning-v2"):
        with pytest.raises(ValueError, match="go with a pass over .* tokens, uncached"):
            prepare(small(), method).model(IDS, positions=torch.zeros_like(IDS))
