"""The two ends of a stack: how ids become vectors and vectors become logits, and what a pass knows about positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmstack.architectures.cache import Cache, positions_of
from llmstack.architectures.layers import Norm, Pass
from llmstack.config import ModelConfig
from llmstack.ops.embedding import check_ids as check_rows
from llmstack.ops.positions import alibi_slopes, sinusoidal
from llmstack.ops.rope import GROWING, rope_amplitude, rope_frequencies, rope_tables


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
            rows = self.config.max_seq_len if positions.is_meta else int(positions.max()) + 1
            table = sinusoidal(rows, x.shape[-1], interleaved=False)
            x = x + table.to(x)[positions]
        for table, kinds, name in ((self.types, types, "token_types"), (self.tasks, tasks, "task_types")):
            if table is not None and kinds is not None:
                check_rows(kinds, table.num_embeddings, name)
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


def prepare(
    config: ModelConfig,
    ids: Tensor,
    padding: Tensor | None = None,
    cache: Cache | None = None,
    causal: bool = True,
    pattern: Callable[[Tensor, Tensor], Tensor] | None = None,
    positions: Tensor | None = None,
) -> tuple[Pass, Tensor]:
    """What every layer of a pass over ids [B, T] needs to know, and the positions [B or 1, T] of the tokens.

    `padding` [B, T] is True at real tokens; positions count those, so a sequence means the same padded left or right.
    `pattern`, a mask of efficient_attention or any predicate over places of queries [T, 1] and keys [S], narrows what
    a token may see. `positions` [T] or [B, T] replace the count; what is causal then follows the places.
    """
    if padding is not None and padding.shape != ids.shape:
        shapes = f"{list(ids.shape)}, True at real tokens; got {list(padding.shape)}"
        raise ValueError(f"padding must be shaped as ids, {shapes}")
    padded = padding is not None
    padding = padding.bool() if padded else torch.ones_like(ids, dtype=torch.bool)
    if cache is not None:
        queries, keys, real = cache.advance(padding)
    else:
        queries = keys = positions_of(padding) if padded else torch.arange(ids.shape[1], device=ids.device)[None]
        real = padding if padded else padding[:1]
    if positions is not None:
        if cache is not None or positions.shape[-1] != ids.shape[1]:
            raise ValueError(f"positions {list(positions.shape)} go with a pass over {ids.shape[1]} tokens, uncached")
        queries = keys = positions.expand(max(1, positions.numel() // ids.shape[1]), -1)
    back = queries[:, :, None] - keys[:, None, :]  # [B or 1, T, S]: how far behind its query a key stands
    now = Pass(cache=cache, back=back, real=padding if padded else None)
    place = torch.arange(real.shape[1], device=ids.device)
    first = real.shape[1] - ids.shape[1]
    order = back >= 0 if positions is None else place[first:, None] >= place
    allowed = real[:, None, :] & order if causal else real[:, None, :]  # [B or 1, T or 1, S]
    if pattern is not None:
        allowed = allowed & pattern(place[first:, None], place)
    if padded or cache is not None or pattern is not None or positions is not None:
        now.mask = allowed[:, None]  # [B or 1, 1, T or 1, S]
    else:
        now.causal = causal
    if config.sliding_window:
        now.band = (allowed & (back < config.sliding_window))[:, None]
    if config.positions == "alibi":
        slopes = alibi_slopes(config.n_heads).to(ids.device) * (config.attention_scale if config.alibi_scaled else 1)
        now.bias = -slopes[:, None, None] * back.abs()[:, None]  # [B or 1, H, T, S]
    if config.positions == "rope":
        rotated = config.qk_rope_head_dim or config.rope_dims or config.d_head
        scaling = config.rope_scaling
        grows = scaling and scaling[0] in GROWING and not queries.is_meta
        turns = rope_frequencies(rotated, config.rope_theta, scaling, int(queries.max()) + 1 if grows else 0)
        now.rotation = rope_tables(queries, turns, rope_amplitude(scaling))
    return now, queries


def check_ids(ids: Tensor, config: ModelConfig, what: str = "ids", start: int = 0, table: int = 0) -> None:
    """Refuse what no lookup could answer. `table` is the number of learned positions, `start` those already used."""
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"{what} must be a tensor of whole numbers [B, T], got {type(ids).__name__}; torch.tensor([ids]) makes one"
        )
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{what} must be whole numbers of shape [B, T], got {ids.dtype} {list(ids.shape)}")
    if ids.shape[1] == 0:
        raise ValueError(f"{what} are empty, shape {list(ids.shape)}: a model needs one token at least, such as BOS")
    if table and start + ids.shape[1] > table:
        raise ValueError(
            f"{what} end at position {start + ids.shape[1]}, but {config.name} has a position table of {table}; "
            "shorten the sequence, or use a model with a longer context"
        )
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():  # elsewhere it would wait
        low, high = ids.min().item(), ids.max().item()
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"{what} hold token {low if low < 0 else high}, but {config.name} has vocab_size = "
                f"{config.vocab_size}: ids run from 0 to {config.vocab_size - 1}; is this the model's own tokenizer?"
            )
