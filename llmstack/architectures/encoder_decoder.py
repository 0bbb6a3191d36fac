"""The encoder-decoder: an encoder reads the source once, and every layer of a causal decoder attends to what it made.

    source -> embed -> encoder -> memory [B, S, D]
    target [B, T] -> embed -> decoder, with cross-attention over memory -> head -> logits [B, T, V]

One class is the 2017 Transformer (arXiv:1706.03762), T5 (arXiv:1910.10683) and, with `n_mels`, Whisper
(arXiv:2212.04356), whose source is a spectrogram [B, mels, frames].
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from llmstack.architectures.cache import Cache
from llmstack.architectures.ends import Embedding, Head, check_ids, prepare
from llmstack.architectures.layers import Block, Norm, Pass, initialise
from llmstack.config import ModelConfig
from llmstack.ops.activations import gelu_torch
from llmstack.ops.positions import relative_bucket


class Stack(nn.Module):
    """The L blocks of one side, the norm that ends them, and T5's position buckets, which all its layers share."""

    def __init__(self, config: ModelConfig, side: str):
        super().__init__()
        self.config, self.causal = config, side == "decoder"
        layers = range(config.n_decoder_layers if self.causal else config.n_layers)
        self.blocks = nn.ModuleList(Block(config, layer, cross=self.causal, side=side) for layer in layers)
        self.norm = Norm(config) if config.final_norm else None
        relative = config.positions == "relative"
        self.buckets = nn.Embedding(config.relative_buckets, config.n_heads) if relative else None

    def states(self, x: Tensor, now: Pass) -> Iterator[Tensor]:
        """x [B, T, D] and each block's output; the last one after the norm."""
        if self.buckets is not None:
            c = self.config
            bucket = relative_bucket(-now.back, not self.causal, c.relative_buckets, c.relative_max_distance)
            now.bias = self.buckets(bucket).permute(0, 3, 1, 2)  # [B or 1, H, T, S]
        for block in self.blocks:
            yield x
            x = block(x, now)
        yield x if self.norm is None else self.norm(x)


class FrontEnd(nn.Module):
    """Whisper's: two convolutions over time, the second of stride 2, and sinusoidal positions kept as a table."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.conv1 = nn.Conv1d(config.n_mels, config.d_model, 3, padding=1)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, 3, stride=2, padding=1)
        self.positions = nn.Embedding(config.max_source_len, config.d_model).requires_grad_(False)
        half = config.d_model // 2  # from 1 to 1/10000 inclusive: a step more than the 2017 table takes
        rate = torch.exp(torch.arange(half) * -(math.log(10000.0) / max(half - 1, 1)))
        angle = torch.arange(config.max_source_len)[:, None] * rate
        self.positions.weight.data = torch.cat([angle.sin(), angle.cos()], -1)  # [positions, D]

    def forward(self, frames: Tensor) -> Tensor:
        """Log-mel frames [B, mels, frames] -> [B, frames / 2, D]."""
        mels, most = self.conv1.in_channels, 2 * self.positions.num_embeddings
        if frames.ndim != 3 or frames.shape[1] != mels or not 0 < frames.shape[2] <= most:
            allowed = f"[B, {mels}, 1 to {most}]"
            raise ValueError(f"source must be log-mel frames of shape {allowed}, got {list(frames.shape)}")
        x = gelu_torch(self.conv2(gelu_torch(self.conv1(frames)))).transpose(1, 2)  # [B, frames / 2, D]
        return x + self.positions.weight[: x.shape[1]]


class EncoderDecoder(nn.Module):
    """A sequence-to-sequence model. `seed` draws its weights, unless it is built on the meta device."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)  # one table for source, target and, where tied, the logits
        self.frontend = FrontEnd(config) if config.n_mels else None
        self.encoder = Stack(config, "encoder")
        self.decoder = Stack(config, "decoder")
        self.out = Head(config, self.embed)
        initialise(self, config, seed)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V]: at each target position, of the token after it. Paddings are True at real tokens."""
        memory = self.encode(source, source_padding)
        return self.decode(target, memory, source_padding, target_padding=target_padding)

    def encode(self, source: Tensor, padding: Tensor | None = None) -> Tensor:
        """Memory [B, S, D]: the encoder's last state. Source: ids [B, S], or log-mel frames [B, mels, 2 S]."""
        for x in self._encoder_states(source, padding):
            memory = x
        return memory

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        source_padding: Tensor | None = None,
        cache: Cache | None = None,
        target_padding: Tensor | None = None,
        keep: int = 0,
    ) -> Tensor:
        """Logits [B, T, V] of target ids [B, T] given the encoder's memory; of the last `keep` positions if given."""
        for x in self._decoder_states(target, memory, source_padding, cache, target_padding):
            last = x
        return self.out(last[:, -keep:] if keep else last)

    def hidden_states(
        self, source, target, source_padding=None, target_padding=None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """L + 1 states of the encoder [B, S, D] and of the decoder [B, T, D]; each side's last after its norm."""
        encoder = list(self._encoder_states(source, source_padding))
        return encoder, list(self._decoder_states(target, encoder[-1], source_padding, None, target_padding))

    def _encoder_states(self, source: Tensor, padding: Tensor | None) -> Iterator[Tensor]:
        if self.frontend is not None:
            now, x = Pass(), self.frontend(source)
            if padding is not None:
                now.mask = padding.bool()[:, None, None]  # [B, 1, 1, S]
        else:
            check_ids(source, self.config, "source ids", table=self._table())
            now, positions = prepare(self.config, source, padding, causal=False)
            x = self.embed(source, positions)
        return self.encoder.states(x, now)

    def _decoder_states(self, target, memory, source_padding, cache, padding) -> Iterator[Tensor]:
        start = cache.length if cache is not None else 0
        check_ids(target, self.config, "target ids", start=start, table=self._table())
        now, positions = prepare(self.config, target, padding, cache)
        now.memory = memory
        now.memory_mask = None if source_padding is None else source_padding.bool()[:, None, None]  # [B, 1, 1, S]
        return self.decoder.states(self.embed(target, positions), now)

    def _table(self) -> int:
        return self.config.max_seq_len if self.config.positions == "learned" else 0
