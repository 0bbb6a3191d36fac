"""What a small model answers with and without looking up: writes rag.toml, in some minutes.

    python data/retrieval/measure.py

SmolLM2-135M-Instruct answers every fourth question of `accelerator_facts`, greedily: from its weights, and with the one
or three sentences that all-MiniLM-L6-v2 finds nearest to the question. `found` says whether the right one is the first.
"""

import json
from pathlib import Path

from llmstack import architectures
from llmstack.architectures.zoo import embed
from llmstack.execution.retrieval import Flat
from llmstack.execution.retrieval.rag import accelerator_facts, answer, right

EVERY = 4


def main() -> None:
    facts = accelerator_facts()
    encoder, documents = architectures.pretrained("all-minilm-l6-v2"), [f.document for f in facts]
    index = Flat(embed(*encoder, documents).numpy())

    def search(question: str, k: int) -> list[str]:
        _, ids = index.search(embed(*encoder, [question]).numpy(), k)
        return [documents[i] for i in ids[0]]

    decoder = architectures.pretrained("smollm2-135m")
    lines = [
        "# Made by data/retrieval/measure.py: greedy answers of SmolLM2-135M-Instruct, with and without retrieval."
    ]
    for fact in facts[::EVERY]:
        replies = {"alone": answer(*decoder, fact.question)[0]}
        replies |= {f"with_{k}": answer(*decoder, fact.question, search, k)[0] for k in (1, 3)}
        row = dict(question=fact.question, answer=fact.answer, found=search(fact.question, 1) == [fact.document])
        row |= {name: {"says": says, "right": right(says, fact)} for name, says in replies.items()}
        lines += ["", "[[asked]]", *(f"{name} = {_toml(value)}" for name, value in row.items())]
        print(row, flush=True)
    (Path(__file__).parent / "rag.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value) -> str:
    inline = lambda pairs: ", ".join(f"{name} = {_toml(part)}" for name, part in pairs.items())
    return f"{{ {inline(value)} }}" if isinstance(value, dict) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
