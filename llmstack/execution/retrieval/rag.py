"""Retrieval-augmented generation: look up, put what was found into the prompt, let the model answer.

Lewis et al. 2020, arXiv 2005.11401, train the retriever with the generator; what is common today, and here, is to leave
both as they are and to join them by the prompt alone (Ram et al. 2023, "In-context retrieval-augmented language
models", arXiv 2302.00083).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from llmstack import facts
from llmstack.execution.generation import generate


class Fact(NamedTuple):
    question: str
    answer: str  # what a right reply holds
    document: str  # the sentence that says so


def accelerator_facts() -> list[Fact]:
    """Questions whose answers a small model does not know: memory, bandwidth and power of data/accelerators.toml."""
    out = []
    for a in facts.accelerators().values():
        name = a.title.split(" (")[0]
        memory, bandwidth = ((n or 0) / 1e9 for n in (a.memory_bytes, a.bandwidth))
        if "GB" in a.title:
            continue  # the name says it
        if memory >= 1:
            ask = f"How many GB of memory does the {name} have?"
            out.append(Fact(ask, f"{memory:g}", f"The {name} has {memory:g} GB of memory."))
        if 0 < bandwidth < 10_000:
            ask = f"How many GB per second does the {name} read?"
            out.append(Fact(ask, f"{bandwidth:g}", f"The {name} reads {bandwidth:g} GB per second."))
        if a.tdp_w and a.tdp_w < 2_000:
            ask = f"How many watts does the {name} draw?"
            out.append(Fact(ask, f"{a.tdp_w:g}", f"The {name} draws {a.tdp_w:g} watts."))
    return out


def prompt(question: str, passages: Sequence[str] = ()) -> str:
    """The question, under the passages where there are any."""
    return "\n".join(["Context:", *passages, "", f"Question: {question}"]) if passages else question


Search = Callable[[str, int], Sequence[str]]  # (question, k) -> k passages


def answer(model: Any, tokenizer: Any, question: str, search: Search | None = None, k: int = 1, new: int = 16):
    """A chat model's greedy answer of at most `new` tokens, and the passages that it was given.

    `search(question, k)` returns k passages; without it the model answers from its weights.
    """
    passages = search(question, k) if search else []
    message = [{"role": "user", "content": prompt(question, passages)}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(message), special=False)
    out = generate(model, torch.tensor([ids]), new, eos=tokenizer.eos_ids)[0, len(ids) :]
    return tokenizer.decode(out).strip(), passages


def right(reply: str, fact: Fact) -> bool:
    """Whether the number stands in the reply by itself: 40 is in "40 GB" and "40.", not in 140, 1.40 or 40.5."""
    return bool(re.search(rf"(?<![\d.]){re.escape(fact.answer)}(?!\d|\.\d)", reply.replace(",", "")))
