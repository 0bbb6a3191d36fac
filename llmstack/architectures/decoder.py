"""The decoder: a token sees itself and what came before it, so one pass gives the next token's logits at every position.

    ids [B, T] -> embed -> L blocks -> norm -> head -> logits [B, T, V]

One class is GPT-1/2/3, Llama, Qwen2, PaLM, Mistral, OPT, BLOOM, Falcon, GPT-J and GPT-NeoX; `config` says which.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmstack.architectures.cache import Cache, positions_of
from llmstack.architectures.layers import Block, Norm, Pass, check_ids, initialise
from llmstack.config import ModelConfig
from llmstack.ops.positions import alibi_slopes, sinusoidal
from llmstack.ops.rope import rope_frequencies, rope_tables


class Embedding(nn.Module):
    """Tokens, and where the config says so positions, token types, a norm, a projection. ids [B, T] -> [B, T, D]."""

    def __init__(self, config: ModelConfig, positions: int = 0):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_embedding)
        rows = (positions or config.max_seq_len) + config.position_offset
        self.positions = nn.Embedding(rows, config.d_model) if config.positions == "learned" else None
        self.types = nn.Embedding(config.token_types, config.d_model) if config.token_types else None
        self.tasks = nn.Embedding(config.task_types, config.d_model) if config.task_types else None
        self.norm = Norm(config) if config.embedding_norm else None
        narrow = config.d_embedding != config.d_model
        self.project = nn.Linear(config.d_embedding, config.d_model, bias=False) if narrow else None

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor | None = None, tasks: Tensor | None = None):
        x = self.tokens(ids)  # [B, T, d_embedding]
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.project is not None:
            x = self.project(x)  # [B, T, D]
        if self.positions is not None:
            x = x + self.positions(positions + self.config.position_offset)
        if self.config.positions == "sinusoidal":
            table = sinusoidal(int(positions.max()) + 1, x.shape[-1], interleaved=False)
            x = x + table.to(x)[positions]
        for table, kinds in ((self.types, types), (self.tasks, tasks)):
            if table is not None:
                x = x + table(torch.zeros_like(ids) if kinds is None else kinds)
        return x if self.norm is None else self.norm(x)


class Head(nn.Module):
    """Hidden states [..., D] to logits [..., V]; where tied, with the token table itself."""

    def __init__(self, config: ModelConfig, embed: Embedding):
        super().__init__()
        self.scale = config.head_scale
        narrow = config.d_embedding != config.d_model
        self.project = nn.Linear(config.d_model, config.d_embedding, bias=False) if narrow else None
        self.head = nn.Linear(config.d_embedding, config.vocab_size, bias=config.head_bias)
        if config.tied:
            self.head.weight = embed.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.project is None else self.project(x)
        return self.head(x * self.scale if self.scale != 1.0 else x)


def causal_pass(config: ModelConfig, ids: Tensor, padding: Tensor | None, cache: Cache | None) -> tuple[Pass, Tensor]:
    """Positions [B or 1, T] of the tokens, and what every layer needs to know: masks, biases, rotations."""
    B, T = ids.shape
    if padding is not None and padding.shape != ids.shape:
        raise ValueError(
            f"padding must be shaped as ids, {list(ids.shape)}, True at real tokens; got {list(padding.shape)}"
        )
    padded = padding is not None
    if cache is not None:
        queries, keys, real = cache.advance(padding if padded else torch.ones_like(ids, dtype=torch.bool))
    else:
        queries = keys = positions_of(padding) if padded else torch.arange(T, device=ids.device)[None]
        real = padding if padded else torch.ones_like(keys, dtype=torch.bool)
    now = Pass(cache=cache)
    back = queries[:, :, None] - keys[:, None, :]  # [B or 1, T, S]: how far behind its query a key stands
    if cache is None and not padded:
        now.causal = True
    else:
        now.mask = ((back >= 0) & real[:, None, :])[:, None]  # [B, 1, T, S]
    if config.sliding_window:
        now.band = ((back >= 0) & (back < config.sliding_window) & real[:, None, :])[:, None]
    if config.positions == "alibi":
        slopes = alibi_slopes(config.n_heads).to(ids.device)
        now.bias = -slopes[:, None, None] * back.abs()[:, None]  # [B or 1, H, T, S]
    if config.positions == "rope":
        turns = rope_frequencies(config.rope_dims or config.d_head, config.rope_theta, config.rope_scaling)
        now.rotation = rope_tables(queries, turns.to(ids.device))
    return now, queries


class Decoder(nn.Module):
    """A causal language model. Weights are seeded by `seed`, unless it is built on the meta device."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = Norm(config) if config.final_norm else None
        self.out = Head(config, self.embed)
        if not self.embed.tokens.weight.is_meta:
            initialise(self, config, seed)

    def forward(self, ids: Tensor, padding: Tensor | None = None, cache: Cache | None = None, keep: int = 0) -> Tensor:
        """Logits [B, T, V] of ids [B, T]; with `keep`, of the last `keep` positions only.

        `padding` [B, T] is True at real tokens, which may stand left or right: positions count real tokens. With a
        cache, ids follow what the cache holds. Raises ValueError on ids that are empty, out of range or too long.
        """
        for x in self.states(ids, padding, cache):
            pass
        return self.out(x[:, -keep:] if keep else x)

    def hidden_states(self, ids: Tensor, padding: Tensor | None = None) -> list[Tensor]:
        """The embedding's output and each block's, L + 1 of [B, T, D]; the last one after the final norm."""
        return list(self.states(ids, padding))

    def states(self, ids: Tensor, padding: Tensor | None = None, cache: Cache | None = None):
        table = self.config.max_seq_len if self.config.positions == "learned" else 0
        check_ids(ids, self.config, start=cache.length if cache is not None else 0, table=table)
        now, positions = causal_pass(self.config, ids, padding, cache)
        x = self.embed(ids, positions)  # [B, T, D]
        for block in self.blocks[:-1]:
            yield x
            x = block(x, now)
        yield x
        x = self.blocks[-1](x, now)
        yield x if self.norm is None else self.norm(x)
