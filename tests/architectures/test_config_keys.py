"""Each key that a family's config class has in transformers is read, refused by name, or does not matter to a pass.

One key at a time is moved away from its value in a small model: our logits then equal transformers', or loading says
which key it is. What is listed below as irrelevant must leave transformers' own logits as they were.
"""

import re
from copy import deepcopy

import pytest
import torch
import transformers as t
from peers import BERT, DECODERS, ENCODERS, TWO_SIDED, close, ids_of, peer
from test_rope_scaling import MLA
from test_tied import SWITCH, TIED

from llmstack.architectures import load
from llmstack.architectures.hf import CheckpointError, family
from llmstack.config import ConfigError

# about training, generation or the file, for every family: a pass that only evaluates reads none of them
ELSEWHERE = re.compile(
    r".*(drop|initializer|init_std|_token_id|_tokens|aux_loss|z_loss|jitter|time_step_(max|min|scale|floor|init))"
    r".*|(output|summary|mask|id2label|label2id|return|problem|use_cache|use_mambapy|use_associative)_?.*"
    r"|architectures|dtype|model_type|transformers_version|chunk_size_feed_forward|is_encoder_decoder|_name_or_path"
)
IRRELEVANT = {  # key: why
    "pretraining_tp": "how the training's tensor parallelism summed; transformers 5 reads it nowhere",
    "num_nextn_predict_layers": "the layer that predicts a second token has weights of its own, left out of a pass",
    "num_mtp_layers": "the same under its new name",
    "reorder_and_upcast_attn": "the order of a rounding",
    "slow_but_exact": "the order of a rounding",
    "residual_in_fp32": "the dtype of the sum",
    "router_dtype": "the dtype of the scores",
    "rescale_prenorm_residual": "how weights are drawn",
    "decoder_sparse_step": "derived from num_sparse_decoder_layers",
    "encoder_sparse_step": "derived from num_sparse_encoder_layers",
    "add_router_probs": "what a pass returns",
    "router_ignore_padding_tokens": "reserved",
    "qk_head_dim": "derived",
    "max_window_layers": "read where use_sliding_window is set, which is refused",
    "decoder_vocab_size": "read where the two vocabularies differ, which is refused",
    "classifier_proj_size": "of a classifier of sound",
    "use_weighted_layer_sum": "of a classifier of sound",
    "apply_spec_augment": "noise in training",
    "median_filter_width": "of word times",
}
VALUES = dict(hidden_act="gelu", activation_function="relu", activation="relu", afn="relu", rope_interleave=False)
VALUES |= dict(hidden_size=64, d_model=64, n_embd=64, num_attention_heads=2, n_head=2, num_heads=2, num_kv_heads=2)
VALUES |= dict(num_key_value_heads=2, head_dim=16, sliding_window=3, vocab_size=120, q_lora_rank=16, dtype=None)
VALUES |= dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=3.0), rotary_dim=8)
VALUES |= dict(encoder_attention_heads=2, decoder_attention_heads=2, topk_method="group_limited_greedy", n_inner=40)
VALUES |= dict(layer_types=["sliding_attention", "full_attention"], max_position_embeddings=32, n_group=2)
VALUES |= dict(feed_forward_proj="gated-silu", dense_act_fn="gelu_new", qk_rope_head_dim=4, use_sliding_window=True)
VALUES |= dict(num_ln_in_parallel_attn=1, relative_attention_num_buckets=6, num_mel_bins=10, state_size=8)
VALUES |= dict(num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, word_embed_proj_dim=16, moe_layer_freq=2)
VALUES |= dict(num_hidden_layers=1, n_layer=1, num_layers=1, encoder_layers=1, decoder_layers=1, num_decoder_layers=1)

SIBLING = dict(encoder_ffn_dim="decoder_ffn_dim", encoder_attention_heads="decoder_attention_heads")
SIBLING |= dict(num_attention_heads="num_key_value_heads", num_layers="num_decoder_layers")
SIBLING |= dict(expand="intermediate_size", hidden_size="intermediate_size", no_rope_layer_interval="no_rope_layers")

V3 = dict(MLA) | dict(n_routed_experts=4)
SHAPES = "llama mistral qwen2 qwen3 olmo2 granite smollm3 phi3 arcee-relu gpt1 gpt2 gptj gpt-neox opt bloom"
FAMILIES = {name: DECODERS[name] for name in SHAPES.split()}
FAMILIES |= {name: DECODERS[name] for name in ("falcon-7b", "falcon-40b")} | {"mamba": TIED["mamba"]}
FAMILIES |= {
    "bert": ENCODERS["bert"],
    "ernie": lambda: t.ErnieModel(t.ErnieConfig(**BERT, use_task_id=True)),
} | TWO_SIDED
FAMILIES |= {
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**mixture, num_local_experts=4, num_key_value_heads=2)),
    "deepseek-v2": lambda: t.DeepseekV2ForCausalLM(t.DeepseekV2Config(**V3)),
    "deepseek-v3": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**V3)),
    "switch": lambda: t.SwitchTransformersForConditionalGeneration(t.SwitchTransformersConfig(**SWITCH)),
}
mixture = {key: value for key, value in MLA.items() if key in t.LlamaConfig().to_dict() and "head_dim" not in key}
mixture.pop("num_key_value_heads")


def moved(key, value):
    if key in VALUES:
        return deepcopy(VALUES[key])
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 1.5 if isinstance(value, float) else value


@torch.no_grad()
def logits(model, mels):
    ids = ids_of(2, 7, V=77)
    source = (
        torch.randn(2, mels, 24, generator=torch.Generator().manual_seed(2)) if mels else ids_of(2, 9, V=77, seed=3)
    )
    theirs = isinstance(model, t.PreTrainedModel)
    two_sided = model.config.is_encoder_decoder if theirs else model.config.kind == "encoder-decoder"
    if two_sided:
        return model(source, decoder_input_ids=ids).logits if theirs else model(source, ids)
    found = model(ids)
    return found if not theirs else found.logits if hasattr(found, "logits") else found.last_hidden_state


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_is_read_or_refused_or_irrelevant(name, tmp_path):
    theirs = peer(FAMILIES[name])
    raw, mels = theirs.config.to_dict(), getattr(theirs.config, "num_mel_bins", 0)
    usual, wrong = logits(theirs, mels), []
    dials = {key: dial for dial, key in family(theirs.config.model_type)["keys"].items()}
    for key in sorted(raw):
        value = moved(key, raw[key])
        if ELSEWHERE.fullmatch(key) or value == raw[key]:
            continue
        try:
            changed = peer(lambda: type(theirs)(type(theirs.config).from_dict({**raw, key: value})))
            want = logits(changed, changed.config.num_mel_bins if mels else 0)
        except Exception:  # transformers has no such model either, and says so in many ways
            continue
        if key in IRRELEVANT:
            changed.load_state_dict(theirs.state_dict())
            want = logits(changed, mels)
            if usual.shape != want.shape or not torch.equal(usual, want):
                wrong.append(f"{key} matters, though it is listed: {IRRELEVANT[key]}")
            continue
        changed.save_pretrained(tmp_path)
        try:
            close(logits(load(tmp_path), changed.config.num_mel_bins if mels else 0), want)
        except (CheckpointError, ConfigError) as error:
            named = (key, dials.get(key, key), SIBLING.get(key, key))
            if not any(name in str(error) for name in named):
                wrong.append(f"{key} = {value!r}: {error}")
        except AssertionError:
            wrong.append(f"{key} = {value!r}: logits differ")
    assert not wrong, "\n".join(wrong)
