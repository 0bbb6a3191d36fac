"""README.md of this folder, from the cards; measure.py writes it."""

from __future__ import annotations

README = """# Small checkpoints

Four models that load in a moment, for tests and chapters: `llmstack.architectures.pretrained("llama-2m")` and so on.
They are in Hugging Face's layout, so transformers reads the folders too, and they share a byte-level BPE of {vocab:,}
tokens (`<|start|>` 1 begins a document, `<|end|>` 2 ends it, `<|pad|>` is 0).

They were trained by `train.py` on half of the training documents of `llmstack.execution.corpus`: Shakespeare, the King
James Bible, Python's language reference and modules of its standard library. Each took {minutes} minutes of a
shared core. Losses are nats a token on held-out documents, beside an interpolated Kneser-Ney 5-gram that counted the
same training tokens. `card.json` in each folder has them for every source, with seed, steps and seconds.

| checkpoint | parameters | trained on | held-out loss | 5-gram | below it by |
|---|---|---|---|---|---|
{rows}

The decoders score each token with {stride} to {context} tokens before it (fewer at a document's start). On the language
reference alone the 5-gram is the better one: its topics repeat each other's paragraphs, and counting remembers them.
The 5-gram beside `t5-2m` sees the target alone, the model its source too. In `relu-2m`, by layer, {sparsity}
of the inner values are zero after the ReLU.

`t5-2m` puts capitals and punctuation back into verses that lost both. Errors are words that differ, over {verses}
held-out verses; "word by word" takes each word's commonest form in the training verses.

| | word errors | verses without an error |
|---|---|---|
{task}

A stripped verse, what the model makes of it, and the original:

    {example[source]}
    {example[restored]}
    {example[original]}

To make them again: `python data/checkpoints/train.py tokenizer`, then `train.py NAME` for each name, then `measure.py`.
Each is a run of `llmstack.execution.Trainer`: stopped at any moment and started again, it goes on where it was.
The standard library's text, and with it the numbers, depend on the Python version (here 3.11).
"""


def readme(cards: dict[str, dict], **numbers: int) -> str:
    rows, t5 = [], cards["t5-2m"]
    for name, card in cards.items():
        seen = f"{card['pairs_seen']:,} verses" if "pairs_seen" in card else f"{card['tokens_seen']:,} tokens"
        loss = card["held_out"]["all"]
        told = f"{loss['loss']:.3f} | {loss['kneser_ney_5']:.3f} | {loss['margin']:.1%}"
        rows.append(f"| `{name}` | {card['parameters']:,} | {seen} | {told} |")
    task = [
        f"| {who.replace('_', ' ')} | {t5[who]['word_errors']:.1%} | {t5[who]['exact']:.1%} |"
        for who in ("copy", "word_by_word", "model")
    ]
    minutes = sorted(round(card["seconds"] / 60) for card in cards.values())
    return README.format(
        minutes=f"{minutes[0]} to {minutes[-1]}",
        **numbers,
        rows="\n".join(rows),
        verses=t5["model"]["verses"],
        task="\n".join(task),
        example=t5["examples"][2],
        sparsity=", ".join(f"{z:.0%}" for z in cards["relu-2m"]["zeros_by_layer"]),
    )
