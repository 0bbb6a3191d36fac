"""Byte-pair encoding over bytes (Sennrich et al. 2015, arXiv:1508.07909; Radford et al. 2019): text to ids and back.

    text -> words -> bytes -> the pair that was merged first is merged first, until none is left -> ids

Words are cut by GPT-2's pattern: contractions, letters, digits and other signs, each with the space before it, and
white space. Python's `re` knows no \\p{L} and \\p{N}; here they are what \\w holds, split by what is a number, which
follows the interpreter's version of Unicode. No merge goes over the border of a word, so equal words are one word with
a count, and text of any length is encoded as it comes.

Training merges the most frequent pair, of equally frequent ones that with the lower ids, until the vocabulary is full.
A heap holds the pairs; after a merge only words that had the pair are counted again, and an entry whose count is no
longer right goes back to the heap when it comes up. Ids are special tokens, then the 256 bytes, then merges in order.
Vocabulary and merges are those of the library `tokenizers` on the same texts, in whose files they are kept.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"  # Unicode's White_Space
CACHED = 1 << 16  # words whose ids are remembered
NEVER = (float("inf"), 0)


@cache
def words_pattern() -> re.Pattern[str]:
    """GPT-2's 's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+ in `re`'s words."""
    others = "".join(c for c in map(chr, range(0x110000)) if c.isnumeric() and not c.isalpha() and not c.isdecimal())
    letter, number, sign = rf"[^\W\d_{others}]+", rf"[\d{others}]+", rf"(?:[^\w{SPACE}]|_)+"
    return re.compile(rf"'(?:[stmd]|re|ve|ll)| ?{letter}| ?{number}| ?{sign}|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+")


@cache
def byte_characters() -> str:
    """The printable character that stands for each byte in a file: itself where it has one, else from 256 on."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return "".join(chr(b if b in itself else next(others)) for b in range(256))


class BPE:
    """A vocabulary: the bytes of each id, merges in order as pairs of ids, and the ids of special tokens."""

    def __init__(self, tokens: Sequence[bytes], merges: Sequence[tuple[int, int]], special: Mapping[str, int]):
        self.tokens, self.merges, self.special = list(tokens), list(merges), dict(special)
        ids = {token: i for i, token in enumerate(self.tokens) if i not in self.special.values()}
        self.bytes = [ids[bytes([b])] for b in range(256)]
        self.ranks = {(a, b): (rank, ids[self.tokens[a] + self.tokens[b]]) for rank, (a, b) in enumerate(self.merges)}
        longest_first = sorted(map(re.escape, self.special), key=len, reverse=True)
        self.splits = re.compile("|".join(longest_first) or r"(?!)")
        self.word = lru_cache(CACHED)(self._word)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> BPE:
        """Merges until there are `vocab_size` ids, or no pair is left. Raises ValueError where the texts are empty."""
        if vocab_size < 256 + len(special):
            raise ValueError(f"vocab_size = {vocab_size}, but 256 bytes and {len(special)} special tokens need more")
        if isinstance(texts, str) or isinstance(special, str) or len({*special} - {""}) < len(special):
            raise ValueError("texts and special are lists of texts, and special tokens differ and are not empty")
        counts = Counter(word for text in texts for word in words_pattern().findall(text))
        if not counts:
            raise ValueError("there is no text to train on: is the corpus empty?")
        order = sorted(range(256), key=byte_characters().__getitem__)  # as a file has them
        tokens = [*(s.encode() for s in special), *(bytes([b]) for b in order)]
        words = [[len(special) + order.index(b) for b in word.encode()] for word in counts]
        times, merges = list(counts.values()), []
        pairs, where = Counter(), defaultdict(set)
        for i, word in enumerate(words):
            for pair in pairwise(word):
                pairs[pair] += times[i]
                where[pair].add(i)
        heap = [(-pairs[pair], pair, found) for pair, found in where.items()]
        heapq.heapify(heap)
        while heap and len(tokens) < vocab_size:
            count, pair, found = heapq.heappop(heap)
            if -count != pairs[pair] or not count:
                if pairs[pair]:
                    heapq.heappush(heap, (-pairs[pair], pair, found))
                continue
            where = defaultdict(set)
            for i in found:
                for changed, by in _merge(words[i], pair, len(tokens)):
                    pairs[changed] += by * times[i]
                    if by > 0:
                        where[changed].add(i)
            tokens.append(tokens[pair[0]] + tokens[pair[1]])
            merges.append(pair)
            for changed, found in where.items():
                heapq.heappush(heap, (-pairs[changed], changed, found))
        return cls(tokens, merges, {s: i for i, s in enumerate(special)})

    def _word(self, word: str) -> list[int]:
        ids = [self.bytes[b] for b in word.encode()]
        while len(ids) > 1:
            pair = min(pairwise(ids), key=lambda pair: self.ranks.get(pair, NEVER))
            if pair not in self.ranks:
                break
            _merge(ids, pair, self.ranks[pair][1])
        return ids

    def _pieces(self, text: str) -> Iterator[tuple[int, str, Callable[[str], list[int]]]]:
        """Words and special tokens, the longest that begins first: where each ends, itself, and what gives its ids."""
        at, find = 0, words_pattern().finditer
        for mark in self.splits.finditer(text):
            yield from ((m.end(), m[0], self.word) for m in find(text, at, mark.start()))
            yield (at := mark.end()), mark[0], lambda token: [self.special[token]]
        yield from ((m.end(), m[0], self.word) for m in find(text, at))

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Special tokens in it are found wherever they stand."""
        return [i for _, piece, ids in self._pieces(text) for i in ids(piece)]

    def encode_iterable(self, chunks: Iterable[str]) -> Iterator[int]:
        """The ids of the chunks put together, as they become certain; what is held back is a few words.

        The end of a text so far may still become another word, or the start of a special token: of the words before
        any that could be, all but the last two are certain.
        """
        held, longest = "", max(map(len, self.special), default=0)
        for chunk in chunks:
            held += chunk
            tails = range(max(0, len(held) - longest), len(held))
            begun = (at for at in tails if any(s.startswith(held[at:]) and s != held[at:] for s in self.special))
            certain = next(begun, len(held))
            pieces = [piece for piece in self._pieces(held) if piece[0] <= certain][:-2]
            yield from (i for _, piece, ids in pieces for i in ids(piece))
            held = held[pieces[-1][0] :] if pieces else held
        yield from self.encode(held)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Bytes that are no UTF-8, such as half a character's, become U+FFFD."""
        if (ids := list(ids)) and not 0 <= min(ids) <= max(ids) < len(self.tokens):
            raise ValueError(f"ids {min(ids)} to {max(ids)}, but there are {len(self.tokens)}: 0 and on")
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", "replace")

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, as `tokenizers` and transformers read it."""
        name = {i: s for s, i in self.special.items()}
        names = [name.get(i) or "".join(byte_characters()[b] for b in t) for i, t in enumerate(self.tokens)]
        plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        added = [{"id": i, "content": name[i], **plain} for i in sorted(name)]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        merges = [[names[a], names[b]] for a, b in self.merges]
        model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(names)}, "merges": merges}
        whole = dict(version="1.0", added_tokens=added, pre_tokenizer=level, decoder=level, model=model)
        Path(path).write_text(json.dumps(whole, ensure_ascii=False, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> BPE:
        """Read a tokenizer.json. Raises ValueError on one that is not byte-level BPE with GPT-2's words."""
        file = json.loads(Path(path).read_text(encoding="utf-8"))
        model, level, kinds = *(file.get(part) or {} for part in ("model", "pre_tokenizer")), ("BPE", "ByteLevel", None)
        found = model.get("type"), level.get("type"), file.get("normalizer")
        if found != kinds or level.get("add_prefix_space", True) or not level.get("use_regex", True):
            raise ValueError(
                "{} is {} after {}, normalizer {}; but this reads BPE after ByteLevel".format(path, *found)
            )
        special = {token["content"]: token["id"] for token in file.get("added_tokens", ())}
        value, vocab = {c: b for b, c in enumerate(byte_characters())}, model["vocab"] | special
        tokens = [s.encode() if s in special else bytes(value[c] for c in s) for s in sorted(vocab, key=vocab.get)]
        pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
        return cls(tokens, [(vocab[a], vocab[b]) for a, b in pairs], special)


def _merge(word: list[int], pair: tuple[int, int], new: int) -> list[tuple[tuple[int, int], int]]:
    """Replace the pair in a word from left to right; which other pairs became fewer (-1) and more (+1)."""
    changes, i = [], 0
    while i < len(word) - 1:
        if word[i] == pair[0] and word[i + 1] == pair[1]:
            word[i : i + 2] = [new]
            if i > 0:
                changes += [((word[i - 1], pair[0]), -1), ((word[i - 1], new), 1)]
            if i < len(word) - 1:
                changes += [((pair[1], word[i + 1]), -1), ((new, word[i + 1]), 1)]
        i += 1
    return changes
