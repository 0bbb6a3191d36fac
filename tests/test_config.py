"""Presets build, impossible shapes are refused with the field and the rule, and importing the package is free."""

import subprocess
import sys
from dataclasses import fields

import pytest

import llmstack
from llmstack.config import ConfigError, ModelConfig, Plan, ffn_width, from_fields, preset, presets

TINY = dict(d_model=64, n_layers=2, n_heads=4, vocab_size=100)


def test_every_preset_builds():
    for name in presets():
        c = preset(name)
        assert c.name == name and c.source and c.n_heads % c.n_kv_heads == 0, name


@pytest.mark.parametrize(
    "change, field, rule",
    [
        (dict(n_heads=5), "d_head", "must divide by n_heads"),
        (dict(n_kv_heads=3), "n_kv_heads", "must divide by it"),
        (dict(d_model=0), "d_model", "at least 1"),
        (dict(n_layers=-1), "n_layers", "zero or more"),
        (dict(vocab_size=1.5), "vocab_size", "whole number"),
        (dict(tied="yes"), "tied", "true or false"),
        (dict(norm_eps="small"), "norm_eps", "a number"),
        (dict(kind="both"), "kind", "decoder, encoder, encoder-decoder"),
        (dict(norm="batchnorm"), "norm", "layernorm, rmsnorm, deepnorm"),
        (dict(norm_place="middle"), "norm_place", "pre, post, branch, none"),
        (dict(activation="swish"), "activation", "silu"),
        (dict(positions="absolute"), "positions", "learned"),
        (dict(d_head=15), "d_head", "even"),
        (dict(rope_dims=7), "rope_dims", "even"),
        (dict(rope_dims=32), "rope_dims", "only d_head = 16"),
        (dict(n_experts=4), "top_k", "at least one"),
        (dict(n_experts=4, top_k=5), "top_k", "only n_experts = 4"),
        (dict(top_k=1), "top_k", "only n_experts = 0"),
        (dict(dense_layers=3), "dense_layers", "only n_layers = 2"),
        (dict(n_experts=4, top_k=1, router_groups=3), "router_groups", "must divide by it"),
        (dict(kv_lora_rank=8), "kv_lora_rank", "v_head_dim"),
        (dict(d_state=16), "d_state", "dt_rank"),
        (dict(parallel_norms=3), "parallel_norms", "1 or 2"),
        (dict(norm_eps=float("nan")), "norm_eps", "finite"),
        (dict(attention_scale=float("inf")), "attention_scale", "finite"),
        (dict(rope_theta=0.0), "rope_theta", "at least 1"),
        (dict(rope_scaling=(8.0, 1.0, 4.0)), "rope_scaling", "factor, low, high, original length"),
        (dict(rope_scaling=(8.0, 4.0, 4.0, 8192)), "rope_scaling", "low below high"),
        (dict(rope_scaling=("linear", 2.0, 3.0)), "rope_scaling", "'linear' is followed by"),
        (dict(rope_scaling=("linear",)), "rope_scaling", "'linear' is followed by"),
        (dict(rope_scaling="llama3"), "rope_scaling", "factor, low, high, original length"),
        (dict(positions="relative"), "positions", "encoder-decoder"),
        (dict(positions="relative", kind="encoder-decoder", relative_buckets=2), "relative_buckets", "at least 4"),
        (dict(positions="relative", kind="encoder-decoder", relative_max_distance=16), "relative_buckets", "twice"),
        (dict(parallel=True, norm_place="post"), "parallel", "norm_place 'pre'"),
        (dict(kind="encoder", mlm=True, activation="swiglu"), "activation", "without a gate"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_impossible_shapes_are_refused(change, field, rule):
    with pytest.raises(ConfigError, match=f"tiny: {field} = .*{rule}"):
        ModelConfig("tiny", **TINY | change)


def test_unknown_fields_and_presets():
    with pytest.raises(ConfigError, match="no field n_head; ModelConfig has name, d_model"):
        from_fields("tiny", TINY | {"n_head": 4})
    with pytest.raises(ConfigError, match="no field n_head"):
        ModelConfig("tiny", **TINY).with_(n_head=4)
    with pytest.raises(KeyError, match="did you mean llama2-7b"):
        preset("lama2-7b")
    with pytest.raises(KeyError, match="Google has not published its shape"):
        preset("gemini")


def test_widths_follow_what_they_follow_from():
    c = ModelConfig("tiny", **TINY)
    assert (c.d_head, c.d_ff, c.n_kv_heads, c.attention_scale) == (16, 256, 4, 0.25)
    wide = c.with_(d_model=256, n_heads=4)
    assert (wide.d_head, wide.d_ff, wide.attention_scale, wide.d_embedding) == (64, 1024, 0.125, 256)
    assert c.with_(n_heads=2).n_kv_heads == 2
    assert preset("llama-7b").with_(d_model=2048).d_ff == 11008  # a width that was chosen stays


def test_layers_with_windows_and_experts():
    gpt3 = preset("gpt3-175b")
    assert [gpt3.windowed(layer) for layer in range(4)] == [False, True, False, True]
    assert all(preset("mistral-7b-v0.1").windowed(layer) for layer in range(32))
    v3, switch = preset("deepseek-v3"), preset("switch-base-128")
    assert [v3.has_experts(layer) for layer in range(5)] == [False, False, False, True, True]
    assert [switch.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    assert not gpt3.has_experts(1)


@pytest.mark.parametrize(
    "name", [n for n in presets() if n.startswith(("llama", "llama2", "llama3")) and "3.2" not in n]
)
def test_llamas_width_rule(name):
    """Meta's reference code: multiple_of and ffn_dim_multiplier of each model's params.json."""
    dials = {"llama2-70b": (4096, 1.3), "llama3-70b": (4096, 1.3), "llama3.1-70b": (4096, 1.3)}
    dials |= {"llama3-8b": (1024, 1.3), "llama3.1-8b": (1024, 1.3), "llama3.1-405b": (4096, 1.2)}
    assert ffn_width(preset(name).d_model, *dials.get(name, (256, 1.0))) == preset(name).d_ff


def test_dials_that_nobody_turned():
    """A plain LLaMA block: what is on stands here, all other switches are off."""
    on = dict(kind="decoder", norm="rmsnorm", norm_place="pre", norm_eps=1e-5, final_norm=True, activation="swiglu")
    on |= dict(positions="rope", rope_theta=10000.0, k_bias=True, parallel_norms=1, window_every=1, max_seq_len=2048)
    on |= dict(relative_buckets=32, relative_max_distance=128, embedding_scale=1.0, head_scale=1.0, expert_every=1)
    on |= dict(router_score="softmax", router_norm=True, router_scale=1.0, router_groups=1, router_groups_kept=1)
    defaults = {f.name: f.default for f in fields(ModelConfig)}
    assert {name: defaults[name] for name in on} == on
    switches = {name for name, default in defaults.items() if default is True}
    assert switches == {"final_norm", "k_bias", "router_norm"}
    assert defaults["position_offset"] == defaults["sliding_window"] == defaults["rope_dims"] == 0


def test_plan():
    assert Plan(tp=8, pp=16, dp=4, cp=2).ranks == 1024
    for change, rule in [
        (dict(tp=0), "tp = 0.*whole number"),
        (dict(zero=4), "zero = 4.*stages"),
        (dict(recompute="some"), "recompute = 'some'.*none, selective, full"),
        (dict(dp=4, ep=3), "ep = 3.*dp = 4 must divide"),
    ]:
        with pytest.raises(ConfigError, match=f"Plan: {rule}"):
            Plan(**change)


def test_importing_costs_nothing():
    """Neither the package, nor the facts, nor the command's parser load numpy, torch or matplotlib."""
    code = (
        "import sys, llmstack, llmstack.cli; llmstack.preset('gpt2'); from llmstack import facts; facts.systems();"
        "print([m for m in ('numpy', 'torch', 'matplotlib', 'triton', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_front_door():
    assert llmstack.preset("gpt2") == preset("gpt2")
    assert "preset" in dir(llmstack)
    with pytest.raises(AttributeError, match="no attribute 'presett'"):
        llmstack.presett  # noqa: B018


def test_missing_fields_are_named():
    with pytest.raises(ConfigError, match="tiny: lacks n_heads, vocab_size"):
        from_fields("tiny", dict(d_model=8, n_layers=1))
