"""Sentence vectors of Bible verses, made once: writes verses.npz, in a minute or two.

    python data/retrieval/embed.py

all-MiniLM-L6-v2 reads 1,990 short verses spread over the King James Bible: 1,890 to be found, the other 100 to search
with, and ten plain questions. Vectors have unit length and are stored in fp16.
"""

from pathlib import Path

import numpy as np

from llmstack import architectures
from llmstack.architectures.zoo import embed
from llmstack.execution import corpus

SIZE, QUERIES, LETTERS = 1890, 100, (45, 110)
QUESTIONS = (
    "Who made the light?",
    "A great flood covers the earth.",
    "Do not steal.",
    "Love your neighbour.",
    "The walls of the city fall down.",
    "A man is swallowed by a fish.",
    "The child is born in Bethlehem.",
    "Wine and drunkenness",
    "How many years did he reign as king?",
    "Bread and fishes feed many people.",
)


def verses() -> tuple[list[str], list[str]]:
    """(chapter, text) of short verses at even distances through the book, no text twice."""
    short = {text: chapter for chapter, text in corpus.verses() if LETTERS[0] <= len(text) <= LETTERS[1]}
    at = np.linspace(0, len(short) - 1, SIZE + QUERIES).astype(int)
    kept = [list(short.items())[i] for i in at]
    return [chapter for _, chapter in kept], [text for text, _ in kept]


def main() -> None:
    chapters, texts = verses()
    model, tokenizer = architectures.pretrained("all-minilm-l6-v2")
    lines = [*texts, *QUESTIONS]
    parts = [embed(model, tokenizer, lines[i : i + 64]).numpy() for i in range(0, len(lines), 64)]
    vectors = np.concatenate(parts).astype(np.float16)
    order = np.random.default_rng(0).permutation(SIZE + QUERIES)
    keep, ask = np.sort(order[:SIZE]), np.sort(order[SIZE:])
    asked = np.array([*(texts[i] for i in ask), *QUESTIONS])
    np.savez_compressed(
        Path(__file__).parent / "verses.npz",
        vectors=vectors[keep],
        queries=np.concatenate([vectors[ask], vectors[len(texts) :]]),
        texts=np.frombuffer("\n".join(texts[i] for i in keep).encode(), np.uint8),
        chapters=np.frombuffer("\n".join(chapters[i] for i in keep).encode(), np.uint8),
        asked=np.frombuffer("\n".join(asked).encode(), np.uint8),
    )


if __name__ == "__main__":
    main()
