"""Where batches come from: pure functions of the step, so the step is all that a resumed run needs to know of its data.

A batch is a dict of tensors [B, T]:

    ids        what the model reads
    targets    what each position is to predict, already shifted; -100: no loss
    padding    True at real tokens, where rows have different lengths
    documents  of a packed row: the number of each token's document, -1 at padding
    positions  of a packed row: they start again with each document

`windows` cuts one long stream, `packed` puts several documents into a row, `padded` fills each row up to the longest of
its batch. Each goes through what it has in a fresh order every epoch, an order that (seed, epoch) alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Integral

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Batch = dict[str, Tensor]
Data = Callable[[int], Batch]
Example = Mapping[str, Sequence[int]] | Sequence[int]  # as `padded` describes it
IGNORE = -100
FILL = {"targets": IGNORE, "documents": -1, "positions": 0}  # where a row is shorter than its batch
TOO_LONG = ("raise", "split", "truncate")


def windows(
    stream: Sequence[int] | np.ndarray | Tensor, length: int, batch: int, seed: int = 0, offsets: str = "side by side"
) -> Data:
    """Batches of windows of `length` tokens from one stream [N]; the next token after a window is its last target.

    offsets: "side by side", each window once an epoch, or "random", where a window may begin at any token. A memory map
    stays one: only the windows of a batch are read and made int64. Raises ValueError on a stream that is not flat or
    does not fill one window.
    """
    whole(length=length)
    if offsets not in ("side by side", "random"):
        raise ValueError(f"offsets = {offsets!r}, but it must be 'side by side' or 'random'")
    if not isinstance(stream, np.ndarray):
        stream = torch.as_tensor(stream, dtype=torch.long).numpy()
    if stream.ndim != 1 or stream.dtype.kind not in "iu":
        given = f"{stream.dtype} {list(stream.shape)}"
        raise ValueError(f"the stream is one row of token ids [N], got {given}; .reshape(-1) joins the rows of several")
    n = (len(stream) - 1) // length
    if n < 1:
        raise ValueError(f"{len(stream)} tokens fill no window of {length} and a next one: is the corpus empty?")
    order = _order(n, batch, seed)

    def starts(step: int) -> list[int]:
        if offsets == "random":
            return np.random.default_rng([seed, step]).integers(0, len(stream) - length, batch).tolist()
        return [int(i) * length for i in order(step)]

    def data(step: int) -> Batch:
        rows = np.stack([stream[at : at + length + 1] for at in starts(step)]).astype(np.int64)
        rows = torch.from_numpy(rows)  # [batch, length + 1]
        return {"ids": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}

    return data


def packed(documents: Sequence[Example], length: int, batch: int, seed=0, pad=0, too_long: str = "raise") -> Data:
    """Batches of rows that hold several documents one after the other, each unseen by the others (`objectives.seen`).

    A document is as `padded` takes it. One of n tokens takes n - 1 places, since its last token is only a target; one
    of a single token has nothing to predict and is left out. Documents go first-fit, in the order given. Those that
    need more than `length` places: too_long "raise", "split" (the token between two parts is the first's last target
    and the second's first input) or "truncate". Raises ValueError on those, and where no document is left.
    """
    whole(length=length)
    if too_long not in TOO_LONG:
        raise ValueError(f"too_long = {too_long!r}, but it must be one of {', '.join(TOO_LONG)}")
    parts = []
    for i, example in enumerate(_examples(documents)):
        if (n := len(example["ids"])) > length and too_long == "raise":
            fix = "too_long='split' or 'truncate' takes it, or a longer length"
            raise ValueError(f"document {i} has {n + 1} tokens, but a row takes {length} and a next one; {fix}")
        stop = n if too_long == "split" else min(n, length)
        parts += [{key: x[at : at + length] for key, x in example.items()} for at in range(0, stop, length)]
    if not parts:
        raise ValueError(f"{len(documents)} documents, none with two tokens or more: is the corpus empty?")
    rows = [_row([parts[i] for i in row]) for row in first_fit([len(p["ids"]) for p in parts], length)]
    order = _order(len(rows), batch, seed)
    return lambda step: collate([rows[i] for i in order(step).tolist()], pad, length)


def _row(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    row, lengths = {key: torch.cat([p[key] for p in parts]) for key in parts[0]}, [len(p["ids"]) for p in parts]
    row["documents"] = torch.arange(len(parts)).repeat_interleave(torch.tensor(lengths))
    return row | {"positions": torch.cat([torch.arange(n) for n in lengths])}


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices: each item goes into the first row that has room for it, or opens one."""
    rows, room = [[] for _ in lengths], np.full(len(lengths), capacity)
    for i, n in enumerate(lengths):
        row = int(np.argmax(room >= n))
        rows[row].append(i)
        room[row] -= n
    return [row for row in rows if row]


def padded(examples: Sequence[Example], batch: int, seed: int = 0, pad: int = 0) -> Data:
    """Batches of examples, each filled up to the longest of the batch: targets with -100, all else with `pad`.

    An example is a sequence of tokens, of which each predicts the next, or a mapping with `ids` and `targets` of one
    length, and whatever else the loss reads. `padding` goes with ids, `source_padding` with a `source`.
    """
    if not len(examples):
        raise ValueError("there are no examples: is the corpus empty?")
    examples = _examples(examples, 1)
    order = _order(len(examples), batch, seed)
    return lambda step: collate([examples[i] for i in order(step).tolist()], pad)


def _examples(given: Sequence[Example], least: int = 0) -> list[dict[str, Tensor]]:
    """As mappings. Raises ValueError on too few ids, another number of targets, and other keys than the first's."""
    pairs = [e if isinstance(e, Mapping) else {"ids": e[:-1], "targets": e[1:]} for e in given]
    for i, e in enumerate(pairs):
        if e.keys() != pairs[0].keys():
            raise ValueError(f"example {i} has {', '.join(e)}, but example 0 {', '.join(pairs[0])}: all have the same")
        if (m := len(e.get("targets", ()))) != (n := len(e["ids"])) or n < least:
            raise ValueError(f"example {i} has {n} ids and {m} targets, but each id has one (-100: no loss)")
    return [{key: torch.as_tensor(x, dtype=torch.long) for key, x in e.items()} for e in pairs]


def collate(examples: Sequence[Mapping[str, Sequence[int]]], pad: int = 0, length: int = 0) -> Batch:
    """One batch of examples that are mappings, as `padded` makes it; of `length` places at least."""
    out: Batch = {}
    for key in examples[0]:
        rows, value = [torch.as_tensor(e[key], dtype=torch.long) for e in examples], FILL.get(key, pad)
        table = pad_sequence(rows, batch_first=True, padding_value=value)
        out[key] = F.pad(table, (0, max(0, length - table.shape[1])), value=value)
        if key in ("ids", "source"):
            lengths = torch.tensor([len(r) for r in rows])[:, None]
            out["padding" if key == "ids" else "source_padding"] = torch.arange(out[key].shape[1]) < lengths
    return out


def fill(batch: Batch) -> float:
    """The share of a batch's places that hold a token."""
    return batch["padding"].float().mean().item() if "padding" in batch else 1.0


def whole(least: int = 1, **given: int) -> None:
    """Raises ValueError on what is no whole number, or less than `least`."""
    for name, value in given.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} = {value!r}, but it must be a whole number, {least} or more")


def _order(n: int, batch: int, seed: int) -> Callable[[int], Tensor]:
    """step -> the numbers [batch] of what it takes of n things: permutations, one for each epoch, laid end to end."""
    whole(batch=batch)
    permutation = lru_cache(maxsize=4)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(n))
    return lambda step: torch.tensor([permutation(k // n)[k % n] for k in range(step * batch, (step + 1) * batch)])
