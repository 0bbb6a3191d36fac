"""Mixtral, Switch and DeepSeek against transformers with the same random weights: logits, parameters, files; and latent
attention in its two forms."""

import pytest
import torch
import transformers as t
from peers import ENDS, T5, close, ids_of, padded, peer, positions

from llmstack import preset
from llmstack.architectures import build, load, save
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.hf import CheckpointError, config_from_hf, config_to_hf
from llmstack.architectures.mla import LatentAttention
from llmstack.intensity import params

WIDE = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, **ENDS)
MIXTRAL = dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
LATENT |= dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, first_k_dense_replace=1)
SWITCH = T5 | dict(num_layers=4, num_decoder_layers=4, num_experts=4, expert_capacity=3)


def deepseek3(**dials):
    config = t.DeepseekV3Config(**WIDE, **LATENT, q_lora_rank=10, n_group=4, topk_group=2, n_shared_experts=2, **dials)
    model = t.DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.rand(8) / 4)
    return model


def deepseek2(**dials):
    return t.DeepseekV2ForCausalLM(t.DeepseekV2Config(**WIDE, **LATENT, **dials))


DECODERS = {
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**WIDE, **MIXTRAL)),
    "mixtral-window": lambda: t.MixtralForCausalLM(t.MixtralConfig(**WIDE, **MIXTRAL, sliding_window=5)),
    "deepseek-v2": lambda: deepseek2(
        q_lora_rank=10, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0
    ),
    "deepseek-v2-lite": lambda: deepseek2(q_lora_rank=None),
    "deepseek-v3": deepseek3,
    "deepseek-v3-halves": lambda: deepseek3(rope_interleave=False),
}
SWITCHES = {
    "switch": lambda: t.SwitchTransformersForConditionalGeneration(
        t.SwitchTransformersConfig(**SWITCH, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2)
    ),
    "switch-c": lambda: t.SwitchTransformersForConditionalGeneration(
        t.SwitchTransformersConfig(**SWITCH, num_sparse_encoder_layers=4, num_sparse_decoder_layers=4)
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The peer of a family and ours, loaded from its files; each made once."""
    made = {}

    def get(family):
        if family not in made:
            theirs, folder = peer((DECODERS | SWITCHES)[family]), tmp_path_factory.mktemp("theirs")
            theirs.save_pretrained(folder)
            made[family] = theirs, load(folder), folder
        return made[family]

    return get


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoder(pair, family, side):
    theirs, ours, _ = pair(family)
    ids, real = ids_of(3, 13), padded(3, 13, side)
    want = theirs(ids, attention_mask=real.long(), position_ids=positions(real), output_hidden_states=True)
    padding = None if side == "none" else real
    close(ours(ids, padding), want.logits, real)
    for mine, other in zip(ours.hidden_states(ids, padding), want.hidden_states, strict=True):
        close(mine, other, real)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("family", SWITCHES)
def test_switch(pair, family, side):
    """With a capacity of 3 for 4 experts and up to 16 tokens, a good part of them is dropped, alike in both."""
    theirs, ours, _ = pair(family)
    source, ids, there, here = ids_of(3, 16, seed=3), ids_of(3, 13), padded(3, 16, side), padded(3, 13, side)
    want = theirs(source, decoder_input_ids=ids, attention_mask=there.long(), decoder_attention_mask=here.long())
    paddings = (None, None) if side == "none" else (there, here)
    close(ours(source, ids, *paddings), want.logits, here)
    dropped = [m.last.dropped for m in ours.modules() if hasattr(m, "dispatch")]
    assert len(dropped) == 2 * (2 if family == "switch" else 4) and max(dropped) > 0.2


@pytest.mark.parametrize("family", [*DECODERS, *SWITCHES])
def test_parameters_and_files_in_both_directions(pair, family, tmp_path):
    theirs, ours, _ = pair(family)
    count = lambda model: sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count(ours) == count(build(ours.config, device="meta")) == count(theirs) == params(ours.config).total
    save(ours, tmp_path)
    back = type(theirs).from_pretrained(tmp_path)
    assert set(back.state_dict()) == set(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    again = load(tmp_path)
    assert again.config.with_(name="") == ours.config.with_(name="")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_a_model_that_its_family_cannot_express_keeps_its_dials(tmp_path):
    """Gated experts in Switch (the XXL of the paper); every third layer; Mixtral with a shared expert."""
    tiny = dict(d_model=16, n_layers=4, n_heads=2, n_kv_heads=2, d_head=8, d_ff=24, vocab_size=50, n_experts=4)
    tiny |= dict(max_seq_len=32, head_scale=0.25, attention_scale=1.0, d_expert=0)
    for name, changes in {
        "switch-xxl-128": {},
        "switch-base-128": dict(expert_every=3),
        "mixtral-8x7b": dict(n_shared_experts=1, d_expert=8),
    }.items():
        model = build(preset(name).with_(**tiny | changes))
        assert config_to_hf(model.config)["model_type"] == "llmstack"
        save(model, tmp_path / name)
        again = load(tmp_path / name)
        assert again.config == model.config
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "switch-base-128"])
def test_presets_are_written_for_transformers(name):
    """Rotation by YaRN, which DeepSeek's files ask for, is the one thing that no dial says."""
    raw = config_to_hf(preset(name))
    assert raw["model_type"] == preset(name).model_type
    read = config_from_hf(raw, name)
    assert read.with_(source=preset(name).source) == preset(name)


@pytest.mark.parametrize(
    "family, change, match",
    [
        ("deepseek-v3", dict(attention_bias=True), "attention_bias = True"),
        ("deepseek-v3", dict(num_key_value_heads=2), "num_key_value_heads = 2"),
        ("switch", dict(router_bias=True), "router_bias = True"),
        ("switch", dict(num_sparse_encoder_layers=1), "every second one"),
    ],
)
def test_what_no_dial_says_is_refused(pair, family, change, match):
    with pytest.raises(CheckpointError, match=match):
        config_from_hf(pair(family)[0].config.to_dict() | change)


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3"])
def test_latent_attention_absorbed_is_naive(pair, family):
    """On whole texts and token by token from the cache of latents, padded on the left."""
    ours, ids, real = pair(family)[1], ids_of(3, 14), padded(3, 14, "left")
    layers = [m for m in ours.modules() if isinstance(m, LatentAttention)]
    naive = ours(ids, real)
    for absorbed in (True, False, None):
        for layer in layers:
            layer.absorbed = absorbed
        close(ours(ids, real), naive, real)
        cache, parts = ContiguousCache(ours.config, 3, 14), []
        for step in (slice(0, 8), slice(8, 9), slice(9, 10), slice(10, 14)):
            parts.append(ours(ids[:, step], real[:, step], cache))
        close(torch.cat(parts, 1), naive, real)


def test_the_cache_holds_latents_alone():
    """DeepSeek-V3 in 16 bits: 70,272 bytes a token, where 128 heads of keys and values of 128 take 3,997,696."""
    config = preset("deepseek-v3")
    cache = ContiguousCache(config, 1, 10, device="meta", dtype=torch.bfloat16)
    assert (cache.k.nbytes + cache.v.nbytes) / 10 == 70_272
    mha = ContiguousCache(config.with_(kv_lora_rank=0, d_head=128), 1, 10, device="meta", dtype=torch.bfloat16)
    assert (mha.k.nbytes + mha.v.nbytes) / 10 == 3_997_696
