"""What the small checkpoints have learnt: held-out losses beside those of a Kneser-Ney 5-gram, on the same tokens.

    python data/checkpoints/measure.py                 every checkpoint here: writes its card.json, and README.md
    python data/checkpoints/measure.py llama-2m        one

train.py takes the documents, the encoding and the losses from here, so both speak of the same tokens.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from llmstack.architectures import load
from llmstack.architectures.cache import ContiguousCache
from llmstack.execution import corpus
from llmstack.execution.kneser_ney import KneserNey
from llmstack.ops.cross_entropy import cross_entropy_torch

HERE = Path(__file__).resolve().parent
NAMES = ("llama-2m", "gpt2-2m", "relu-2m", "t5-2m")
SPECIAL = [f"<|{name}|>" for name in ("pad", "start", "end", "mask", "system", "user", "assistant", "tool")]
PAD, START, END = range(3)
VOCAB, CONTEXT, STRIDE, ORDER = 2048, 256, 128, 5
VERSE_CHARS = 160  # longest verse of the text-to-text task
SAMPLE = 64  # held-out pairs that a quick check scores


# --- text -> tokens


@cache
def chosen() -> tuple[list[corpus.Document], list[corpus.Document]]:
    """Half of the training documents, by a checksum of their group, and all held-out ones."""
    train, held_out = corpus.split(corpus.documents())
    return [d for d in train if zlib.crc32(f"half/{d.group}".encode()) % 2 == 0], held_out


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Ids of each text and the token that ends it."""
    return [[*e.ids, END] for e in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def strip(text: str) -> str:
    """A verse in lower case and without punctuation; apostrophes inside words stay."""
    return " ".join(re.sub(r"[^\w' ]|(?<!\w)'|'(?!\w)", " ", text.lower()).split())


@cache
def verse_pairs() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(stripped, original) verses of at most VERSE_CHARS characters: those of training and of held-out chapters."""
    held_out = {d.name for d in corpus.bible() if d.held_out}
    sides = ([], [])
    for chapter, verse in corpus.verses():
        if len(verse) <= VERSE_CHARS:
            sides[chapter in held_out].append((strip(verse), verse))
    return sides


def encode_pairs(tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    return list(zip(*(encode(tokenizer, side) for side in zip(*pairs))))


# --- losses


@torch.no_grad()
def decoder_loss(model: nn.Module, documents: list[list[int]], batch: int = 16) -> tuple[float, int]:
    """Summed nats and tokens. Windows of CONTEXT tokens move by STRIDE; each token is scored once, where it has most
    context, so all but a document's first have at least STRIDE tokens before them."""
    rows = []
    for ids in documents:
        text = [START, *ids]
        for at in range(0, max(len(text) - 1 - (CONTEXT - STRIDE), 1), STRIDE):
            x, y = text[at : at + CONTEXT], text[at + 1 : at + CONTEXT + 1]
            seen = CONTEXT - STRIDE if at else 0
            rows.append((x[: len(y)], [-100] * seen + y[seen:]))
    total, count = 0.0, 0
    for at in range(0, len(rows), batch):
        x, y = (padded([r[i] for r in rows[at : at + batch]], fill) for i, fill in ((0, PAD), (1, -100)))
        total += cross_entropy_torch(model(x), y, reduction="none").double().sum().item()
        count += int((y != -100).sum())
    return total, count


def padded(rows: list[list[int]], fill: int) -> Tensor:
    out = torch.full((len(rows), max(map(len, rows))), fill)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def pair_batch(pairs: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """A batch as objectives.text_to_text takes it: each target given its source and what stands before it."""
    source, targets = padded([s for s, _ in pairs], PAD), padded([t for _, t in pairs], -100)
    ids = torch.cat([torch.full((len(pairs), 1), PAD), targets[:, :-1].clamp(min=PAD)], 1)  # T5 starts with its pad
    return {"source": source, "source_padding": source != PAD, "ids": ids, "targets": targets}


def pair_loss(model: nn.Module, pairs: list[tuple[list[int], list[int]]], reduction: str = "mean") -> Tensor:
    """Cross-entropy of the targets' tokens, each given its source and the target before it."""
    batch = pair_batch(pairs)
    logits = model(batch["source"], batch["ids"], batch["source_padding"])
    return cross_entropy_torch(logits, batch["targets"], reduction=reduction)


@torch.no_grad()
def restore(model: nn.Module, sources: list[list[int]], most: int = 96) -> list[list[int]]:
    """Greedy targets, without <|end|>."""
    source = padded(sources, PAD)
    memory, new = model.encode(source, source != PAD), torch.full((len(sources), 1), PAD)
    cache, out = ContiguousCache(model.config, len(sources), most), []
    while len(out) < most and not (out and (torch.cat(out, 1) == END).any(1).all()):
        new = model.decode(new, memory, source != PAD, cache)[:, -1:].argmax(-1)
        out.append(new)
    return [row[: row.index(END)] if END in row else row for row in torch.cat(out, 1).tolist()]


def word_errors(got: str, want: str) -> int:
    """Edit distance in words, punctuation and capitals counted as part of a word."""
    a, b = got.split(), want.split()
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (x != y)))
    return row[-1]


def common_forms(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Each stripped word's commonest spelling in the originals, its punctuation included: what can be restored without
    looking at any other word."""
    seen = defaultdict(Counter)
    for stripped, original in pairs:
        words = original.split()
        if len(words) == len(stripped.split()):
            for a, b in zip(stripped.split(), words):
                seen[a][b] += 1
    return {word: forms.most_common(1)[0][0] for word, forms in seen.items()}


# --- cards


@cache
def counted(tokenizer: Tokenizer) -> KneserNey:
    return KneserNey(encode(tokenizer, [d.text for d in chosen()[0]]), VOCAB, ORDER)


def sample(documents: list[corpus.Document]) -> list[corpus.Document]:
    """A short held-out scene and a chapter, whose words do not depend on the Python version."""
    short = [d for d in documents if len(d.text) < 5000]
    return [next(d for d in short if d.source == source) for source in ("plays", "bible")]


def decoder_card(model: nn.Module, tokenizer: Tokenizer) -> dict:
    """Losses in nats a token: of each source, of all, and of the quick check's sample."""
    train, held_out = chosen()
    card = dict(digest=corpus.digest([*train, *held_out]), context=CONTEXT, stride=STRIDE, held_out={})
    parts = {source: [d for d in held_out if d.source == source] for source in corpus.SOURCES}
    sums = []
    for name, documents in [*parts.items(), ("sample", sample(held_out))]:
        texts = encode(tokenizer, [d.text for d in documents])
        nats, tokens = decoder_loss(model, texts)
        knesers = counted(tokenizer).loss(texts) * tokens
        sums.append((tokens, nats, knesers))
        card["held_out"][name] = losses(tokens, nats, knesers)
    card["held_out"]["all"] = losses(*map(sum, zip(*sums[:-1])))
    if model.config.activation == "relu":
        card["zeros_by_layer"] = zeros(model, encode(tokenizer, [d.text for d in parts["plays"][:8]]))
    return card


@torch.no_grad()
def zeros(model: nn.Module, documents: list[list[int]]) -> list[float]:
    """Of each layer's FFN, the share of inner values that are zero on the documents' first windows."""
    seen = [[] for _ in model.blocks]
    hooks = [
        block.ffn.down.register_forward_pre_hook(
            lambda _, x, kept=kept: kept.append((x[0] == 0).double().mean().item())
        )
        for block, kept in zip(model.blocks, seen)
    ]
    model(torch.tensor([[START, *ids][:CONTEXT] for ids in documents if len(ids) >= CONTEXT]))
    for hook in hooks:
        hook.remove()
    return [round(sum(kept) / len(kept), 4) for kept in seen]


def losses(tokens: int, nats: float, knesers: float) -> dict:
    loss, kn = nats / tokens, knesers / tokens
    return dict(tokens=tokens, loss=round(loss, 4), kneser_ney_5=round(kn, 4), margin=round(1 - loss / kn, 4))


def pair_card(model: nn.Module, tokenizer: Tokenizer, restored: int = 512) -> dict:
    """The targets' loss, and what greedy decoding restores of `restored` held-out verses."""
    train, held_out = verse_pairs()
    pairs = encode_pairs(tokenizer, held_out)
    kn = KneserNey([t for _, t in encode_pairs(tokenizer, train)], VOCAB, ORDER)
    card = dict(digest=corpus.digest(corpus.bible()), task="restore capitals and punctuation", held_out={})
    for name, part in (("all", pairs), ("sample", pairs[:SAMPLE])):
        with torch.no_grad():
            nats = sum(pair_loss(model, part[i : i + 32], "sum").item() for i in range(0, len(part), 32))
        tokens = sum(len(t) for _, t in part)
        card["held_out"][name] = losses(tokens, nats, kn.loss([t for _, t in part]) * tokens)
    step = len(held_out) // min(restored, len(held_out))
    some = sorted(range(0, len(held_out), step), key=lambda i: len(pairs[i][0]))
    forms, got = common_forms(train), {}
    for at in range(0, len(some), 64):
        rows = some[at : at + 64]
        for i, ids in zip(rows, restore(model, [pairs[i][0] for i in rows])):
            got[i] = tokenizer.decode(ids)
    answers = {
        "model": got,
        "copy": {i: held_out[i][0] for i in some},
        "word_by_word": {i: " ".join(forms.get(w, w) for w in held_out[i][0].split()) for i in some},
    }
    words = sum(len(held_out[i][1].split()) for i in some)
    for name, texts in answers.items():
        wrong = sum(word_errors(texts[i], held_out[i][1]) for i in some)
        exact = sum(texts[i] == held_out[i][1] for i in some) / len(some)
        card[name] = dict(verses=len(some), word_errors=round(wrong / words, 4), exact=round(exact, 4))
    card["examples"] = [
        dict(source=held_out[i][0], restored=got[i], original=held_out[i][1]) for i in some[100::100][:4]
    ]
    return card


def measure(name: str) -> dict:
    """The card of a checkpoint with its losses measured again; what training wrote in it stays."""
    folder = HERE / name
    model, tokenizer = load(folder), Tokenizer.from_file(str(HERE / "tokenizer.json"))
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    card["parameters"] = sum(p.numel() for p in model.parameters())
    return card | (decoder_card if model.config.kind == "decoder" else pair_card)(model, tokenizer)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or NAMES:
        text = json.dumps(measure(name), indent=2, ensure_ascii=False) + "\n"
        (HERE / name / "card.json").write_text(text, encoding="utf-8")
        print(name, text, flush=True)
    if all((HERE / name / "card.json").is_file() for name in NAMES):
        from report import readme

        cards = {name: json.loads((HERE / name / "card.json").read_text(encoding="utf-8")) for name in NAMES}
        (HERE / "README.md").write_text(readme(cards, vocab=VOCAB, stride=STRIDE, context=CONTEXT), encoding="utf-8")


if __name__ == "__main__":
    main()
