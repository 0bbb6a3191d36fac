"""An interpolated Kneser–Ney n-gram model: the best that counting does, and the bar that a small network must clear.

    p_n(w | h) = max(c(hw) - D(c(hw)), 0) / c(h)  +  γ(h) p_{n-1}(w | h without its first word)
    γ(h)       = (D1 N1(h) + D2 N2(h) + D3 N3+(h)) / c(h)          the mass that the discounts took away

c is the count of an n-gram at the highest order; below it, the number of different words that were seen before it: how
many contexts a word completes says more about a new context than how often it came. The lowest order is interpolated
with 1/V. There are three absolute discounts for each order, for counts of one, two, and three or more, estimated from
the numbers n1 … n4 of n-grams that were seen once … four times:

    Y = n1 / (n1 + 2 n2),   D1 = 1 - 2Y n2/n1,   D2 = 2 - 3Y n3/n2,   D3+ = 3 - 4Y n4/n3

Chen & Goodman, An empirical study of smoothing techniques for language modeling, Computer Speech & Language 13 (1999),
pages 359-394, section 3 ("modified Kneser–Ney").

An n-gram is one integer, its tokens in groups of bits with the last token lowest: an order's table is a sorted array,
dropping the last token is a shift, dropping the first a mask, and a lookup is a binary search. Three million tokens at
order 5 take about five seconds and 300 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class KneserNey:
    """Fitted on documents, each a sequence of token ids; contexts never reach over a document's start.

    Raises ValueError when a token is out of range, nothing is given, or `order` tokens do not fit in 63 bits.
    """

    def __init__(self, documents: Iterable[Sequence[int]], vocab_size: int, order: int = 5):
        self.vocab_size, self.order = vocab_size, order
        self.bits = int(vocab_size).bit_length()  # room for one more symbol: the start that pads a context
        if order < 1 or order * self.bits > 63:
            raise ValueError(f"order = {order}: {self.bits} bits a token give orders from 1 to {63 // self.bits}")
        grams = np.concatenate([np.zeros(0, np.int64), *(self._grams(d) for d in documents)])
        if not len(grams):
            raise ValueError("no tokens to count: the documents are empty")
        self.tables = [None] * order
        keys, counts = np.unique(grams, return_counts=True)
        for n in range(order, 0, -1):
            self.tables[n - 1] = _Table(keys, counts, self.bits)
            # each different n-gram votes once for its end: the continuation count of the order below
            keys, counts = np.unique(keys & self._mask(n - 1), return_counts=True)

    def _mask(self, n: int) -> int:
        return (1 << n * self.bits) - 1

    def _grams(self, document: Sequence[int]) -> Ints:
        """The n-gram of the highest order that ends at each token."""
        tokens = np.asarray(document, np.int64).reshape(-1)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self.vocab_size)][0]
            raise ValueError(f"token {bad} is outside the vocabulary of {self.vocab_size}")
        padded = np.concatenate([np.full(self.order - 1, self.vocab_size), tokens])
        grams = np.zeros(len(tokens), np.int64)
        for i in range(self.order):
            grams = grams << self.bits | padded[i : i + len(tokens)]
        return grams

    def _prob(self, grams: Ints) -> NDArray[np.float64]:
        p = np.full(len(grams), 1 / self.vocab_size)
        for n, table in enumerate(self.tables, start=1):
            own, backoff = table.discounted(grams & self._mask(n))
            p = own + backoff * p
        return p

    def logprobs(self, document: Sequence[int]) -> NDArray[np.float64]:
        """log p(token | the tokens before it) for each token of a document, in nats."""
        return np.log(self._prob(self._grams(document)))

    def distribution(self, context: Sequence[int]) -> NDArray[np.float64]:
        """p(w | context) for every w; the context is a document's beginning."""
        grams = self._grams([*context, 0])[-1:] + np.arange(self.vocab_size)
        return self._prob(grams)

    def loss(self, documents: Iterable[Sequence[int]]) -> float:
        """Mean nats a token over documents."""
        logs = [self.logprobs(d) for d in documents]
        return -float(sum(x.sum() for x in logs) / max(sum(map(len, logs)), 1))


class _Table:
    """One order: its n-grams, what each keeps after its discount, and what its context leaves to the order below."""

    def __init__(self, keys: Ints, counts: Ints, bits: int):
        self.keys, self.bits = keys, bits
        self.discounts = _discounts(counts)
        discount = self.discounts[np.minimum(counts, 3)]
        contexts, first = np.unique(keys >> bits, return_index=True)  # keys are sorted, so a context is one run
        total = np.add.reduceat(counts, first)
        self.contexts = contexts
        self.backoff = np.add.reduceat(discount, first) / total
        self.own = (counts - discount) / np.repeat(total, np.diff([*first, len(keys)]))

    def discounted(self, grams: Ints) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For each n-gram (c - D)/c(h), 0 if unseen; and γ(h), 1 if the context is unseen."""
        return _look_up(self.keys, self.own, grams, 0.0), _look_up(self.contexts, self.backoff, grams >> self.bits, 1.0)


def _look_up(keys: Ints, values: NDArray[np.float64], wanted: Ints, absent: float) -> NDArray[np.float64]:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], absent)


def _discounts(counts: Ints) -> NDArray[np.float64]:
    """[0, D1, D2, D3+]. Where few n-grams give a formula no value or none above zero, every discount is Y (or 1/2)."""
    n1, n2, n3, n4 = (int((counts == k).sum()) for k in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2) if n1 else 0.5
    if n1 and n2 and n3:
        d = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if (d[1:] > 0).all():
            return d
    return np.array([0, y, y, y])
