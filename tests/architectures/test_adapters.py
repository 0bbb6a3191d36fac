"""Adapters that PEFT wrote, against PEFT's own logits."""

import json

import pytest
import torch
from peers import DECODERS, close, ids_of, peer

from llmstack.architectures import load
from llmstack.architectures.hf import CheckpointError

TARGETS = {"llama-gqa": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
TARGETS |= {"phi3": ["qkv_proj", "gate_up_proj"], "bloom": ["query_key_value"]}


def adapted(family, folder, **how):
    """PEFT's model with a random adapter, its base and its adapter written to the folder."""
    peft = pytest.importorskip("peft")
    peer(DECODERS[family]).save_pretrained(folder / "base")
    base = type(peer(DECODERS[family])).from_pretrained(folder / "base")
    options = dict(r=4, lora_alpha=6, target_modules=TARGETS[family], init_lora_weights=False)
    theirs = peft.get_peft_model(base, peft.LoraConfig(**options | {"fan_in_fan_out": family == "gpt2"} | how)).eval()
    theirs.save_pretrained(folder / "adapter")
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("family, how", [*((f, {}) for f in TARGETS), ("llama-gqa", {"use_rslora": True})])
def test_an_adapter_loads_onto_its_base(family, how, tmp_path):
    theirs, ids = adapted(family, tmp_path, **how), ids_of(2, 7)
    close(load(tmp_path / "adapter")(ids), theirs(ids).logits)
    assert not torch.allclose(load(tmp_path / "base")(ids), theirs(ids).logits, atol=1e-2)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'.*only 'LORA'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = "),
        ({"base_model_name_or_path": "org/elsewhere"}, "adapter of 'org/elsewhere'.*base_model_name_or_path"),
    ],
)
def test_what_an_adapter_cannot_be_is_refused_by_name(change, match, tmp_path):
    adapted("llama-gqa", tmp_path)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path / "adapter")
