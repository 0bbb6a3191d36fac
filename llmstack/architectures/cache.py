"""What a model asks of a key-value cache, and the simplest cache that answers: one contiguous block for each layer.

A pass with a cache computes T new tokens and lets them attend to the S - T that went before. It calls `advance` once,
then `attend` once in each layer. Sink, prefix and paged caches answer the same calls in their own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from llmstack.config import ModelConfig
from llmstack.ops.attention import attention_torch

Pair = tuple[Tensor, Tensor]


class Cache(Protocol):
    length: int  # key positions that every layer holds, padding included

    def advance(self, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make room for T tokens, real [B, T] (False: padding). Returns their positions [B, T], and of all S keys the
        positions [B, S] and which are real [B, S]."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        """Store the new k, v [B, K, T, Dh] of a layer and return all of them, [B, K, S, Dh]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
        """`update`, then attention of q [B, H, T, Dh] over what is stored; `how` as ops.attention takes it."""

    def memory(self, layer: int, make: Callable[[], Pair]) -> Pair:
        """Keys and values of an encoder's output: made at the first pass, kept for the later ones."""


def positions_of(real: Tensor) -> Tensor:
    """Positions [B, T] of tokens counted from the first real one; padding before it stands at 0."""
    return (real.long().cumsum(-1) - 1).clamp(min=0)


class ContiguousCache:
    """Room for `max_len` tokens of `batch` sequences in every layer, taken when it is made.

    Values: 2 L B K max_len Dh; with latent attention L B max_len (kv_lora_rank + qk_rope_head_dim). Raises ValueError
    when a pass needs more room.
    """

    def __init__(self, config: ModelConfig, batch: int, max_len: int, device=None, dtype=torch.float32):
        if config.kv_lora_rank:  # of latent attention: the latent, and the key for positions
            heads, widths = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
        else:
            heads, widths = config.n_kv_heads, (config.d_head, config.d_head)
        room = lambda width: torch.zeros(
            config.n_decoder_layers, batch, heads, max_len, width, device=device, dtype=dtype
        )
        self.k, self.v = map(room, widths)  # [L, B, K, max_len, Dh]
        self.real = torch.zeros(batch, max_len, dtype=torch.bool, device=device)
        self.memories: dict[int, Pair] = {}
        self.length = 0

    def advance(self, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        start, self.length = self.length, self.length + real.shape[1]
        if real.shape[0] != self.real.shape[0]:
            raise ValueError(f"the cache was made for batch {self.real.shape[0]}, got {real.shape[0]}; make a new one")
        if self.length > self.real.shape[1]:
            short, self.length = self.length, start
            raise ValueError(f"the cache has room for {self.real.shape[1]} tokens, {short} are needed; raise max_len")
        self.real[:, start : self.length] = real
        held = self.real[:, : self.length]
        positions = positions_of(held)
        return positions[:, start:], positions, held

    def update(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        start = self.length - k.shape[2]
        self.k[layer, :, :, start : self.length] = k
        self.v[layer, :, :, start : self.length] = v
        return self.k[layer, :, :, : self.length], self.v[layer, :, :, : self.length]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
        return attention_torch(q, *self.update(layer, k, v), **how)

    def memory(self, layer: int, make: Callable[[], Pair]) -> Pair:
        if layer not in self.memories:
            self.memories[layer] = make()
        return self.memories[layer]
