"""The models that a GGUF holds, as config.json and tensors under Hugging Face's names: Llama (Mistral too) and Qwen2.

Each key of `general.architecture`'s own group is read, known to change nothing here, or refused by name. What is said
of the file's origin, its licence or its quantisation stands in other groups, and changes no result.

llama.cpp pairs the dimensions of a Llama's head as (0,1)(2,3)…, so the rows of its query and key matrices are
interleaved; they are put back into halves here, as Hugging Face has them. Qwen2 is stored in halves.
Source: the GGUF specification (docs/gguf.md of ggml); llama.cpp's llama-arch.cpp and convert_hf_to_gguf.py.
"""

from __future__ import annotations

from typing import Any

import torch

from llmstack.architectures.gguf import GGUF, GGUFError
from llmstack.ops.rope import interleaved_to_half, rope_frequencies

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BIASED = {"llama": (), "qwen2": ("attn_q", "attn_k", "attn_v")}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
READ = """
context_length embedding_length block_count feed_forward_length attention.head_count attention.head_count_kv
attention.layer_norm_rms_epsilon attention.key_length attention.value_length rope.dimension_count rope.freq_base
rope.scaling.type rope.scaling.factor rope.scale_linear rope.scaling.original_context_length
rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
""".split()
IRRELEVANT = """
vocab_size rope.scaling.finetuned tensor_data_layout attention.layer_norm_epsilon attention.causal
expert_count expert_used_count use_parallel_residual
""".split()  # the embedding's rows are the vocabulary; those in ONLY change nothing as long as they have that value
ONLY = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "use_parallel_residual": False}


def to_hf(file: GGUF) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A model's config.json and fp32 tensors under Hugging Face's names.

    Raises GGUFError, by name, for another architecture, a key or a tensor that has no place here, or one that lacks.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in _CLASSES:
        raise GGUFError(f"{file.path.name} holds the architecture {arch!r}; only {', '.join(_CLASSES)} are mapped")
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise GGUFError(f"{file.path.name} is one of {parts} parts: llama-gguf-split --merge makes one file of them")
    config = _config(file, arch)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name in file.tensors:
        if name == "rope_freqs.weight":
            continue
        stem, _, kind = name.rpartition(".")
        block, _, part = stem.rpartition(".")
        known = kind == "weight" and part in (_LAYER if block else _ENDS)
        if not known and not (kind == "bias" and block and part in _BIASED[arch]):
            raise GGUFError(f"{file.path.name} holds {name}; a model of {arch} here has no place for that")
        array = torch.from_numpy(file.array(name))
        if arch == "llama" and part in heads:
            array = interleaved_to_half(array, heads[part])
        theirs = f"model.layers.{block.removeprefix('blk.')}.{_LAYER[part]}" if block else _ENDS[part]
        tensors[f"{theirs}.{kind}"] = array
    return config, tensors


def _config(file: GGUF, arch: str) -> dict[str, Any]:
    own = {key.removeprefix(f"{arch}."): v for key, v in file.metadata.items() if key.startswith(f"{arch}.")}
    for key, value in own.items():
        if key not in READ and (key not in IRRELEVANT or value != ONLY.get(key, value)):
            raise GGUFError(f"{file.path.name} has {arch}.{key} = {str(value)[:40]}, which no dial here says")

    def get(key: str, default: Any = None) -> Any:
        value = own.get(key, default)
        if value is None:
            raise GGUFError(f"{file.path.name} lacks '{arch}.{key}', which a model of {arch} needs")
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one for each layer, all alike
        if isinstance(value, bool | str | list):
            raise GGUFError(
                f"{file.path.name} has {arch}.{key} = {str(value)[:40]}; only one number for all layers is mapped"
            )
        return value

    heads, width = get("attention.head_count"), get("embedding_length")
    if heads < 1:
        raise GGUFError(f"{file.path.name} has {arch}.attention.head_count = {heads}; it must be 1 or more")
    if "token_embd.weight" not in file.tensors:
        raise GGUFError(f"{file.path.name} lacks token_embd.weight, which a model of {arch} needs")
    head = get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head) != head:
            raise GGUFError(
                f"{file.path.name} has {arch}.{key} = {own[key]}, but only a head's whole width, {head}, is mapped"
            )
    rope = {"rope_theta": float(get("rope.freq_base", 10000.0)), **_scaling(file, own, get, head)}
    return {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "hidden_size": width,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head,
        "intermediate_size": get("feed_forward_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.7g}"),  # stored in fp32: 9.99…e-06
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _scaling(file: GGUF, own: dict[str, Any], get, head: int) -> dict[str, Any]:
    """rope_parameters as Hugging Face writes them, from the keys, or from the divisors in rope_freqs.weight."""
    factor = get("rope.scaling.factor", own.get("rope.scale_linear", 0.0)) or 1.0
    kind = own.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    divisors = file.array("rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None
    if kind not in ("none", "linear", "yarn") or (divisors is not None and kind != "none"):
        with_ = "" if divisors is None else " beside rope_freqs.weight"
        raise GGUFError(
            f"{file.path.name} has rope.scaling.type = {kind!r}{with_}; none, linear and yarn are mapped, alone"
        )
    if divisors is not None:
        if divisors.shape != (head // 2,):
            raise GGUFError(
                f"{file.path.name}: rope_freqs.weight is {list(divisors.shape)}, but a head has {head // 2} pairs"
            )
        return _divided(divisors, float(get("rope.freq_base", 10000.0)), get("context_length"))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    length = get("rope.scaling.original_context_length", get("context_length"))
    speeds = {f"beta_{s}": get(f"rope.scaling.yarn_beta_{s}", d) for s, d in (("fast", 32.0), ("slow", 1.0))}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length, **speeds}


def _divided(divisors, theta: float, length: int) -> dict[str, Any]:
    """Llama 3's scaling where the divisors are those of its formula (low 1, high 4, 8192), else each pair's own."""
    divisors = torch.from_numpy(divisors)
    factor = float(divisors.max())
    plain = rope_frequencies(2 * len(divisors), theta)
    if factor == 1.0 == float(divisors.min()):
        return {"rope_type": "default"}
    llama3 = (factor, 1.0, 4.0, 8192)
    if torch.allclose(plain / divisors, rope_frequencies(2 * len(divisors), theta, llama3), rtol=1e-5, atol=0):
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return {"rope_type": "llama3", **dict(zip(names, llama3))}
    each = dict.fromkeys(("short_factor", "long_factor"), divisors.tolist())
    return {"rope_type": "longrope", "attention_factor": 1.0, "original_max_position_embeddings": length, **each}
