"""How many parameters a model has, in closed form from its dials.

D, F, V, L, H, K, Dh as in `config`; A = H·Dh and G = K·Dh are the widths of the queries and of the keys or values.
Biases add the width of their output.

    embedding    V·De, token types, and 2·De·D where the embedding is narrower than the model (De = d_embedding)
    positions    learned: (T + offset)·D          relative: buckets·H, once a stack          otherwise nothing
    attention    D·A + 2·D·G + A·D     latent: D·q + q·A' (or D·A'), D·(c + r), c·H·(n + v), H·v·D with A' = H·(n + r)
    ffn          2·D·F, gated 3·D·F
    experts      E·(an FFN of width d_expert) + the shared ones          router  D·E
    mixer        state space, I = expand·D: 2·D·I + I·(conv + 1) + I·(R + 2N) + (R + 1)·I + I·N + I + I·D
    norms        D each, LayerNorm 2·D; latent attention normalises both of its compressed widths
    head         V·D unless tied, and V for a bias; for masked tokens D² + 3·D more, for the next sentence 2·D + 2
    pooler       D² + D
    front_end    two convolutions of width 3: 3·M·D + D and 3·D·D + D (M mel channels)

`total` is what a checkpoint trains, once, however often it is used (a tied head is part of the embedding), and
Whisper's stored sinusoids: what transformers counts. Buffers are left out; DeepSeek-V3's routing correction, one number
for each expert of 58 layers, is one: with it there are 671,026,419,200 instead of 671,026,404,352.

`active` is what one token reads: everything, the whole embedding and head and that correction included, with top_k of
the E routed experts and all the shared ones. Papers that leave the embedding out print less (DeepSeek-V3: 36.6 billion
instead of 37.55).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmstack.config import ModelConfig


@dataclass(frozen=True)
class Params:
    """Parameter counts: all, those one token passes, and all again by part."""

    total: int
    active: int
    by_part: dict[str, int] = field(hash=False)


def params(config: ModelConfig) -> Params:
    """Exact counts for any config; every preset equals transformers where transformers has the model."""
    c = config
    two_sided = c.kind == "encoder-decoder"
    crossed = c.n_decoder_layers * two_sided
    layers = c.n_layers + crossed
    routed = sum(c.has_experts(layer) for layer in [*range(c.n_layers), *range(crossed)])
    expert = ffn_params(c, c.d_expert)

    part = {"embedding": _embedding(c), "positions": _positions(c)}
    if c.d_state:
        part["mixer"] = layers * _mixer(c)
    else:
        part["attention"] = (layers + crossed) * attention_params(c)
        part["ffn"] = (layers - routed) * ffn_params(c, c.d_ff)
    if c.n_experts:
        part["experts"] = routed * (c.n_experts + c.n_shared_experts) * expert
        part["router"] = routed * c.d_model * c.n_experts
    part["norms"] = _norms(c)
    part["head"] = _head(c)
    if c.pooler:
        part["pooler"] = c.d_model**2 + c.d_model
    if c.n_mels:
        part["front_end"] = 3 * (c.n_mels + c.d_model) * c.d_model + 2 * c.d_model
    total = sum(part.values())
    idle = routed * (c.n_experts - c.top_k) * expert
    return Params(total, total - idle + c.router_bias * routed * c.n_experts, part)


def attention_params(c: ModelConfig) -> int:
    """One attention: the projections of q, k, v and the output."""
    if c.kv_lora_rank:
        q_out = c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        q = c.q_lora_rank * (c.d_model + q_out) if c.q_lora_rank else c.d_model * q_out
        down = c.d_model * (c.kv_lora_rank + c.qk_rope_head_dim)
        up = c.kv_lora_rank * c.n_heads * (c.qk_nope_head_dim + c.v_head_dim)
        return q + down + up + c.n_heads * c.v_head_dim * c.d_model
    a, g = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    biases = c.qkv_bias * (a + g + c.k_bias * g) + c.out_bias * c.d_model
    return 2 * c.d_model * (a + g) + biases


def ffn_params(c: ModelConfig, width: int) -> int:
    """One feed-forward of that inner width: up and down, and a gate where the activation is gated."""
    ups = 2 if c.gated else 1
    return (ups + 1) * c.d_model * width + c.ffn_bias * (ups * width + c.d_model)


def _embedding(c: ModelConfig) -> int:
    projections = 2 * c.d_embedding * c.d_model if c.d_embedding != c.d_model else 0
    return c.vocab_size * c.d_embedding + (c.token_types + c.task_types) * c.d_model + projections


def _head(c: ModelConfig) -> int:
    words = c.vocab_size * c.d_embedding * (not c.tied)
    if c.kind != "encoder":
        return words + c.head_bias * c.vocab_size
    transform = c.d_model**2 + 3 * c.d_model  # a dense layer and a LayerNorm
    return c.mlm * (words + transform + c.vocab_size + c.pooler * (2 * c.d_model + 2))


def _positions(c: ModelConfig) -> int:
    if c.positions == "relative":
        return (1 + (c.kind == "encoder-decoder")) * c.relative_buckets * c.n_heads
    rows = c.max_seq_len + c.position_offset + (c.max_source_len if c.n_mels else 0)
    return rows * c.d_model if c.positions == "learned" else 0


def _mixer(c: ModelConfig) -> int:
    inner = c.expand * c.d_model
    convolution = inner * (c.d_conv + 1)
    selection = inner * (c.dt_rank + 2 * c.d_state) + (c.dt_rank + 1) * inner
    return 3 * c.d_model * inner + convolution + selection + inner * c.d_state + inner


def _norms(c: ModelConfig) -> int:
    bias = 1 + c.norm_bias
    per_block = 1 if c.d_state else c.parallel_norms if c.parallel else 2
    blocks = c.n_layers * per_block
    if c.kind == "encoder-decoder":
        blocks += c.n_decoder_layers * (per_block + 1)
    if c.norm_place == "none":
        blocks = 0
    ends = c.embedding_norm + c.final_norm * (1 + (c.kind == "encoder-decoder"))
    within = c.n_layers * (c.q_lora_rank + c.kv_lora_rank)
    heads = {"none": 0, "head": 2, "whole": c.n_heads + c.n_kv_heads}[c.qk_norm]
    within += (c.n_layers + c.n_decoder_layers * (c.kind == "encoder-decoder")) * heads * c.d_head * bias
    return (blocks + ends) * c.d_model * bias + within
