"""The encoder: every token sees every other, so a hidden state stands for a token in its whole sentence.

    ids [B, T] -> embed -> L blocks -> hidden states [B, T, D] -> pooled, masked-token logits, next sentence

One class is BERT (Devlin et al. 2018, arXiv:1810.04805) and ERNIE (Sun et al. 2019, arXiv:1904.09223). What made ERNIE
another model is what it was trained to fill in: `span_masking` hides whole phrases and entities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from llmstack.architectures.ends import Embedding, check_ids, prepare
from llmstack.architectures.layers import Block, Norm, initialise
from llmstack.config import ModelConfig
from llmstack.ops.activations import ACTIVATIONS_TORCH


class MaskedHead(nn.Module):
    """Hidden states [..., D] to logits [..., V] of what a mask hides: dense, activation, norm, token table."""

    def __init__(self, config: ModelConfig, embed: Embedding):
        super().__init__()
        self.act = ACTIVATIONS_TORCH[config.activation]
        self.transform = nn.Linear(config.d_model, config.d_model)
        self.norm = Norm(config)
        self.head = nn.Linear(config.d_model, config.vocab_size)
        if config.tied:
            self.head.weight = embed.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.act(self.transform(x))))


class Encoder(nn.Module):
    """A bidirectional encoder, with the heads that the config asks for (`pooler`, `mlm`)."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = Norm(config) if config.final_norm else None
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler else None
        self.mlm = MaskedHead(config, self.embed) if config.mlm else None
        self.nsp = nn.Linear(config.d_model, 2) if config.mlm and config.pooler else None
        initialise(self, config, seed)

    def forward(
        self,
        ids: Tensor,
        padding: Tensor | None = None,
        token_types: Tensor | None = None,
        task_types: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, D] of ids [B, T]. `padding` is True at real tokens; types default to 0.

        Raises ValueError on ids that are empty, out of range or too long.
        """
        for x in self.states(ids, padding, token_types, task_types):
            last = x
        return last

    def hidden_states(self, ids, padding=None, token_types=None, task_types=None) -> list[Tensor]:
        """The embedding's output and each block's: L + 1 of [B, T, D]."""
        return list(self.states(ids, padding, token_types, task_types))

    def states(self, ids, padding=None, token_types=None, task_types=None) -> Iterator[Tensor]:
        """The hidden states one after the other."""
        check_ids(ids, self.config, table=self.config.max_seq_len if self.config.positions == "learned" else 0)
        now, positions = prepare(self.config, ids, padding, causal=False)
        x = self.embed(ids, positions, token_types, task_types)  # [B, T, D]
        for block in self.blocks:
            yield x
            x = block(x, now)
        yield x if self.norm is None else self.norm(x)

    def pooled(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """tanh(W h + b) of the first real token, [B, D]: BERT's vector for a whole input."""
        first = torch.zeros(len(hidden), dtype=torch.long) if padding is None else padding.int().argmax(-1)
        return torch.tanh(self._head(self.pooler, "pooler")(hidden[torch.arange(len(hidden)), first]))

    def masked_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of the token at each position."""
        return self._head(self.mlm, "mlm")(hidden)

    def next_sentence(self, pooled: Tensor) -> Tensor:
        """Logits [B, 2]: the second segment follows the first, or it was taken from elsewhere."""
        return self._head(self.nsp, "mlm and pooler")(pooled)

    def _head(self, head: nn.Module | None, dials: str) -> nn.Module:
        if head is None:
            raise ValueError(f"{self.config.name} has no such head; build it with {dials} = True in its config")
        return head


def span_masking(
    ids: Tensor,
    spans: Sequence[Sequence[tuple[int, int]]],
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
    seed: int = 0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Hide whole spans: inputs and targets [B, T] for masked-token training. BERT's masking has spans of one token.

    `spans[b]` holds the half-open ranges (start, stop) of row b that may be hidden: words, phrases, entities. They must
    not overlap; what no span covers (padding, [CLS]) is left alone. Spans are drawn until `rate` of the covered tokens
    are hidden, as near as whole spans come. Of the hidden spans 80 % become `mask_id`, 10 % random tokens and 10 % stay
    as they are (arXiv:1810.04805, section 3.1), each span as one. Targets are `ignore_index` outside hidden spans.
    """
    rng = torch.Generator().manual_seed(seed)
    inputs, targets = ids.clone(), torch.full_like(ids, ignore_index)
    if len(spans) != len(ids):
        raise ValueError(f"spans are given for {len(spans)} rows, ids have {len(ids)}")
    for b, row in enumerate(spans):
        ordered = sorted(row)
        if any(not 0 <= start < stop <= ids.shape[1] for start, stop in ordered) or any(
            one[1] > two[0] for one, two in zip(ordered, ordered[1:])
        ):
            raise ValueError(f"spans of row {b} must be ranges within {ids.shape[1]} tokens, none overlapping: {row}")
        left = rate * sum(stop - start for start, stop in row)
        for i in torch.randperm(len(row), generator=rng).tolist():
            start, stop = row[i]
            width = stop - start
            if torch.rand((), generator=rng) * width >= left:  # the one that overshoots: as often as keeps the rate
                break
            left -= width
            targets[b, start:stop] = ids[b, start:stop]
            fate = torch.rand((), generator=rng)
            if fate < 0.8:
                inputs[b, start:stop] = mask_id
            elif fate < 0.9:
                inputs[b, start:stop] = torch.randint(vocab_size, (width,), generator=rng).to(ids)
    return inputs, targets
