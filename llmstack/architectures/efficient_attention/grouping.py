"""Shared keys and values: from a checkpoint with a head each to one with groups, and what either keeps for a token."""

from __future__ import annotations

import torch

from llmstack.architectures.checkpoints import build
from llmstack.architectures.decoder import Decoder
from llmstack.config import ModelConfig


def to_groups(model: Decoder, n_kv_heads: int) -> Decoder:
    """The same model with fewer key-value heads, each the mean of those it replaces (Ainslie et al. 2023,
    arXiv:2305.13245, section 2.1; a little more training then makes up for it). n_kv_heads = 1 is MQA.

    Raises ValueError where the model's key-value heads do not divide by n_kv_heads.
    """
    config = model.config
    if config.kv_lora_rank or config.d_state:
        raise ValueError(f"{config.name} has no key-value heads to pool: latent attention or state spaces")
    if n_kv_heads < 1 or config.n_kv_heads % n_kv_heads:
        raise ValueError(f"n_kv_heads = {n_kv_heads} does not divide the {config.n_kv_heads} of {config.name}")
    weight = next(model.parameters())
    grouped = build(config.with_(n_kv_heads=n_kv_heads), device=weight.device, dtype=weight.dtype)
    shape = (n_kv_heads, config.n_kv_heads // n_kv_heads, config.d_head)
    pooled = lambda w: w.unflatten(0, shape).mean(1).flatten(0, 1)  # [K Dh, D] or [K Dh]
    shared = lambda name: ".attention." in name and name.split(".")[-2] in ("k", "v")
    state = {name: pooled(w) if shared(name) else w for name, w in model.state_dict().items()}
    with torch.no_grad():
        grouped.load_state_dict(state)
    return grouped.train(model.training)


def kv_values(config: ModelConfig) -> int:
    """Values that a cache keeps for one token in all layers: 2 K Dh each, or with latent attention (DeepSeek-V2,
    arXiv:2405.04434, section 2.1) one latent and one rotated key; a state space keeps none."""
    if config.d_state:
        return 0
    if config.kv_lora_rank:
        return config.n_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    return config.n_layers * 2 * config.n_kv_heads * config.d_head
