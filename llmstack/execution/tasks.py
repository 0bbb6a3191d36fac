"""What language models are asked to do, as small tasks: made by rule or cut from real text, each with its metric.

    translation   verses into a cipher             encoder-decoder   letters right     bar: copy; letter by letter
    summary       verses without function words    encoder-decoder   words shared, F1  bar: as many first words
    sentiment     reviews with "not" and "but"     encoder           right label       bar: majority; counting words
    extraction    where is Ruth?                    encoder           right span        bar: a random place
    generation    verses, letter by letter         decoder           nats a letter     bar: n-grams
    addition      with and without written steps   decoder           right sum         bar: one in 10^digits
    shots         a mapping given by examples      decoder           right value       bar: one in 8

`encoded` makes an Example ready for `data.padded`, LOSSES has each family's loss, `answers` what a model says, METRICS
how good that is. The families' natural tasks: Radford et al. 2018 (GPT-1), Devlin et al. 2018 (arXiv:1810.04805,
fig. 4: one vector for a label, a start and an end for a span), Raffel et al. 2019 (arXiv:1910.10683). Written steps:
Nye et al. 2021 (scratchpads, arXiv:2112.00114), Wei et al. 2022 (chain of thought, arXiv:2201.11903). Shots: Brown et
al. 2020 (GPT-3, arXiv:2005.14165).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmstack import facts
from llmstack.architectures.encoder import Encoder
from llmstack.execution import corpus
from llmstack.execution.data import IGNORE, Batch, collate
from llmstack.execution.generation import generate
from llmstack.execution.objectives import next_token, pair, text_to_text
from llmstack.ops.cross_entropy import cross_entropy_torch

START, END = 1, 2
LABELS = ("bad", "good")
KEYS, VALUES = "abcdefgh", "qrstuvwx"
SMALL = "abcdefghijklmnopqrstuvwxyz "
OF = facts.table("tasks/words")


class Example(NamedTuple):
    source: str
    target: str  # what is to be answered; for the encoder a label or a span of the source


class Alphabet:
    """The symbols of a task and their ids, after padding, start and end. `cut` makes symbols of a text: list, or
    str.split."""

    def __init__(self, texts: Sequence[str], cut: Callable[[str], list[str]] = list):
        self.cut, self.joint = cut, "" if cut is list else " "
        self.symbols = ["", "", "", *sorted({s for text in texts for s in cut(text)})]
        self.ids = {s: i for i, s in enumerate(self.symbols) if s}

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        """Raises ValueError on a symbol that the alphabet lacks."""
        if unknown := sorted(set(self.cut(text)) - set(self.ids)):
            raise ValueError(f"{text!r} has {unknown}, which is not among the {len(self.ids)} symbols of this task")
        return [self.ids[s] for s in self.cut(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.joint.join(self.symbols[i] for i in ids if i > END)


# --- examples


def verses(words: int, held_out: bool = False) -> list[str]:
    """The first words of the Bible's verses, small letters and blanks only, from one side of the corpus' split."""
    sides = {name: corpus.Document("bible", name, name, "").held_out for name, _ in corpus.verses()}
    plain = lambda text: " ".join("".join(c for c in text.lower() if c in SMALL).split()[:words])
    return [plain(text) for name, text in corpus.verses() if sides[name] == held_out]


def cipher(text: str) -> Example:
    """Every word backwards, every letter the 13th after it."""
    turn = lambda c: chr((ord(c) - 84) % 26 + 97)
    return Example(text, " ".join("".join(map(turn, reversed(w))) for w in text.split()))


def summary(text: str) -> Example:
    left_out = set(OF["function"].split())
    return Example(text, " ".join(w for w in text.split() if w not in left_out))


def review(rng: Random) -> Example:
    """Two clauses: "but" gives the second one the last word, "and" joins two of a kind; "not" turns a word round."""

    def clause(good: bool) -> str:
        turned = rng.random() < 0.5
        word = rng.choice(OF["good" if good != turned else "bad"])
        return f"the {rng.choice(OF['things'])} was {'not ' * turned}{word}"

    good, but = rng.random() < 0.5, rng.random() < 0.5
    return Example(f"{clause(good != but)} {'but' if but else 'and'} {clause(good)}", "good" if good else "bad")


def passage(rng: Random) -> Example:
    """A question and two to five sentences, of which one answers it."""
    places = [f"the {a} {n}" for a in OF["places"] for n in OF["at"]] + [f"the {n}" for n in OF["at"]]
    n = rng.randint(2, 5)
    told = list(zip(rng.sample(OF["names"], n), rng.sample(places, n)))
    name, place = rng.choice(told)
    return Example(f"where is {name} ? " + " ".join(f"{n} is at {p} ." for n, p in told), place)


def addition(rng: Random, digits: int = 4, steps: bool = True) -> Example:
    """ "0347+0589!" asks for the steps, column by column from the right, then the sum; with "?" for the sum alone."""
    a, b = (f"{rng.randrange(10**digits):0{digits}d}" for _ in "ab")
    written, carry = [], 0
    for x, y in zip(reversed(a), reversed(b)):
        written.append(f"{x}+{y}+{carry}={int(x) + int(y) + carry:02d}")
        carry = (int(x) + int(y) + carry) // 10
    total = f"{int(a) + int(b):0{digits + 1}d}"
    return Example(f"{a}+{b}{'!' if steps else '?'}", " ".join([*written, total]) if steps else total)


def shots(rng: Random, n: int = 16, new: bool = False) -> Example:
    """n pairs "aq" of key and value under a mapping of its own; `new`: one of the quarter that training never sees."""
    while True:
        mapping = [rng.randrange(len(VALUES)) for _ in KEYS]
        if (sum(mapping) % 4 == 0) == new:
            break
    keys = [rng.randrange(len(KEYS)) for _ in range(n)]
    return Example("", "".join(KEYS[k] + VALUES[mapping[k]] for k in keys))


# --- from examples to batches, and from a model to answers


class Reader(nn.Module):
    """An encoder with two numbers a token: at the first one the scores of two labels, otherwise start and end."""

    def __init__(self, config, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.config, self.encoder, self.head = config, Encoder(config, seed), nn.Linear(config.d_model, 2)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        """ids [B, T] -> [B, T, 2]; minus infinity at padding."""
        scores = self.head(self.encoder(ids, padding))
        return scores if padding is None else scores.masked_fill(~padding[..., None], -torch.inf)


def read_loss(model: Reader, batch: Batch) -> tuple[Tensor, int]:
    """Of labels, targets [B, T] that stand at the first token; or of spans [B, 2], a choice of one token in T each."""
    scores = model(batch["ids"], batch["padding"])  # [B, T, 2]
    if "span" in batch:
        scores, targets = scores.transpose(1, 2), batch["span"]  # [B, 2, T], [B, 2]
    else:
        scores, targets = scores[:, 0], batch["targets"][:, 0]  # [B, 2], [B]
    return cross_entropy_torch(scores, targets, IGNORE, "sum"), targets.numel()


LOSSES = {"decoder": next_token, "encoder-decoder": text_to_text, "encoder": read_loss}


def encoded(example: Example, alphabet: Alphabet, family: str) -> dict[str, list[int]]:
    """For `data.padded`; a decoder's loss is that of the target alone."""
    source, target = alphabet.encode(example.source), example.target
    if family == "encoder":
        ids = [START, *source]
        if target in LABELS:
            return {"ids": ids, "targets": [LABELS.index(target), *[IGNORE] * len(source)]}
        span, n = alphabet.encode(target), len(target.split())
        if (first := next((i for i in range(len(ids)) if ids[i : i + n] == span), None)) is None:
            raise ValueError(f"{target!r} is no span of {example.source!r}; an encoder points at one, or gives a label")
        return {"ids": ids, "targets": [IGNORE] * len(ids), "span": [first, first + n - 1]}
    ends = alphabet.encode(target)
    if family == "encoder-decoder":
        return pair(source, ends, START, END)
    return {"ids": [START, *source, *ends], "targets": [*[IGNORE] * len(source), *ends, END]}


@torch.no_grad()
def answers(model: nn.Module, alphabet: Alphabet, sources: Sequence[str], most: int = 64, kind: str = "") -> list[str]:
    """What the model says to each source: the likeliest tokens, the better label, or (kind "span") the best span.

    A decoder's sources are of one length.
    """
    rows = [[START, *alphabet.encode(s)] for s in sources]
    family = model.config.kind
    if family == "encoder":
        batch = collate([{"ids": r} for r in rows])
        scores = model(batch["ids"], batch["padding"])  # [B, T, 2]
        if kind != "span":
            return [LABELS[i] for i in scores[:, 0].argmax(-1).tolist()]
        first, last = scores.softmax(1).unbind(-1)  # [B, T]
        spans = (first[:, :, None] * last[:, None]).triu().flatten(1).argmax(-1)  # no end before its start
        ends = [divmod(at, scores.shape[1]) for at in spans.tolist()]
        return [alphabet.decode(r[a : b + 1]) for r, (a, b) in zip(rows, ends)]
    if family == "encoder-decoder":
        batch = collate([{"source": [*r[1:], END]} for r in rows])
        out = generate(model, torch.full((len(rows), 1), START), most, END, **batch)
        return [alphabet.decode(row) for row in out.tolist()]
    out = generate(model, torch.tensor(rows), most, END)
    return [alphabet.decode(row[len(rows[0]) :]) for row in out.tolist()]


def exact(got: str, want: str) -> float:
    return float(got == want)


def letters(got: str, want: str) -> float:
    """The share of letters in the right place."""
    return sum(g == w for g, w in zip(got, want)) / max(len(got), len(want), 1)


def shared(got: str, want: str) -> float:
    """F1 of the words in common, ROUGE-1's (Lin 2004)."""
    got, want = Counter(got.split()), Counter(want.split())
    return 2 * (got & want).total() / max(got.total() + want.total(), 1)


METRICS = {"translation": letters, "summary": shared, "sentiment": exact, "extraction": exact, "addition": exact}


def mean_score(task: str, got: Sequence[str], examples: Sequence[Example]) -> float:
    return sum(METRICS[task](g, e.target) for g, e in zip(got, examples, strict=True)) / len(examples)
