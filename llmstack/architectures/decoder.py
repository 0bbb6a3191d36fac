"""The decoder: a token sees itself and what came before it, so one pass gives the next token's logits everywhere.

    ids [B, T] -> embed -> L blocks -> norm -> head -> logits [B, T, V]

One class is GPT-1/2/3, Llama, Qwen2 and 3, PaLM, Mistral, OPT, BLOOM, Falcon, GPT-J, GPT-NeoX, OLMo-2, Granite,
SmolLM3 and Phi-3; `config` says which.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from llmstack.architectures.cache import Cache
from llmstack.architectures.ends import Embedding, Head, check_ids, prepare
from llmstack.architectures.layers import Block, Norm, initialise
from llmstack.config import ModelConfig


class Decoder(nn.Module):
    """A causal language model. `seed` draws its weights, unless it is built on the meta device."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = Norm(config) if config.final_norm else None
        self.out = Head(config, self.embed)
        initialise(self, config, seed)

    def forward(
        self, ids: Tensor, padding: Tensor | None = None, cache: Cache | None = None, keep: int = 0, **how
    ) -> Tensor:
        """Logits [B, T, V] of ids [B, T]; with `keep`, of the last `keep` positions only.

        `padding` [B, T] is True at real tokens, which may stand left or right: positions count real tokens. With a
        cache, ids follow what the cache holds. `pattern` and `positions` (how) as ends.prepare takes them: who may look
        at whom within the past, and other positions. Raises ValueError on ids that are empty, out of range or too long.
        """
        for x in self.states(ids, padding, cache, **how):
            last = x
        return self.out(last[:, -keep:] if keep else last)

    def hidden_states(self, ids: Tensor, padding: Tensor | None = None) -> list[Tensor]:
        """The embedding's output and each block's, L + 1 of [B, T, D]; the last one after the final norm."""
        return list(self.states(ids, padding))

    def states(self, ids: Tensor, padding: Tensor | None = None, cache: Cache | None = None, **how) -> Iterator[Tensor]:
        """The hidden states one after the other, so that a pass holds only the newest."""
        table = self.config.max_seq_len if self.config.positions == "learned" else 0
        check_ids(ids, self.config, start=cache.length if cache is not None else 0, table=table)
        now, positions = prepare(self.config, ids, padding, cache, **how)
        x = self.embed(ids, positions)  # [B, T, D]
        for block in self.blocks:
            yield x
            x = block(x, now)
        yield x if self.norm is None else self.norm(x)
