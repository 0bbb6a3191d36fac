"""What a model is trained to predict. A loss takes (model, batch) and gives summed nats and the number of targets.

    next_token      decoder            each token from those before it
    masked_token    encoder            hidden tokens from all that is left         arXiv:1810.04805, section 3.1
    text_to_text    encoder-decoder    a target text from a source text            arXiv:1910.10683, section 3.1.4

A sum and a count, not a mean: sums add up over batches with unequal counts, so that any split of a batch gives the same
gradient. `masking` and `corrupting` make the last two's batches from any source of ids, by (seed, step) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmstack.architectures.encoder import span_masking
from llmstack.execution.data import IGNORE, Batch, Data, collate
from llmstack.ops.cross_entropy import cross_entropy_torch


def next_token(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """A decoder's loss on ids and targets [B, T]; of packed rows, no document sees another."""
    if "documents" in batch and getattr(config := getattr(model, "config", None), "d_state", 0):
        raise ValueError(f"{config.name} carries a state over a row's documents: give it batches of windows or padded")
    return _loss(model(batch["ids"], **seen(batch)), batch["targets"])


def masked_token(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """An encoder's loss at the positions that have a target; only those go through its head."""
    hidden, kept = model(batch["ids"], batch.get("padding")), batch["targets"] != IGNORE  # [B, T, D], [B, T]
    return _loss(model.masked_logits(hidden[kept]), batch["targets"][kept])


def text_to_text(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """An encoder-decoder's loss on `source` [B, S], the decoder's `ids` and `targets` [B, T]; see `pair`."""
    logits = model(batch["source"], batch["ids"], batch.get("source_padding"), batch.get("padding"))  # [B, T, V]
    return _loss(logits, batch["targets"])


def _loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return cross_entropy_torch(logits, targets, IGNORE, "sum"), int((targets != IGNORE).sum())


def seen(batch: Batch) -> dict[str, Any]:
    """What a decoder must be told besides ids: padding, and of packed rows who sees whom and the positions."""
    how: dict[str, Any] = {"padding": batch.get("padding")}
    if "documents" in batch:
        documents = batch["documents"]  # [B, T]; queries [T, 1] and keys [S] are places
        same = lambda query, key: documents[:, query] == documents[:, None, key]  # [B, T, S]
        how |= {"pattern": same, "positions": batch["positions"]}
    return how


def masking(data: Data, mask_id: int, vocab_size: int, rate=0.15, p=1.0, longest=10, never=(), seed=0) -> Data:
    """Batches of `data` with some of their tokens hidden: 80 % become the mask, 10 % random ones, 10 % stay.

    p = 1 hides single tokens, as BERT. Below, runs of geometric length, none above `longest` (SpanBERT,
    arXiv:1907.10529, section 3.1: p = 0.2 and 10, so 3.8 on average). Padding and the ids in `never` are not hidden.
    """

    def masked(step: int) -> Batch:
        batch, rng = data(step), np.random.default_rng([seed, step])
        ids, runs = batch["ids"], []
        may = ~torch.isin(ids, torch.tensor(never, dtype=ids.dtype))  # [B, T]
        for row in (may & batch.get("padding", may)).tolist():
            # a geometric draw forgets: modulo, it is one that was drawn again until it was short enough
            ends = np.cumsum((rng.geometric(p, len(row)) - 1) % longest + 1)
            cuts = [0, *ends[ends < len(row)].tolist(), len(row)]
            runs.append([(a, b) for a, b in zip(cuts, cuts[1:]) if all(row[a:b])])
        hidden, targets = span_masking(ids, runs, mask_id, vocab_size, rate, int(rng.integers(2**62)), IGNORE)
        return batch | {"ids": hidden, "targets": targets}

    return masked


def corrupting(data: Data, sentinel: int, start=0, eos=1, rate=0.15, mean=3.0, seed=0) -> Data:
    """Batches for text_to_text: what spans are cut out of the source, the target tells (`span_corruption`)."""

    def corrupted(step: int) -> Batch:
        batch, rng = data(step), np.random.default_rng([seed, step])
        real = batch.get("padding", torch.ones_like(batch["ids"], dtype=torch.bool))
        rows = [ids[keep].tolist() for ids, keep in zip(batch["ids"], real.bool())]
        return collate([pair(*span_corruption(row, sentinel, rate, mean, rng), start, eos) for row in rows])

    return corrupted


def span_corruption(ids: Sequence[int], sentinel: int, rate: float, mean: float, rng: np.random.Generator):
    """(source, target): `rate` of the ids, in spans of `mean` on average, leave the source for the target.

    Sentinels count down from `sentinel`; each stands for a span in the source and goes before it in the target. Kept
    and lost spans alternate, kept first, and only their lengths are drawn: both sides are as long in every draw. (The
    paper's figure 2 ends the target with one more sentinel; T5's own code does not, since the end of text follows.)
    """
    if (n := len(ids)) < 2:
        raise ValueError(f"{n} tokens cannot be both kept and lost; span corruption needs two at least")
    lost = min(max(round(n * rate), 1), n - 1)
    spans = min(max(round(lost / mean), 1), lost, n - lost)
    parts = lambda total: np.diff([0, *np.sort(rng.choice(total - 1, spans - 1, replace=False) + 1), total])
    source, target, at = [], [], 0
    for i, (keep, lose) in enumerate(zip(parts(n - lost), parts(lost))):
        source += [*ids[at : at + keep], sentinel - i]
        target += [sentinel - i, *ids[at + keep : at + keep + lose]]
        at += keep + lose
    return source, target


def pair(source: Sequence[int], target: Sequence[int], start: int = 0, eos: int = 1) -> dict[str, list[int]]:
    """An example for `data.padded`: the decoder reads start and the target, and predicts the target and its end."""
    return {"source": [*source, eos], "ids": [start, *target], "targets": [*target, eos]}
