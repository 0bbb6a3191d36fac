"""BM25: how well a text's words fit a query's, weighted by how rare they are.

    score(q, d) = Σ_t∈q  idf(t) · tf (k1 + 1) / (tf + k1 (1 - b + b · |d| / avg|d|))
    idf(t) = ln (1 + (N - n + ½) / (n + ½))

tf is how often t stands in d, n how many of the N texts hold it, |d| the words of d. k1 says how soon more of the same
word counts for nothing, b how much a long text is held against itself. Robertson and Zaragoza 2009, "The Probabilistic
Relevance Framework: BM25 and Beyond", eq. 3.15, with idf as in Lucene: the 1 keeps it above zero for words that stand
in more than half of the texts. An inverted index touches only the texts that hold a word of the query.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np

from llmstack.execution.retrieval.exact import checked_k, nearest


def words(text: str) -> list[str]:
    """Runs of letters and digits, with what a hyphen, a point or an apostrophe joins; case and the two ways to write é
    in Unicode make no difference."""
    return re.findall(r"[^\W_]+(?:[-.'][^\W_]+)*", unicodedata.normalize("NFKC", text.casefold()))


class BM25:
    """An inverted index: for each word the texts that hold it and how often. `.touched` is what the last query read."""

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75):
        if isinstance(texts, str) or not len(texts) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f'BM25 takes a list of texts, one at least: ["…", …]; got {texts!r:.200}')
        if not (0 <= k1 < np.inf and 0 <= b <= 1):
            raise ValueError(f"k1 = {k1}, b = {b}: k1 is zero or more (1.2 to 2 is usual), b from 0 to 1 (0.75)")
        counts = [Counter(words(text)) for text in texts]
        length = np.array([sum(c.values()) for c in counts], float)  # [N]
        self.norm = k1 * (1 - b + b * length / max(length.mean(), 1e-9))  # [N]
        self.k1, self.n, self.touched, postings = k1, len(counts), 0, {}
        for i, count in enumerate(counts):
            for word, tf in count.items():
                postings.setdefault(word, []).append((i, tf))
        self.postings = {word: np.array(rows).T for word, rows in postings.items()}  # word -> [2, n]: texts, counts

    def idf(self, word: str) -> float:
        n = self.postings[word].shape[1] if word in self.postings else 0
        return float(np.log1p((self.n - n + 0.5) / (n + 0.5)))

    def scores(self, query: str) -> np.ndarray:
        """Scores [N] of all texts; zero where no word fits. A word asked for twice counts twice."""
        out, self.touched = np.zeros(self.n), 0
        for word, times in Counter(words(query)).items():
            if word in self.postings:
                at, tf = self.postings[word]
                out[at] += times * self.idf(word) * tf * (self.k1 + 1) / (tf + self.norm[at])
                self.touched += len(at)
        return out

    def search(self, query: str, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """Scores [k] and ids [k] of the best texts, id -1 where fewer have a word of the query."""
        k, scores = checked_k(k, self.n), self.scores(query)
        fit = np.flatnonzero(scores)
        cost, ids = nearest(-scores[fit], fit, k)
        return -cost, ids
