"""RoPE stretched beyond the trained length, and depths, aliases and biases of published files, against transformers."""

import json

import pytest
import torch
import transformers as t
from peers import DECODERS, LLAMA, SIDES, T5, WIDE, close, ids_of, peer
from test_tied import SWITCH, logits, rewrite

from llmstack import preset
from llmstack.architectures import build, load, save
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.decoder_np import forward, weights_of
from llmstack.architectures.efficient_attention.streaming import SinkCache
from llmstack.architectures.hf import CheckpointError, config_from_hf, config_to_hf
from llmstack.config import ConfigError
from llmstack.intensity import params
from llmstack.intensity.operations import forward_ops

SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.0, 2.0, 4.0, 8.0]
SCALINGS = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn-all": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=0.5)
    | dict(attention_factor=1.3, truncate=False),
    "longrope": dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=16),
}
MLA = dict(**LLAMA, q_lora_rank=12, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
MLA |= dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1)
MLA |= dict(topk_group=1, n_shared_experts=1, num_key_value_heads=4)
# deepseek-ai/DeepSeek-V2 and V3, config.json: rope_scaling
V2 = dict(type="yarn", beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707)
V3 = dict(type="yarn", beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0)


@torch.no_grad()
@pytest.mark.parametrize("length", [9, 24, 60])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rope_equals_transformers(name, length, tmp_path):
    config = t.LlamaConfig(**LLAMA, max_position_embeddings=32, rope_parameters=SCALINGS[name])
    theirs = peer(lambda: t.LlamaForCausalLM(config)).double()
    theirs.save_pretrained(tmp_path / "theirs")
    ours, ids = load(tmp_path / "theirs", "float64"), ids_of(2, length)
    want = theirs(ids).logits
    # cosines are fp32 on both sides: an angle of 60 off by half a unit in the last place is 2e-6
    close(ours(ids), want)
    close(torch.from_numpy(forward(ids.numpy(), weights_of(ours), ours.config)), want)
    save(ours, tmp_path / "ours")
    assert load(tmp_path / "ours").config.with_(name="") == ours.config.with_(name="")
    close(t.LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float64)(ids).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("kind, scaling", [("V2", V2), ("V3", V3), ("V3", V3 | dict(mscale=0.5)), ("V3", {})])
def test_deepseeks_published_yarn(kind, scaling, tmp_path):
    old = {"rope_theta": 10000.0, "rope_scaling": scaling | {"original_max_position_embeddings": 16}} if scaling else {}
    theirs = peer(lambda: getattr(t, f"Deepseek{kind}ForCausalLM")(getattr(t, f"Deepseek{kind}Config")(**MLA, **old)))
    theirs.save_pretrained(tmp_path)
    rewrite(tmp_path, rope_parameters=None, **old)
    ours, ids = load(tmp_path), ids_of(2, 40)
    close(ours(ids), theirs(ids).logits)
    cache = ContiguousCache(ours.config, 2, 40)
    ours(ids[:, :39], cache=cache)
    close(ours(ids[:, 39:], cache=cache), theirs(ids).logits[:, -1:])
    save(ours, tmp_path / "ours")
    assert load(tmp_path / "ours").config.with_(name="") == ours.config.with_(name="")


def test_a_scaled_model_without_a_layout_keeps_its_factors():
    scaled = preset("palm-8b").with_(rope_scaling=("longrope", 16, 1.2, (1.0, 2.0), (2.0, 4.0)))
    raw = json.loads(json.dumps(config_to_hf(scaled)))
    assert raw["model_type"] == "llmstack" and config_from_hf(raw) == scaled


@pytest.mark.parametrize("dials", [dict(nope_every=2), dict(rope_scaling=("dynamic", 2.0, 16))])
def test_a_sink_cache_refuses_what_it_could_not_turn_back(dials):
    with pytest.raises(ValueError, match="takes plain RoPE"):
        SinkCache(preset("llama3-8b").with_(**dials), sinks=1, window=4)


@pytest.mark.parametrize("scaling", [("yarn", 4.0), ("longrope", 1), ("mrope", 2.0, 3.0, 4)])
def test_a_scaling_of_another_shape_is_refused(scaling):
    with pytest.raises(ConfigError, match="rope_scaling = .*(followed by|linear, dynamic, yarn, longrope first)"):
        preset("llama3-8b").with_(rope_scaling=scaling)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "granite", "smollm3", "phi3"])
def test_parameters_and_weights_read_are_counted(name):
    config = config_from_hf(DECODERS[name]().config.to_dict())
    total = sum(p.numel() for p in build(config, device="meta").parameters())
    assert params(config).total == total
    read = sum(op.weights + op.biases for op in forward_ops(config, 1, 4))
    assert read == total - (config.vocab_size * config.d_model if not config.tied else 0)


def test_an_unknown_scaling_is_refused_by_name(tmp_path):
    peer(lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA))).save_pretrained(tmp_path)
    rewrite(tmp_path, rope_parameters={"rope_type": "proportional"})
    with pytest.raises(CheckpointError, match="rope_type 'proportional'.*llama3, linear, dynamic, yarn, longrope are"):
        load(tmp_path)


def test_llamas_partial_factor_is_ignored_as_transformers_does(tmp_path):
    theirs = peer(lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)))
    theirs.save_pretrained(tmp_path)
    rewrite(tmp_path, partial_rotary_factor=0.5)
    close(logits(load(tmp_path)), logits(t.LlamaForCausalLM.from_pretrained(tmp_path).eval()))
    rewrite(tmp_path, partial_rotary_factor=0.5, rope_parameters=SCALINGS["linear"])
    with pytest.raises(CheckpointError, match="partial_rotary_factor = 0.5"):
        load(tmp_path)


def deep(config, **depth):
    return {k: v for k, v in config.items() if k not in depth} | depth


UNEQUAL = {
    "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**deep(T5, num_layers=3, num_decoder_layers=1))),
    "marian": lambda: t.MarianMTModel(t.MarianConfig(**deep(SIDES, encoder_layers=1, decoder_layers=3))),
    "whisper": lambda: t.WhisperForConditionalGeneration(  # distil-whisper and Whisper turbo: few decoder layers
        t.WhisperConfig(**deep(SIDES, encoder_layers=3, decoder_layers=1), num_mel_bins=8, max_source_positions=12)
    ),
}


@pytest.mark.parametrize("family", UNEQUAL)
def test_the_two_sides_may_differ_in_depth(family, tmp_path):
    theirs = peer(UNEQUAL[family])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert len(ours.encoder.blocks) != len(ours.decoder.blocks)
    close(logits(ours), logits(theirs))
    assert params(ours.config).total == sum(p.numel() for p in build(ours.config, device="meta").parameters())
    save(ours, tmp_path / "ours")
    close(logits(type(theirs).from_pretrained(tmp_path / "ours").eval()), logits(theirs))


def test_unequal_experts_are_refused(tmp_path):
    config = t.SwitchTransformersConfig(**deep(SWITCH, num_decoder_layers=1))
    peer(lambda: t.SwitchTransformersForConditionalGeneration(config)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="num_decoder_layers = 1"):
        load(tmp_path)


@torch.no_grad()
def test_falcon_rws_alibi(tmp_path):
    rw = dict(alibi=True, multi_query=False, parallel_attn=False, bias=True)
    theirs = peer(lambda: t.FalconForCausalLM(t.FalconConfig(**WIDE, **rw)))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    close(logits(ours), logits(theirs))
    close(torch.from_numpy(forward(ids_of(2, 7).numpy(), weights_of(ours), ours.config)), logits(theirs))
    save(ours, tmp_path / "ours")
    close(logits(t.FalconForCausalLM.from_pretrained(tmp_path / "ours").eval()), logits(theirs))


def test_blooms_published_keys(tmp_path):
    """bigscience/bloom's config.json says n_embed and num_attention_heads."""
    theirs = peer(lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=99, hidden_size=24, n_layer=2, n_head=6)))
    theirs.save_pretrained(tmp_path)
    rewrite(tmp_path, hidden_size=None, n_embed=24, n_head=None, num_attention_heads=6)
    close(logits(load(tmp_path)), logits(theirs))
