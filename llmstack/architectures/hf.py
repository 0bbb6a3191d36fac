"""Hugging Face's layout in both directions: a family's config.json as dials, and its tensor names as ours.

data/layouts.toml lists the names. Here is what a list cannot say: RoPE's two spellings, T5's `feed_forward_proj`,
Falcon's flags, where DeepSeek's experts stand in groups. hf_tensors.py says which tensor holds which parameters.

A model that its family's config.json cannot express (GPT-3's bands, PaLM, the 2017 Transformer) keeps its dials as they
are, under model_type "llmstack", and its tensors under our names.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from typing import Any

from llmstack import facts
from llmstack.config import ModelConfig, from_fields
from llmstack.ops.rope import yarn_mscale

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
        else {"prefix": "", "grouped": False, "conv1d": False, "gated": False, "ignore": [], "always_tied": False}
        | {"shared": {}, "only": {}, "aliases": {}}
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
    raw = raw | {key: raw[other] for other, key in entry["aliases"].items() if raw.get(other) is not None}
    _agree(raw, {"quantization_config": None} | entry["only"])
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
            back = config_from_hf(raw, config.name)  # a head that is stored need not be tied, whatever the flag says
            same = back.with_(source=config.source, tied=back.tied and config.tied) == config
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


def _agree(raw: dict, only: dict[str, Any]) -> None:
    """Refuse a key with a value that no dial here can say; one that is not there, or null, has the usual value."""
    for key, want in only.items():
        if raw.get(key) not in (want, None):
            raise CheckpointError(
                f"{key} = {raw[key]!r} in config.json of a {raw.get('model_type')} model; only {want!r} is supported, "
                f"and the families are {', '.join(facts.table('layouts'))}"
            )


def _rope_of(raw: dict) -> dict[str, Any]:
    """What is said of RoPE: transformers 5 writes rope_parameters, older files rope_theta and rope_scaling."""
    at: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(key) or {}, dict):
            raise CheckpointError(f"{key} = {raw[key]!r} in config.json, but it must be an object {{…}} or null")
        at |= raw.get(key) or {}
    return at


def _read_rope(raw: dict) -> dict:
    at = _rope_of(raw)
    kind = at.get("rope_type") or at.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # Phi-3's first name of it
    theta = at.get("rope_theta") or raw.get("rope_theta") or raw.get("rotary_emb_base")
    dials: dict[str, Any] = {"rope_theta": float(theta)} if theta else {}
    if kind not in ("default", *SCALED):
        raise CheckpointError(f"rope_type {kind!r} is not supported; default, {', '.join(SCALED)} are")
    if kind != "default":
        at["length"] = int(raw.get("original_max_position_embeddings") or at.get(LENGTH) or raw[MOST])
        dials["rope_scaling"] = SCALED[kind](at, raw)
    share = at.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if raw["model_type"] == "phi3":
        dials["rope_dims"] = int(share * (raw["hidden_size"] // raw["num_attention_heads"]))
    elif raw["model_type"] == "gpt_neox":
        share = raw.get("rotary_pct", at.get("partial_rotary_factor", 0.25))
        dials["rope_dims"] = int(share * (raw["hidden_size"] // raw["num_attention_heads"]))
    elif kind != "default":  # unscaled, transformers does not read it
        _agree({"partial_rotary_factor": share}, {"partial_rotary_factor": 1.0})
    return dials


def _yarn(at: dict, raw: dict) -> tuple:
    """YaRN as (name, factor, fast, slow, length, amplitude, truncate); DeepSeek gives the amplitude as two mscales."""
    factor = float(at.get("factor") or raw[MOST] / at["length"])
    scale, whole = at.get("mscale"), at.get("mscale_all_dim")
    if scale and whole:
        amplitude = yarn_mscale(factor, scale) / yarn_mscale(factor, whole)
    else:
        amplitude = yarn_mscale(factor)
    fast, slow = float(at.get("beta_fast") or 32), float(at.get("beta_slow") or 1)
    return ("yarn", factor, fast, slow, at["length"], at.get("attention_factor") or amplitude, at.get("truncate", True))


def _longrope(at: dict, raw: dict) -> tuple:
    factor = at.get("factor") or raw[MOST] / at["length"]
    amplitude = math.sqrt(1 + math.log(factor) / math.log(at["length"])) if factor > 1 else 1.0
    short, long = (tuple(float(f) for f in at[f"{name}_factor"]) for name in ("short", "long"))
    return ("longrope", at["length"], at.get("attention_factor") or amplitude, short, long)


LENGTH, MOST = "original_max_position_embeddings", "max_position_embeddings"
SCALED = {
    "llama3": lambda at, raw: (*(float(at[key]) for key in SCALING[:3]), at["length"]),
    "linear": lambda at, raw: ("linear", float(at["factor"])),
    "dynamic": lambda at, raw: ("dynamic", float(at["factor"]), int(raw[MOST])),
    "yarn": _yarn,
    "longrope": _longrope,
}
WRITTEN = {  # the keys of each kind's numbers, in their order
    "linear": ("factor",),
    "dynamic": ("factor", LENGTH),
    "yarn": ("factor", "beta_fast", "beta_slow", LENGTH, "attention_factor", "truncate"),
    "longrope": (LENGTH, "attention_factor", "short_factor", "long_factor"),
}


def _write_rope(config: ModelConfig) -> dict:
    turns: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling or ()
    if scaling and scaling[0] in WRITTEN:
        turns |= {"rope_type": scaling[0], **dict(zip(WRITTEN[scaling[0]], scaling[1:]))}
    elif scaling:
        turns |= {"rope_type": "llama3", **dict(zip(SCALING, scaling))}
    if config.model_type in ("gpt_neox", "phi3"):
        turns["partial_rotary_factor"] = (config.rope_dims or config.d_head) / config.d_head
    if config.kv_lora_rank and scaling and scaling[0] == "yarn":  # DeepSeek's scale of attention: _read_deepseek
        more = (config.attention_scale * config.d_head**0.5) ** 0.5 - 1
        turns["mscale_all_dim"] = round(more / (0.1 * math.log(scaling[1])), 9)
    old = {"rope_theta": config.rope_theta}
    if config.rope_scaling:
        old["rope_scaling"] = {key: value for key, value in turns.items() if key != "rope_theta"}
    return {"rope_parameters": turns, **old}


def _read_falcon(raw: dict) -> dict:
    new, one_head = raw.get("new_decoder_architecture", False), raw.get("multi_query", True)
    shared = (raw.get("num_kv_heads") or raw["num_attention_heads"]) if new or not one_head else 1
    norms = (raw.get("num_ln_in_parallel_attn") or 2) if new else 1
    bias = raw.get("bias", False)
    dials = dict(n_kv_heads=shared, parallel_norms=norms, parallel=new or raw.get("parallel_attn", True))
    dials |= dict(positions="alibi", alibi_scaled=True) if raw.get("alibi") else {}
    return dials | dict(qkv_bias=bias, out_bias=bias, ffn_bias=bias)


def _write_falcon(config: ModelConfig) -> dict:
    new = config.parallel and (config.parallel_norms == 2 or config.n_kv_heads not in (1, config.n_heads))
    raw = dict(
        alibi=config.positions == "alibi",
        new_decoder_architecture=new,
        num_kv_heads=config.n_kv_heads,
        bias=config.qkv_bias,
    )
    raw |= dict(multi_query=config.n_kv_heads == 1 and not new, parallel_attn=config.parallel)
    return raw | (dict(num_ln_in_parallel_attn=config.parallel_norms) if new else {})


def _read_bert(raw: dict) -> dict:
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
    gate, _, name = raw.get("feed_forward_proj", "relu").rpartition("-")
    name = raw.get("dense_act_fn", "gelu_new" if gate and name == "gelu" else name)
    gate = raw.get("is_gated_act", gate)
    tied = raw.get("tie_word_embeddings", True)
    scaled = raw.get("scale_decoder_outputs", tied)  # files of before transformers 5 say it by the tie
    scale = raw["d_model"] ** -0.5 if scaled else 1.0
    depth = raw.get("num_decoder_layers") or raw["num_layers"]
    activation = _activation(name, GATED if gate else PLAIN)
    return dict(activation=activation, tied=tied, head_scale=scale, n_decoder_layers=depth)


def _write_t5(config: ModelConfig) -> dict:
    names = {"geglu_tanh": "gated-gelu", "reglu": "gated-relu", "swiglu": "gated-silu", "gelu_tanh": "gelu_new"}
    raw = dict(
        num_decoder_layers=config.n_decoder_layers, feed_forward_proj=names.get(config.activation, config.activation)
    )
    raw |= dict(tie_word_embeddings=config.tied, scale_decoder_outputs=config.head_scale != 1.0)
    return raw | dict(is_encoder_decoder=True, decoder_start_token_id=0)


def _read_sides(raw: dict) -> dict:
    _agree(raw, {f"decoder_{key}": raw[f"encoder_{key}"] for key in ("attention_heads", "ffn_dim")})
    scaled = raw.get("scale_embedding") and raw["model_type"] != "whisper"  # which has the key and does not read it
    scale = raw["d_model"] ** 0.5 if scaled else 1.0
    return dict(embedding_scale=scale, n_decoder_layers=raw.get("decoder_layers", raw["encoder_layers"]))


def _write_sides(config: ModelConfig) -> dict:
    raw = dict(
        decoder_layers=config.n_decoder_layers, decoder_attention_heads=config.n_heads, decoder_ffn_dim=config.d_ff
    )
    # Marian pads and starts with its last token; a default beyond the vocabulary is refused.
    last = config.vocab_size - 1
    raw |= dict(pad_token_id=last, decoder_start_token_id=last) if config.model_type == "marian" else {}
    raw |= dict(pad_token_id=min(50256, last)) if config.model_type == "whisper" else {}
    return raw | dict(scale_embedding=config.embedding_scale != 1.0, is_encoder_decoder=True)


def _read_mamba(raw: dict) -> dict:
    _agree(raw, {"intermediate_size": raw.get("expand", 2) * raw["hidden_size"]})
    if not raw["state_size"]:
        raise CheckpointError(f"state_size = {raw['state_size']!r} in config.json; a mamba model has 1 state or more")
    return dict(dt_rank=-(-raw["hidden_size"] // 16)) if raw.get("time_step_rank") == "auto" else {}


def _read_opt(raw: dict) -> dict:
    before = raw.get("do_layer_norm_before", True)
    return dict(norm_place="pre" if before else "post", final_norm=before and not raw.get("_remove_final_layer_norm"))


def _read_mixtral(raw: dict) -> dict:
    return dict(d_expert=raw["intermediate_size"])


def _read_deepseek(raw: dict) -> dict:
    v3 = raw["model_type"] == "deepseek_v3"
    heads = raw["num_attention_heads"]
    _agree(raw, {"num_key_value_heads": heads})
    limited = v3 or raw.get("topk_method", "greedy") == "group_limited_greedy"
    groups = (raw.get("n_group") or 1, raw.get("topk_group") or 1) if limited else (1, 1)
    sizes = {key: raw.get(key, default) for key, default in (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64))}
    at = _rope_of(raw)
    if at.get("mscale_all_dim") and (at.get("rope_type") or at.get("type")) == "yarn":
        more = yarn_mscale(float(at["factor"]), at["mscale_all_dim"])
        sizes["attention_scale"] = more * more * sum(sizes.values()) ** -0.5
    dials = dict(
        router_groups=groups[0],
        router_groups_kept=groups[1],
        d_head=sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"],
    )
    return dials | dict(q_lora_rank=raw.get("q_lora_rank", 1536) or 0, **sizes)


def _write_deepseek(config: ModelConfig) -> dict:
    v3, grouped = config.model_type == "deepseek_v3", config.router_groups > 1
    raw = dict(q_lora_rank=config.q_lora_rank or None, num_key_value_heads=config.n_heads, norm_topk_prob=v3)
    raw |= dict(n_group=config.router_groups, topk_group=config.router_groups_kept)
    return raw | ({} if v3 else dict(topk_method="group_limited_greedy" if grouped else "greedy"))


def _read_granite(raw: dict) -> dict:
    return dict(head_scale=1 / raw.get("logits_scaling", 1.0))


def _read_smollm3(raw: dict) -> dict:
    every, layers = raw.get("no_rope_layer_interval", 4), raw["num_hidden_layers"]
    _agree(raw, {"no_rope_layers": [int((layer + 1) % every != 0) for layer in range(layers)]})
    return dict(nope_every=every)


def _read_mt5(raw: dict) -> dict:
    return _read_t5({"feed_forward_proj": "gated-gelu"} | raw) | dict(head_scale=1.0)


def _read_roberta(raw: dict) -> dict:
    return _read_bert(raw) | dict(max_seq_len=raw[MOST] - 2)  # rows 0 and 1 stand for padding


def _read_switch(raw: dict) -> dict:
    layers = raw["num_layers"]
    _agree(raw, {"num_decoder_layers": layers})
    sparse = [raw.get(f"num_sparse_{side}_layers", 3) for side in ("encoder", "decoder")]
    every = layers // sparse[0] if sparse[0] else 0
    if every not in (1, 2) or sparse[0] != sparse[1]:
        raise CheckpointError(
            f"num_sparse_encoder_layers, num_sparse_decoder_layers = {sparse} of {layers} layers; only all layers or "
            "every second one, on both sides alike, can have experts"
        )
    activation = _activation(raw.get("dense_act_fn", "relu"), PLAIN)
    tied = raw.get("tie_word_embeddings", True)
    scale = raw["d_model"] ** -0.5 if tied else 1.0
    return dict(expert_every=every, activation=activation, tied=tied, head_scale=scale, d_expert=raw["d_ff"])


def _write_switch(config: ModelConfig) -> dict:
    sparse = config.n_layers // config.expert_every
    raw = dict(num_sparse_encoder_layers=sparse, num_sparse_decoder_layers=sparse, num_decoder_layers=config.n_layers)
    raw |= dict(dense_act_fn=config.activation, tie_word_embeddings=config.head_scale != 1.0, is_encoder_decoder=True)
    return raw | dict(decoder_start_token_id=0)


READ = {
    "mamba": _read_mamba,
    "openai-gpt": lambda raw: {"activation": _activation(raw.get("afn", "gelu"), GPT1)},
    "opt": _read_opt,
    "falcon": _read_falcon,
    "bert": _read_bert,
    "ernie": _read_bert,
    "t5": _read_t5,
    "marian": _read_sides,
    "whisper": _read_sides,
    "mixtral": _read_mixtral,
    "granite": _read_granite,
    "smollm3": _read_smollm3,
    "mt5": _read_mt5,
    "roberta": _read_roberta,
    "deepseek_v2": _read_deepseek,
    "deepseek_v3": _read_deepseek,
    "switch_transformers": _read_switch,
}
WRITE = {
    "mistral": lambda config: {"sliding_window": config.sliding_window or None},
    "smollm3": lambda config: {"pad_token_id": None},
    "granite": lambda config: {"logits_scaling": 1 / config.head_scale},
    "phi3": lambda config: {"sliding_window": config.sliding_window or None, "pad_token_id": None},
    "mt5": _write_t5,
    "roberta": lambda config: _write_bert(config) | {MOST: config.max_seq_len + 2},
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
