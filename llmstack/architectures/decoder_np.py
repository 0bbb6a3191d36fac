"""The decoder as a program of NumPy operations: what decoder.py computes, with nothing between it and the formulas.

`forward` takes a model's weights as arrays under the names of its parameters and gives the same logits. It reads from
top to bottom as the model is drawn: embed, L times attend and feed forward, norm, head.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from llmstack.config import ConfigError, ModelConfig
from llmstack.ops.activations import ACTIVATIONS_NP
from llmstack.ops.attention import attention_np
from llmstack.ops.embedding import embedding_np
from llmstack.ops.glu import GATES, glu_np
from llmstack.ops.layernorm import layernorm_np
from llmstack.ops.linear import linear_np
from llmstack.ops.positions import alibi_slopes_np
from llmstack.ops.rmsnorm import rmsnorm_np
from llmstack.ops.rope import rope_amplitude, rope_frequencies, rope_np

Weights = dict[str, np.ndarray]


def weights_of(model: nn.Module) -> Weights:
    """A decoder's parameters as arrays that share its memory, by name; tied ones under both names."""
    return {name: p.detach().numpy() for name, p in model.named_parameters(remove_duplicate=False)}


def forward(ids: np.ndarray, w: Weights, config: ModelConfig, block: int = 128) -> np.ndarray:
    """Logits [B, T, V] of ids [B, T], without padding. `block`: queries that attend at a time.

    Raises ConfigError for what is not written out here.
    """
    other = config.n_experts or config.kv_lora_rank or config.d_state or config.d_embedding != config.d_model
    branch = config.qk_norm != "none" or config.residual_scale != 1.0 or config.norm_place in ("none", "branch")
    other = other or branch or config.nope_every or config.norm == "deepnorm" or config.positions == "sinusoidal"
    if other:
        lacks = "DeepNorm, QK-norm, blocks without norms or with scaled or normed branches, sinusoids, layers without "
        lacks += "RoPE, a narrow embedding, experts, latent attention nor d_state"
        raise ConfigError(f"{config.name}: the NumPy decoder has neither {lacks}")
    x = embedding_np(ids, w["embed.tokens.weight"]) * np.float32(config.embedding_scale)  # [B, T, D]
    positions = np.arange(ids.shape[1])
    if config.positions == "learned":
        x = x + w["embed.positions.weight"][positions + config.position_offset]
    if config.embedding_norm:
        x = _norm(x, w, "embed.norm", config)
    for layer in range(config.n_layers):
        x = _block(x, w, f"blocks.{layer}", layer, config, block)
    if config.final_norm:
        x = _norm(x, w, "norm", config)
    return _linear(x * np.float32(config.head_scale), w, "out.head")  # [B, T, V]


def _block(x: np.ndarray, w: Weights, at: str, layer: int, config: ModelConfig, block: int) -> np.ndarray:
    attend = lambda y: _attention(y, w, f"{at}.attention", layer, config, block)
    feed = lambda y: _ffn(y, w, f"{at}.ffn", config)
    norm1, norm2 = (lambda y, name=name: _norm(y, w, f"{at}.{name}", config) for name in ("norm1", "norm2"))
    if config.parallel:
        n = norm1(x)
        return x + attend(n) + feed(norm2(x) if config.parallel_norms == 2 else n)
    if config.norm_place == "post":
        x = norm1(x + attend(x))
        return norm2(x + feed(x))
    x = x + attend(norm1(x))
    return x + feed(norm2(x))


def _attention(x: np.ndarray, w: Weights, at: str, layer: int, config: ModelConfig, block: int) -> np.ndarray:
    B, T, _ = x.shape
    split = lambda y: y.reshape(B, T, y.shape[-1] // config.d_head, config.d_head).swapaxes(1, 2)  # [B, heads, T, Dh]
    q, k, v = (split(_linear(x, w, f"{at}.{name}")) for name in "qkv")
    if config.positions == "rope":
        rotated, scaling = config.rope_dims or config.d_head, config.rope_scaling
        angle = (
            np.arange(T, dtype=np.float32)[:, None] * rope_frequencies(rotated, config.rope_theta, scaling, T).numpy()
        )
        turn = (rope_amplitude(scaling) * np.cos(angle), rope_amplitude(scaling) * np.sin(angle))  # [T, rotated / 2]
        q, k = (rope_np(y, *turn, config.rope_interleaved) for y in (q, k))
    window = config.sliding_window if config.windowed(layer) else T
    out = np.empty_like(q)  # [B, H, T, Dh]
    for start in range(0, T, block):  # queries start to stop see no key after stop, so none is multiplied
        stop, first = min(start + block, T), max(0, start - window + 1)
        back = np.arange(start, stop)[:, None] - np.arange(first, stop)  # [block, keys]: query minus key
        bias = -alibi_slopes_np(config.n_heads)[:, None, None] * back if config.positions == "alibi" else None
        bias = None if bias is None else bias.astype(x.dtype) * (config.attention_scale if config.alibi_scaled else 1)
        mask, seen = (back >= 0) & (back < window), slice(first, stop)
        out[:, :, start:stop] = attention_np(
            q[:, :, start:stop], k[:, :, seen], v[:, :, seen], mask, bias, config.attention_scale
        )
    return _linear(out.swapaxes(1, 2).reshape(B, T, config.n_heads * config.d_head), w, f"{at}.o")


def _ffn(x: np.ndarray, w: Weights, at: str, config: ModelConfig) -> np.ndarray:
    up = _linear(x, w, f"{at}.up")  # [B, T, F]
    if config.gated:
        return _linear(glu_np(_linear(x, w, f"{at}.gate"), up, GATES[config.activation]), w, f"{at}.down")
    return _linear(ACTIVATIONS_NP[config.activation](up), w, f"{at}.down")


def _norm(x: np.ndarray, w: Weights, at: str, config: ModelConfig) -> np.ndarray:
    if config.norm == "rmsnorm":
        return rmsnorm_np(x, w[f"{at}.weight"], config.norm_eps)
    return layernorm_np(x, w[f"{at}.weight"], w.get(f"{at}.bias"), config.norm_eps)


def _linear(x: np.ndarray, w: Weights, at: str) -> np.ndarray:
    return linear_np(x, w[f"{at}.weight"], w.get(f"{at}.bias"))
