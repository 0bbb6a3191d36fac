"""Folders in and out: shards, ties, kills, own layout; and what a damaged one says."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmstack import preset
from llmstack.architectures import build, checkpoints, load, save
from llmstack.architectures.hf import CheckpointError, config_from_hf, config_to_hf
from llmstack.config import ConfigError, presets

SMALL = dict(d_model=32, n_layers=2, n_heads=4, d_ff=48, vocab_size=99, max_seq_len=64)
TINY = preset("llama3-8b").with_(**SMALL, n_kv_heads=2, d_head=8)


@pytest.fixture
def folder(tmp_path):
    save(build(TINY), tmp_path)
    return tmp_path


def edit(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_shards_hold_what_one_file_holds(tmp_path):
    model = build(TINY, seed=3)
    save(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    save(model, tmp_path, shard_bytes=20_000)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert "model.safetensors" not in files and "model.safetensors.index.json" in files and len(files) > 4
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    assert same(load(tmp_path), model)
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.model.layers[1].mlp.up_proj.weight, model.blocks[1].ffn.up.weight)
    save(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_other_files_stay_and_nothing_temporary_is_left(folder):
    (folder / "tokenizer.json").write_text("{}")
    save(build(TINY, seed=1), folder)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_stored_once_and_stay_one_tensor(tied, tmp_path):
    model = build(TINY.with_(tied=tied))
    save(model, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    again = load(tmp_path)
    assert (again.out.head.weight is again.embed.tokens.weight) is tied
    assert same(model, again)


def test_dtype_and_seed(folder):
    assert load(folder, dtype=torch.bfloat16).embed.tokens.weight.dtype == torch.bfloat16
    assert same(build(TINY, seed=5), build(TINY, seed=5)) and not same(build(TINY, seed=5), build(TINY, seed=6))


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_old_checkpoint(folder):
    """The writer dies after the new weights are on disk and before they take their name."""
    old = load(folder)
    program = f"""
import os, signal
import llmstack.architectures.checkpoints as c
from llmstack.architectures import build, load, save
model = build(load({str(folder)!r}).config, seed=9)
replace = os.replace
def die(source, target):
    if str(target).endswith("model.safetensors"):
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    replace(source, target)
c.os.replace = die
save(model, {str(folder)!r})
"""
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode != 0
    assert any(p.suffix == ".tmp" for p in folder.iterdir())  # it had written them
    assert same(load(folder), old)


@pytest.mark.parametrize("name", ["gpt3-small", "palm-8b", "transformer-base-en-de"])
def test_a_model_without_a_layout_of_its_own_keeps_its_dials(name, tmp_path):
    config = preset(name).with_(d_model=32, n_layers=2, n_heads=4, d_head=8, d_ff=48, vocab_size=99, max_seq_len=64)
    model = build(config)
    save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llmstack"
    again = load(tmp_path)
    assert again.config == config and same(model, again)


def test_a_relu_llama_has_a_layout_that_transformers_reads(tmp_path):
    model = build(TINY.with_(model_type="arcee", activation="relu", tied=True))
    save(model, tmp_path)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(9)[None]
    assert type(theirs).__name__ == "ArceeForCausalLM"
    torch.testing.assert_close(model(ids), theirs(ids).logits)


def test_presets_survive_config_json():
    """Every preset comes back from config.json as it was; those that a family can express, in the family's own."""
    own = set()
    for name in presets():
        config = preset(name)
        raw = json.loads(json.dumps(config_to_hf(config)))
        assert config_from_hf(raw, config.name).with_(source="") == config.with_(source="")
        if raw["model_type"] == "llmstack":
            own.add(config.model_type)
    assert own.isdisjoint({"llama", "qwen2", "mistral", "bert", "t5", "opt", "bloom", "falcon", "whisper"})


def test_a_prefix_may_be_missing_and_old_names_are_known(folder):
    """Published BERTs and GPT-2s leave the base model's prefix out, and BERT's first files say gamma and beta."""
    bert = preset("bert-base-uncased").with_(**SMALL)
    model = build(bert)
    save(model, folder)
    stored = load_file(folder / "model.safetensors")
    old = lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    renamed = {old(name).removeprefix("bert."): tensor for name, tensor in stored.items()}
    save_file(renamed | {"embeddings.position_ids": torch.arange(64)[None]}, folder / "model.safetensors")
    assert same(load(folder), model)


def test_truncated_safetensors(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="model.safetensors .* bytes. is damaged or cut short.*download it again"):
        load(folder)


def test_a_wrong_head_count_names_both_shapes(folder):
    edit(folder, num_key_value_heads=4)
    with pytest.raises(
        CheckpointError, match=r"k_proj.weight is \[16, 32\].*makes it \[32, 32\].*n_kv_heads = 4.*config"
    ):
        load(folder)
    edit(folder, num_attention_heads=3)
    with pytest.raises(ConfigError, match="n_kv_heads = 4, but n_heads .3. must divide"):
        load(folder)


def test_a_missing_shard(folder):
    save(build(TINY), folder, shard_bytes=20_000)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"shards that are not there: {gone.name}"):
        load(folder)


def test_an_unknown_architecture(folder):
    edit(folder, model_type="perceiver")
    with pytest.raises(CheckpointError, match="no architecture 'perceiver'.*one of llama"):
        load(folder)


def test_pickle_is_refused_unopened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin.*never opened.*save_pretrained"):
        load(folder)


@pytest.mark.parametrize("how", ["missing", "unexpected"])
def test_missing_and_unexpected_tensors(folder, how):
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = stored.pop(name)
    if how == "unexpected":
        stored |= {name: tensor, "model.layers.2.mlp.up_proj.weight": tensor.clone()}
    save_file(stored, folder / "model.safetensors")
    match = "lacks model.layers.1.mlp" if how == "missing" else "holds model.layers.2.mlp.*no place"
    with pytest.raises(CheckpointError, match=match):
        load(folder)


def test_a_wrong_path(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="no folder"):
        load(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load(tmp_path / "empty")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load(folder)
    with pytest.raises(ValueError, match="is a file"):
        save(build(TINY), folder / "config.json")


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(hidden_act="quick_gelu"), "activation 'quick_gelu' is not supported; relu"),
        (dict(rope_parameters={"rope_type": "mrope", "rope_theta": 1e4}), "rope_type 'mrope' is not supported"),
        (dict(hidden_size=None), "no 'hidden_size'"),
        (dict(quantization_config={"quant_method": "gptq"}), "quantization_config = .*only None is supported"),
        (dict(model_type="qwen2", use_sliding_window=True), "use_sliding_window = True"),
    ],
)
def test_a_config_that_no_dial_can_say(folder, change, match):
    edit(folder, **change)
    with pytest.raises(CheckpointError, match=match):
        load(folder)


def test_a_state_space_is_a_decoder():
    with pytest.raises(ConfigError, match="d_state = 16"):
        build(preset("mamba-130m").with_(kind="encoder"), device="meta")


@pytest.mark.parametrize(
    "text, match",
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"a": 3}}', "a -> 3"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "outside .*'../model.safetensors'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "outside .*'/etc/passwd'"),
        ('{"weight_map": {"a": "..\\\\model.safetensors"}}', "outside"),
    ],
)
def test_an_index_that_is_broken_or_points_elsewhere(folder, text, match):
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=match):
        load(folder)


def test_an_index_that_promises_more_than_a_shard_holds(folder):
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(stored, "shard.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    stored.pop("lm_head.weight")
    save_file(stored, folder / "shard.safetensors")
    with pytest.raises(CheckpointError, match="shard.safetensors has no lm_head.weight.*download"):
        load(folder)


@pytest.mark.parametrize("text", [b"[]", b"null", b'"llama"', b"\xff\xfe{}", b"[" * 100_000], ids=lambda t: str(t[:8]))
def test_a_config_that_is_no_object(folder, text):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="config.json is not JSON|config.json is not a JSON object"):
        load(folder)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(model_type=[]), "no architecture"),
        (dict(rope_parameters="yarn"), "rope_parameters = 'yarn'"),
        (dict(rope_parameters={"rope_type": "llama3"}), "lacks? .*'factor'"),
        (dict(model_type="mixtral", intermediate_size=None, num_local_experts=2), "d_expert = None"),
        (dict(model_type="t5", d_model=8, num_heads=2, num_layers=None, num_hidden_layers=None), "'num_layers'"),
    ],
)
def test_a_config_with_something_odd_in_it(folder, change, match):
    edit(folder, **change)
    with pytest.raises(ValueError, match=match):
        load(folder)


def test_whole_numbers_are_no_weights(folder):
    """A quantised checkpoint has scales beside its integers; without them the integers mean nothing."""
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored["lm_head.weight"].to(torch.int8)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight holds torch.int8.*floating point"):
        load(folder)


def test_a_failure_while_weights_are_written_leaves_the_old_shape_too(folder, monkeypatch):
    """config.json and the weights change together, at the end."""
    old, config = load(folder), (folder / "config.json").read_text()
    monkeypatch.setattr(checkpoints, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(build(TINY.with_(n_layers=1)), folder)
    assert (folder / "config.json").read_text() == config and same(load(folder), old)
    assert not list(folder.glob(".*"))


def test_what_a_killed_writer_left_is_cleared_by_the_next(folder):
    stale = [folder / ".model.safetensors.12345.tmp", folder / "model-00001-of-00002-0badcafe.safetensors"]
    for file in stale:
        file.write_bytes(b"half")
    save(build(TINY, seed=4), folder)
    assert not any(file.exists() for file in stale) and same(load(folder), build(TINY, seed=4))


def test_build_takes_a_config():
    with pytest.raises(TypeError, match=r"build takes a ModelConfig, got 'gpt2'; .*preset\('gpt2'\)"):
        build("gpt2")
