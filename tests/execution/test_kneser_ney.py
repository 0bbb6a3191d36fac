"""The vectorised model against the paper's equations written out with dictionaries, one word at a time."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack.execution.kneser_ney import KneserNey


class Slow:
    """Chen & Goodman 1999, section 3, by the definitions: sets of contexts, no sorting, no bits."""

    def __init__(self, documents, V, order):
        self.V, self.order = V, order
        grams = Counter()
        for d in documents:
            padded = ["start"] * (order - 1) + list(d)
            grams.update(tuple(padded[i : i + order]) for i in range(len(d)))
        self.counts = {order: dict(grams)}
        for n in range(order - 1, 0, -1):
            before = defaultdict(set)
            for gram in self.counts[n + 1]:
                before[gram[1:]].add(gram[0])
            self.counts[n] = {gram: len(words) for gram, words in before.items()}
        self.D = {n: self.discount(counts) for n, counts in self.counts.items()}

    def discount(self, counts):
        n = Counter(counts.values())
        y = n[1] / (n[1] + 2 * n[2]) if n[1] else 0.5
        if n[1] and n[2] and n[3]:
            d = [1 - 2 * y * n[2] / n[1], 2 - 3 * y * n[3] / n[2], 3 - 4 * y * n[4] / n[3]]
            if min(d) > 0:
                return d
        return [y, y, y]

    def p(self, word, context):
        padded = ["start"] * (self.order - 1) + list(context)
        return self.level(self.order, tuple(padded[len(padded) - self.order + 1 :]), word)

    def level(self, n, h, w):
        if n == 0:
            return 1 / self.V
        follow = {g[-1]: c for g, c in self.counts[n].items() if g[:-1] == h}
        below = self.level(n - 1, h[1:], w)
        if not follow:
            return below
        total = sum(follow.values())
        taken = sum(self.D[n][min(c, 3) - 1] for c in follow.values())
        own = follow[w] - self.D[n][min(follow[w], 3) - 1] if w in follow else 0
        return own / total + taken / total * below


def text(seed, V, n):
    """Zipf-like words, so that every count from one upwards occurs."""
    return np.minimum(np.random.default_rng(seed).zipf(1.5, n) - 1, V - 1)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_the_definitions(order):
    V, documents = 12, [text(s, 12, n) for s, n in enumerate((150, 1, 60, 0, 90))]
    fast, slow = KneserNey(documents, V, order), Slow(documents, V, order)
    unseen = text(9, V, 40)
    want = [math.log(slow.p(w, unseen[:i])) for i, w in enumerate(unseen)]
    np.testing.assert_allclose(fast.logprobs(unseen), want, rtol=1e-11)
    assert fast.loss([unseen, documents[0][:0]]) == pytest.approx(-np.mean(want), rel=1e-12)


def test_a_bigram_model_by_hand():
    """a b a b a c has too few n-grams for D1 … D3+, so the discount of each order is its Y."""
    model = KneserNey([[0, 1, 0, 1, 0, 2]], 4, order=2)
    # pairs: (start a) 1, (a b) 2, (b a) 2, (a c) 1, so Y = 2 / (2 + 2·2) = 1/3; words before: a 2 (start, b), b 1, c 1
    low = lambda own: own + (3 * 0.5) / 4 / 4  # n1 = 2, n2 = 1, so Y = 2 / (2 + 2·1) = 1/2 below
    want_b = (2 - 1 / 3) / 3 + (2 / 3) / 3 * low(0.5 / 4)
    want_d = (2 / 3) / 3 * low(0.0)
    p = model.distribution([0])
    assert p[1] == pytest.approx(want_b) and p[3] == pytest.approx(want_d)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), max_size=25), min_size=1, max_size=5).filter(any),
    st.integers(1, 5),
    st.lists(st.integers(0, 6), max_size=6),
)
def test_probabilities_are_positive_and_sum_to_one(documents, order, context):
    p = KneserNey(documents, 7, order).distribution(context)
    assert p.min() > 0 and p.sum() == pytest.approx(1, abs=1e-12)


def test_contexts_end_where_a_document_does():
    model = KneserNey([[0, 1, 2, 3, 4]] * 3, 6)
    apart = np.concatenate([model.logprobs([0, 1, 2]), model.logprobs([3, 4])])
    together = model.logprobs([0, 1, 2, 3, 4])
    assert model.loss([[0, 1, 2], [3, 4]]) == pytest.approx(-apart.mean())
    assert apart[3] < together[3] - 1  # nothing stands before 3 there


def test_longer_contexts_help_where_they_repeat():
    documents = [[(7 * i * i + i) % 31 % 10 for i in range(400)]]
    losses = [KneserNey(documents, 10, order).loss(documents) for order in (1, 2, 3)]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize(
    ("documents", "V", "order", "says"),
    [
        ([[0, 5]], 5, 2, "token 5 is outside the vocabulary of 5"),
        ([[-1]], 5, 2, "token -1 is outside"),
        ([[], []], 5, 2, "documents are empty"),
        ([], 5, 2, "documents are empty"),
        ([[1]], 5, 0, "orders from 1 to 21"),
        ([[1]], 50_000, 5, "16 bits a token give orders from 1 to 3"),
    ],
)
def test_bad_input_is_refused(documents, V, order, says):
    with pytest.raises(ValueError, match=says):
        KneserNey(documents, V, order)
