"""Instruction tuning: a chat template makes one text of a conversation, and only what the assistant says has a loss.

    <|start|><|user|>Which word is last: king, ship, tree?<|end|><|assistant|>It is tree.<|end|>
                                                                      ^^^^^^^^^^^^^^^^^^  these have targets

What stands before is read, never learnt: its targets are -100, so the loss and its gradient are those of the answers
alone. A text is cut into tokens where the roles change, as it is when a model is asked, prompt first.
Wei et al. 2021 (FLAN, arXiv:2109.01652); Ouyang et al. 2022 (InstructGPT, arXiv:2203.02155).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from llmstack import facts
from llmstack.architectures import chat
from llmstack.architectures.tokenizer import Tokenizer
from llmstack.execution.data import IGNORE

TEMPLATE = "<|start|>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"  # for the tokenizer of this project's checkpoints
OF = facts.table("tasks/words")


def conversation(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """ids and targets of one conversation, shifted by one, for `data.padded` and `packed`; without what follows its
    last answer.

    Raises ValueError without an answer, on a content that spells a special token, and on a template that changes what
    it wrote when more is said.
    """
    ids, learnt, done = [], [], ""
    messages = chat.checked(messages)
    special = [t.content for t in tokenizer.inner.get_added_tokens_decoder().values() if t.special]
    if forged := [s for s in special for m in messages if s in m.get("content", "")]:
        raise ValueError(f"a message spells {forged[0]}, which would be read as the mark itself; take it out")
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            if not i:
                raise ValueError("the conversation begins with the assistant's answer: put a question before it")
            prompt = tokenizer.apply_chat_template(messages[:i])
            whole = tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False).rstrip("\n")
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise ValueError(f"the template rewrites what stands before message {i}: no answer can be cut out")
            for text, answer in ((prompt[len(done) :], False), (whole[len(prompt) :], True)):
                piece = tokenizer.encode(text, special=False)
                ids, learnt, done = ids + piece, learnt + [answer] * len(piece), whole
    if not ids:
        raise ValueError("no message has the role 'assistant': there is nothing to learn")
    return {"ids": ids[:-1], "targets": [t if a else IGNORE for t, a in zip(ids[1:], learnt[1:])]}


def request(rng: Random, phrasings: Sequence[str] | None = None) -> list[dict[str, str]]:
    """A question about three words and its answer, asked in one of the phrasings (None: those to tune on)."""
    words, what = rng.sample(OF["nouns"].split(), 3), rng.choice(list(OF["wanted"]))
    asked = rng.choice(phrasings or OF["seen"]).format(what=what, words=", ".join(words))
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It is {words[OF['wanted'][what]]}."}]
