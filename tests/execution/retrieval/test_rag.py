"""BM25 against its formula, and retrieval that makes a small model answer what it does not know."""

import re
from math import log

import numpy as np
import pytest
import torch

from llmstack import facts
from llmstack.execution.claims import rag_answers
from llmstack.execution.retrieval import BM25, rag, verses
from llmstack.execution.retrieval.bm25 import words
from llmstack.execution.retrieval.rag import Fact, accelerator_facts, answer, prompt, right


def by_the_formula(texts, query, k1, b):
    split = [t.split() for t in texts]
    mean = sum(map(len, split)) / len(split)
    n = lambda w: sum(w in d for d in split)
    idf = lambda w: log(1 + (len(split) - n(w) + 0.5) / (n(w) + 0.5))
    part = lambda w, d: d.count(w) * (k1 + 1) / (d.count(w) + k1 * (1 - b + b * len(d) / mean))
    return [sum(idf(w) * part(w, d) for w in query.lower().split() if w in d) for d in split]


@pytest.mark.parametrize("k1, b", [(1.5, 0.75), (1.2, 0.0), (2.0, 1.0), (0.0, 0.5)])
def test_bm25_is_its_formula(k1, b):
    texts = [re.sub("[^a-z ]", "", t.lower()) for t in verses(300).texts]
    index = BM25(texts, k1, b)
    for query in ("the light of heaven", "Noah", "and God said", "bread bread water", "computer"):
        want = by_the_formula(texts, query, k1, b)
        np.testing.assert_allclose(index.scores(query), want, atol=1e-9)
        scores, ids = index.search(query, 5)
        np.testing.assert_allclose(scores[ids >= 0], sorted(want, reverse=True)[: (ids >= 0).sum()], atol=1e-9)
    assert index.search("computer", 5)[1].tolist() == [-1] * 5 and index.touched == 0


def test_words_keep_names_whole():
    assert words("The MLU370-X8's 614.4 GB, don't") == ["the", "mlu370-x8's", "614.4", "gb", "don't"]


def test_bm25_refuses_what_it_cannot_index():
    for texts in ([], "one text"):
        with pytest.raises(ValueError, match="a list of texts, one at least"):
            BM25(texts)
    with pytest.raises(ValueError, match="b from 0 to 1"):
        BM25(["a"], b=2)
    with pytest.raises(ValueError, match="k = 3, but it must be a whole number from 1 to 2"):
        BM25(["a", "b"]).search("a", 3)
    assert BM25(["", "a"]).search("a", 1)[1] == [1] and BM25([""]).scores("a") == [0]


def test_a_number_counts_only_whole():
    fact = Fact("?", "40", "")
    assert all(right(text, fact) for text in ("40", "It has 40 GB.", "40GB", "about 40."))
    assert not any(right(text, fact) for text in ("140", "400", "40.5 GB", "1.40", ""))
    assert right("3,350 GB", Fact("?", "3350", ""))


def test_facts_are_the_tables_and_their_sentences_answer_them():
    known = accelerator_facts()
    assert len(known) > 60 and len({f.question for f in known}) == len(known)
    assert all(right(f.document, f) for f in known)
    gaudi = facts.accelerator("Intel Gaudi2")
    asked = {f.question: f.answer for f in known}
    assert asked["How many GB of memory does the Intel Gaudi2 have?"] == f"{gaudi.memory_bytes / 1e9:g}"


def test_a_prompt_holds_its_passages():
    assert prompt("Why?") == "Why?"
    assert prompt("Why?", ["A.", "B."]) == "Context:\nA.\nB.\n\nQuestion: Why?"


def test_the_stored_answers_favour_retrieval():
    asked = facts.table("retrieval/rag")["asked"]
    known = {f.question: f for f in accelerator_facts()}
    score = {}
    for row in asked:
        for how in ("alone", "with_1", "with_3"):
            assert row[how]["right"] == right(row[how]["says"], known[row["question"]])
            score[how] = score.get(how, 0) + row[how]["right"]
    assert len(asked) >= 20 and score["alone"] < score["with_3"] < score["with_1"]
    assert rag_answers().value == [score["alone"] / len(asked), score["with_1"] / len(asked)]


@pytest.mark.slow
def test_retrieval_makes_answers_right():
    """A small model's greedy answers about accelerators: from its weights, and with the sentence that search finds."""
    from llmstack import architectures
    from llmstack.architectures.zoo import embed
    from llmstack.execution.retrieval import Flat

    known = accelerator_facts()
    encoder, decoder = (architectures.pretrained(name) for name in ("all-minilm-l6-v2", "smollm2-135m"))
    documents = [f.document for f in known]
    index = Flat(embed(*encoder, documents).numpy())
    search = lambda q, k: [documents[i] for i in index.search(embed(*encoder, [q]).numpy(), k)[1][0]]
    score = {None: 0, search: 0}
    for fact in known[1::9]:
        for how in score:
            reply, passages = answer(*decoder, fact.question, how)
            score[how] += right(reply, fact)
            assert len(passages) == (how is not None)
    assert score[search] > score[None] and score[search] >= 0.6 * len(known[1::9])


def test_search_is_asked_for_k_passages(monkeypatch):
    class Letters:
        eos_ids = ()
        apply_chat_template = staticmethod(lambda message: message[0]["content"])
        encode = staticmethod(lambda text, special: [ord(c) for c in text])
        decode = staticmethod(lambda ids: "".join(map(chr, ids.tolist())))

    asked, passages = [], ["one", "two"]
    repeat = lambda model, ids, new, eos: torch.cat([ids, ids[:, :new]], 1)
    monkeypatch.setattr(rag, "generate", repeat)
    search = lambda question, k: asked.append((question, k)) or passages[:k]
    assert rag.answer(None, Letters, "who?", search, k=2, new=12) == ("Context:\none", passages)
    assert asked == [("who?", 2)]
    assert rag.answer(None, Letters, "who?", search)[1] == ["one"] and rag.answer(None, Letters, "who?") == ("who?", [])
