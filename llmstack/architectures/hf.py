"""Hugging Face's layout in both directions: a family's config.json as dials, and its tensor names as ours.

data/layouts.toml lists the names. Here is what a list cannot say: RoPE's two spellings, T5's `feed_forward_proj`,
Falcon's flags, where DeepSeek's experts stand in groups. hf_tensors.py says which tensor holds which parameters.

A model that its family's config.json cannot express (GPT-3's bands, PaLM, the 2017 Transformer) keeps its dials as they
are, under model_type "llmstack", and its tensors under our names.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from llmstack import facts
from llmstack.config import ModelConfig, from_fields

OWN = "llmstack"
PLAIN = dict(relu="relu", gelu="gelu", gelu_new="gelu_tanh", gelu_pytorch_tanh="gelu_tanh", silu="silu", swish="silu")
GATED = dict(relu="reglu", gelu="geglu", gelu_new="geglu_tanh", gelu_pytorch_tanh="geglu_tanh", silu="swiglu")
GPT1 = dict(gelu="gelu_tanh", relu="relu", silu="silu", swish="silu")  # its "gelu" is the tanh form
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as it stands; the message says what is wrong and what to do."""


@cache
def family(model_type: str) -> dict[str, Any]:
    """A family's entry of data/layouts.toml, with what it takes over from another. Raises CheckpointError."""
    every = facts.table("layouts")
    if model_type not in every:
        known = ", ".join([*every, OWN])
        raise CheckpointError(f"no architecture {model_type!r}; model_type in config.json must be one of {known}")
    own = every[model_type]
    base = (
        family(own["like"])
        if "like" in own
        else {"prefix": "", "grouped": False, "conv1d": False, "gated": False, "ignore": []}
    )
    merge = lambda name, value: {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return {**base, **{name: merge(name, value) for name, value in own.items()}}


def config_from_hf(raw: dict[str, Any], name: str = "") -> ModelConfig:
    """The dials that a config.json stands for. Raises CheckpointError where it lacks a key or no dial can say it."""
    kind = raw.get("model_type")
    name = name or raw.get("_name_or_path") or str(kind)
    if kind == OWN:
        dials = {f.name: raw[f.name] for f in fields(ModelConfig) if f.name in raw and f.name != "name"}
        return from_fields(raw.get("name", name), dials | {"model_type": raw.get("layout", OWN)})
    entry = family(kind if isinstance(kind, str) else str(kind))
    keys = {dial: key for dial, key in entry["keys"].items() if key}
    dials = entry["dials"] | {dial: raw[key] for dial, key in keys.items() if raw.get(key) is not None}
    for dial in ("d_model", "n_layers", "n_heads", "vocab_size"):
        if dial not in dials:
            raise CheckpointError(f"config.json of {name} has no {keys[dial]!r}; a {kind} model cannot do without")
    if raw.get(keys.get("activation", "")):
        dials["activation"] = _activation(raw[keys["activation"]], GATED if entry["gated"] else PLAIN)
    if "attention_bias" in keys.values():
        dials["out_bias"] = dials.get("qkv_bias", False)
    try:
        if dials["positions"] == "rope":
            dials |= _read_rope(raw)
        dials |= READ.get(kind, lambda raw: {})(raw)
    except KeyError as key:
        raise CheckpointError(f"config.json of {name} lacks {key}, which a {kind} model needs here") from None
    return ModelConfig(name=name, model_type=kind, **dials)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json for transformers; the model's own dials where its family cannot say them."""
    if config.model_type in facts.table("layouts"):
        entry = family(config.model_type)
        raw = {"model_type": config.model_type, "architectures": [entry["class"]], "_name_or_path": config.name}
        raw |= {key: getattr(config, dial) for dial, key in entry["keys"].items() if key}
        if key := entry["keys"].get("activation"):
            names = {ours: theirs for theirs, ours in reversed((GATED if entry["gated"] else PLAIN).items())}
            raw[key] = names.get(config.activation)
        if config.positions == "rope":
            raw |= _write_rope(config)
        raw |= WRITE.get(config.model_type, lambda config: {})(config)
        try:
            same = config_from_hf(raw, config.name).with_(source=config.source) == config
        except ValueError:
            same = False
        if same:
            return raw
    dials = {f.name: getattr(config, f.name) for f in fields(ModelConfig)}
    return dials | {"layout": config.model_type, "model_type": OWN}


def _activation(name: str, names: dict[str, str]) -> str:
    if name not in names:
        raise CheckpointError(f"activation {name!r} is not supported; {', '.join(names)} are")
    return names[name]


def _agree(raw: dict, *pairs: tuple[str, Any]) -> None:
    for key, want in pairs:
        if raw.get(key, want) not in (want, None):
            raise CheckpointError(f"{key} = {raw[key]!r} in config.json; only {want!r} is supported")


def _read_rope(raw: dict) -> dict:
    """transformers 5 writes rope_parameters, older files rope_theta and rope_scaling."""
    at: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(key) or {}, dict):
            raise CheckpointError(f"{key} = {raw[key]!r} in config.json, but it must be an object {{…}} or null")
        at |= raw.get(key) or {}
    kind = at.get("rope_type") or at.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise CheckpointError(f"rope_type {kind!r} is not supported; 'default' and 'llama3' are")
    theta = at.get("rope_theta") or raw.get("rope_theta") or raw.get("rotary_emb_base") or 10000.0
    dials: dict[str, Any] = {"rope_theta": float(theta)}
    if kind == "llama3":
        dials["rope_scaling"] = (*(float(at[key]) for key in SCALING[:3]), int(at[SCALING[3]]))
    share = at.get("partial_rotary_factor", 0.25 if raw["model_type"] == "gpt_neox" else 1.0)
    share = raw.get("rotary_pct", share)
    if share != 1.0:
        dials["rope_dims"] = int(share * (raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]))
    return dials


def _write_rope(config: ModelConfig) -> dict:
    turns: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        turns |= {"rope_type": "llama3", **dict(zip(SCALING, config.rope_scaling))}
    if config.model_type == "gpt_neox":
        turns["partial_rotary_factor"] = (config.rope_dims or config.d_head) / config.d_head
    old = {"rope_theta": config.rope_theta}
    if config.rope_scaling:
        old["rope_scaling"] = {key: value for key, value in turns.items() if key != "rope_theta"}
    return {"rope_parameters": turns, **old}


def _read_falcon(raw: dict) -> dict:
    _agree(raw, ("alibi", False))
    new, one_head = raw.get("new_decoder_architecture", False), raw.get("multi_query", True)
    shared = (raw.get("num_kv_heads") or raw["num_attention_heads"]) if new or not one_head else 1
    norms = (raw.get("num_ln_in_parallel_attn") or 2) if new else 1
    bias = raw.get("bias", False)
    dials = dict(n_kv_heads=shared, parallel_norms=norms, parallel=new or raw.get("parallel_attn", True))
    return dials | dict(qkv_bias=bias, out_bias=bias, ffn_bias=bias)


def _write_falcon(config: ModelConfig) -> dict:
    new = config.parallel and (config.parallel_norms == 2 or config.n_kv_heads not in (1, config.n_heads))
    raw = dict(alibi=False, new_decoder_architecture=new, num_kv_heads=config.n_kv_heads, bias=config.qkv_bias)
    raw |= dict(multi_query=config.n_kv_heads == 1 and not new, parallel_attn=config.parallel)
    return raw | (dict(num_ln_in_parallel_attn=config.parallel_norms) if new else {})


def _read_bert(raw: dict) -> dict:
    _agree(raw, ("position_embedding_type", "absolute"))
    cls = (raw.get("architectures") or ["Model"])[0]
    mlm = cls.endswith(("ForMaskedLM", "ForPreTraining"))
    tasks = raw.get("task_type_vocab_size", 3) if raw.get("use_task_id") else 0
    return dict(mlm=mlm, pooler=not cls.endswith("ForMaskedLM"), task_types=tasks)


def _write_bert(config: ModelConfig) -> dict:
    end = ("ForPreTraining" if config.pooler else "ForMaskedLM") if config.mlm else "Model"
    raw: dict[str, Any] = {"architectures": [config.model_type.capitalize() + end]}
    if config.task_types:
        raw |= dict(use_task_id=True, task_type_vocab_size=config.task_types)
    return raw


def _read_t5(raw: dict) -> dict:
    _agree(raw, ("num_decoder_layers", raw["num_layers"]))
    gate, _, name = raw.get("feed_forward_proj", "relu").rpartition("-")
    name = "gelu_new" if gate and name == "gelu" else name
    tied = raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings", True))
    return dict(
        activation=_activation(name, GATED if gate else PLAIN),
        tied=tied,
        head_scale=raw["d_model"] ** -0.5 if tied else 1.0,
    )


def _write_t5(config: ModelConfig) -> dict:
    names = {"geglu_tanh": "gated-gelu", "reglu": "gated-relu", "swiglu": "gated-silu", "gelu_tanh": "gelu_new"}
    raw = dict(num_decoder_layers=config.n_layers, feed_forward_proj=names.get(config.activation, config.activation))
    return raw | dict(tie_word_embeddings=config.tied, is_encoder_decoder=True, decoder_start_token_id=0)


def _read_sides(raw: dict) -> dict:
    for key in ("layers", "attention_heads", "ffn_dim"):
        _agree(raw, (f"decoder_{key}", raw[f"encoder_{key}"]))
    return dict(embedding_scale=raw["d_model"] ** 0.5 if raw.get("scale_embedding") else 1.0)


def _write_sides(config: ModelConfig) -> dict:
    raw = dict(decoder_layers=config.n_layers, decoder_attention_heads=config.n_heads, decoder_ffn_dim=config.d_ff)
    last = (
        config.vocab_size - 1
    )  # Marian pads and starts with its last token; a default beyond the vocabulary is refused
    raw |= dict(pad_token_id=last, decoder_start_token_id=last) if config.model_type == "marian" else {}
    raw |= dict(pad_token_id=min(50256, last)) if config.model_type == "whisper" else {}
    return raw | dict(scale_embedding=config.embedding_scale != 1.0, is_encoder_decoder=True)


def _read_mamba(raw: dict) -> dict:
    _agree(raw, ("use_bias", False), ("use_conv_bias", True))
    if not raw["state_size"]:
        raise CheckpointError(f"state_size = {raw['state_size']!r} in config.json; a mamba model has 1 state or more")
    return dict(dt_rank=-(-raw["hidden_size"] // 16)) if raw.get("time_step_rank") == "auto" else {}


def _read_opt(raw: dict) -> dict:
    _agree(raw, ("layer_norm_elementwise_affine", True), ("enable_bias", True))
    before = raw.get("do_layer_norm_before", True)
    return dict(norm_place="pre" if before else "post", final_norm=before and not raw.get("_remove_final_layer_norm"))


def _read_mixtral(raw: dict) -> dict:
    return dict(d_expert=raw["intermediate_size"])


def _read_deepseek(raw: dict) -> dict:
    v3 = raw["model_type"] == "deepseek_v3"
    heads = raw["num_attention_heads"]
    _agree(raw, ("num_key_value_heads", heads), ("attention_bias", False), ("norm_topk_prob", v3))
    limited = v3 or raw.get("topk_method", "greedy") == "group_limited_greedy"
    groups = (raw.get("n_group") or 1, raw.get("topk_group") or 1) if limited else (1, 1)
    sizes = {key: raw.get(key, default) for key, default in (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64))}
    dials = dict(router_groups=groups[0], router_groups_kept=groups[1], d_head=sum(sizes.values()))
    return dials | dict(q_lora_rank=raw.get("q_lora_rank", 1536) or 0, **sizes)


def _write_deepseek(config: ModelConfig) -> dict:
    v3, grouped = config.model_type == "deepseek_v3", config.router_groups > 1
    raw = dict(q_lora_rank=config.q_lora_rank or None, num_key_value_heads=config.n_heads, norm_topk_prob=v3)
    raw |= dict(n_group=config.router_groups, topk_group=config.router_groups_kept)
    return raw | ({} if v3 else dict(topk_method="group_limited_greedy" if grouped else "greedy"))


def _read_switch(raw: dict) -> dict:
    layers = raw["num_layers"]
    sparse = [raw.get(f"num_sparse_{side}_layers", 3) for side in ("encoder", "decoder")]
    every = layers // sparse[0] if sparse[0] else 0
    if every not in (1, 2) or sparse[0] != sparse[1]:
        raise CheckpointError(
            f"num_sparse_encoder_layers, num_sparse_decoder_layers = {sparse} of {layers} layers; only all layers or "
            "every second one, on both sides alike, can have experts"
        )
    _agree(raw, ("num_decoder_layers", layers), ("router_bias", False))
    activation = _activation(raw.get("dense_act_fn", "relu"), PLAIN)
    tied = raw.get("tie_word_embeddings", True)
    scale = raw["d_model"] ** -0.5 if tied else 1.0
    return dict(expert_every=every, activation=activation, tied=tied, head_scale=scale, d_expert=raw["d_ff"])


def _write_switch(config: ModelConfig) -> dict:
    sparse = config.n_layers // config.expert_every
    raw = dict(num_sparse_encoder_layers=sparse, num_sparse_decoder_layers=sparse, num_decoder_layers=config.n_layers)
    raw |= dict(dense_act_fn=config.activation, tie_word_embeddings=config.tied, is_encoder_decoder=True)
    return raw | dict(decoder_start_token_id=0)


READ = {
    "mamba": _read_mamba,
    "qwen2": lambda raw: _agree(raw, ("use_sliding_window", False)) or {},
    "openai-gpt": lambda raw: {"activation": _activation(raw.get("afn", "gelu"), GPT1)},
    "bloom": lambda raw: _agree(raw, ("apply_residual_connection_post_layernorm", False)) or {},
    "opt": _read_opt,
    "falcon": _read_falcon,
    "bert": _read_bert,
    "ernie": _read_bert,
    "t5": _read_t5,
    "marian": _read_sides,
    "whisper": _read_sides,
    "mixtral": _read_mixtral,
    "deepseek_v2": _read_deepseek,
    "deepseek_v3": _read_deepseek,
    "switch_transformers": _read_switch,
}
WRITE = {
    "mistral": lambda config: {"sliding_window": config.sliding_window or None},
    "openai-gpt": lambda config: {"afn": {"gelu_tanh": "gelu"}.get(config.activation, config.activation)},
    "gptj": lambda config: {"rotary_dim": config.rope_dims or config.d_head},
    "opt": lambda config: {"do_layer_norm_before": config.norm_place == "pre"},
    "falcon": _write_falcon,
    "bert": _write_bert,
    "ernie": _write_bert,
    "t5": _write_t5,
    "marian": _write_sides,
    "whisper": _write_sides,
    "mixtral": lambda config: {"sliding_window": config.sliding_window or None},
    "deepseek_v2": _write_deepseek,
    "deepseek_v3": _write_deepseek,
    "switch_transformers": _write_switch,
}
