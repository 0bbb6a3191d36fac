"""Byte-pair encoding over bytes (Sennrich et al. 2015, arXiv:1508.07909; Radford et al. 2019): text to ids and back.

    text -> words -> bytes -> the pair that was merged first is merged first, until none is left -> ids

Words are cut by GPT-2's pattern: contractions, letters, digits and other signs, each with the space before it, and
white space. No merge goes over the border of a word, so equal words are one word with a count, words that were seen
are looked up, and text of any length is encoded as it comes. The pattern takes half of encoding's time: hence `regex`.

Training merges the most frequent pair until the vocabulary is full. Of equally frequent pairs it takes the one with
the lower ids, as the library `tokenizers` does; `ties="bytes"` takes the one whose bytes are greater, as other
courses do. Special tokens in the texts are cut out and not counted. A heap holds the pairs; after a merge only words
that had the pair are counted again, and an entry whose count is no longer right goes back to the heap when it comes
up. Ids are special tokens, then the 256 bytes, then merges in order.

Ids, vocabulary and merges are those of `tokenizers`, whose files are read and written: what a file asks for is done,
or refused by its name.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, pairwise
from pathlib import Path

import regex

WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
LETTER = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]")  # what a single word ends at
WHITE = regex.compile(r"\s*")
CACHED = 1 << 16  # words whose ids are remembered
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@cache
def byte_characters() -> str:
    """The printable character that stands for each byte in a file: itself where it has one, else from 256 on."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return "".join(chr(b if b in itself else next(others)) for b in range(256))


@cache
def byte_values() -> dict[str, int]:
    return {character: b for b, character in enumerate(byte_characters())}


def alternatives(tokens: Iterable[str]) -> regex.Pattern:
    """Finds the longest token of those that begin at a place; none where there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return regex.compile("|".join(map(regex.escape, longest_first)) or r"(?!)")


class BPE:
    """A vocabulary: the bytes of each id (none where a file leaves one out), merges in order as pairs of ids, and the
    ids of added tokens.

    `flags` has what a file says of an added token beyond PLAIN: whether it takes the white space on its left (lstrip)
    and right (rstrip), stands only as a word of its own (single_word), is looked for after all others (normalized),
    or is text like any other that has one id (special: False). With `ignore_merges` a word that has an id gets it,
    also where merges lead elsewhere. len() is the rows that a model's embedding needs: the highest id and one.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        merges: Sequence[tuple[int, int]],
        special: Mapping[str, int],
        flags: Mapping[str, Mapping[str, bool]] | None = None,
        ignore_merges: bool = False,
    ):
        self.tokens, self.merges, self.special = list(tokens), list(merges), dict(special)
        self.flags = {token: PLAIN | (flags or {}).get(token, {}) for token in self.special}
        self.ignore_merges = ignore_merges
        added, value = set(self.special.values()), byte_values()
        of_letters = {token: i for token, i in self.special.items() if value.keys() >= set(token)}
        self.ids = {bytes(value[c] for c in token): i for token, i in of_letters.items()}  # text that has an own id
        self.ids |= {token: i for i, token in enumerate(self.tokens) if token and i not in added}
        missing = [f"0x{b:02X}" for b in range(256) if bytes([b]) not in self.ids]
        if missing:
            raise ValueError(
                f"{len(missing)} bytes have no token ({', '.join(missing[:5])}, …), and a text may hold any of 256: "
                "train with all of them (in tokenizers: initial_alphabet=ByteLevel.alphabet())"
            )
        self.bytes = [self.ids[bytes([b])] for b in range(256)]
        self.ranks = {}
        for rank, (a, b) in enumerate(self.merges):
            whole = self.tokens[a] + self.tokens[b]
            if whole not in self.ids:
                raise ValueError(f"merge {rank} makes {whole}, which has no id: the vocabulary must hold it")
            self.ranks[a, b] = rank, self.ids[whole]
        late = [token for token in self.special if self.flags[token]["normalized"]]
        early = [token for token in self.special if token not in late]
        self.passes = [alternatives(tokens) for tokens in (early, late) if tokens]
        self.word = lru_cache(CACHED)(self._word)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, special: Sequence[str] = (), ties: str = "ids") -> BPE:
        """Merges until there are `vocab_size` ids, or no pair is left. Raises ValueError where the texts are empty."""
        if vocab_size < 256 + len(special):
            raise ValueError(f"vocab_size = {vocab_size}, but 256 bytes and {len(special)} special tokens need more")
        if isinstance(texts, str) or isinstance(special, str) or len({*special} - {""}) < len(special):
            raise ValueError("texts and special are lists of texts, and special tokens differ and are not empty")
        if ties not in ("ids", "bytes"):
            raise ValueError(f'ties = {ties!r}: of equal pairs take that with lower "ids", or with greater "bytes"')
        counts, specials = Counter(), alternatives(special)
        for text in texts:
            for part in specials.split(text):
                counts.update(WORDS.findall(part))
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

        def entry(pair, found):
            first = pair if ties == "ids" else [_greater_first(tokens[i]) for i in pair]
            return -pairs[pair], first, pair, found

        heap = [entry(pair, found) for pair, found in where.items()]
        heapq.heapify(heap)
        while heap and len(tokens) < vocab_size:
            count, _, pair, found = heapq.heappop(heap)
            if -count != pairs[pair] or not count:
                if pairs[pair]:
                    heapq.heappush(heap, entry(pair, found))
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
                heapq.heappush(heap, entry(changed, found))
        return cls(tokens, merges, {s: i for i, s in enumerate(special)})

    def _word(self, word: str) -> list[int]:
        """Ids of a word. A heap holds the pairs that merge, the earliest merge first and of equal ones the leftmost;
        each place knows its neighbours, so that n bytes take n log n steps."""
        text = word.encode()
        if self.ignore_merges and text in self.ids:
            return [self.ids[text]]
        ids, heap = [self.bytes[b] for b in text], []
        left, right = list(range(-1, len(ids) - 1)), [*range(1, len(ids)), -1]

        def offer(i, j):
            pair = (ids[i], ids[j])
            if i >= 0 and j >= 0 and pair in self.ranks:
                heapq.heappush(heap, (self.ranks[pair], i, pair))

        for i in range(len(ids) - 1):
            offer(i, i + 1)
        while heap:
            (_, new), i, pair = heapq.heappop(heap)
            j = right[i]
            if j < 0 or (ids[i], ids[j]) != pair:
                continue  # another merge took one of the two
            ids[i], ids[j], right[i] = new, -1, right[j]
            if right[i] >= 0:
                left[right[i]] = i
            offer(left[i], i)
            offer(i, right[i])
        return [i for i in ids if i >= 0]

    def _parts(self, text: str, plain: Collection[str]) -> list[tuple[int, int, str]]:
        """Where text begins and ends between added tokens, and where each of these does with its name."""
        parts = [(0, len(text), "")]
        for tokens in self.passes:
            cut = []
            for start, stop, token in parts:
                if token:
                    cut.append((start, stop, token))
                else:
                    cut += self._cut(text, start, stop, tokens, plain)
            parts = cut
        return parts

    def _cut(
        self, text: str, start: int, stop: int, tokens: regex.Pattern, plain: Collection[str]
    ) -> Iterator[tuple[int, int, str]]:
        """The parts of text[start:stop], in which added tokens are found from left to right."""
        at = start
        for mark in tokens.finditer(text, start, stop):
            (begin, end), token = mark.span(), mark[0]
            flags = self.flags[token]
            within = LETTER.match(text, max(begin - 1, start), begin) or LETTER.match(text, end, min(end + 1, stop))
            if token in plain or flags["single_word"] and within:
                continue
            if flags["lstrip"]:
                before = text[at:begin][::-1]
                begin = max(at, begin - WHITE.match(before).end())
            if flags["rstrip"]:
                end = WHITE.match(text, end, stop).end()
            if at < begin:
                yield at, begin, ""
            yield begin, end, token
            at = end
        if at < stop:
            yield at, stop, ""

    def _plain(self, allowed_special: str | Collection[str]) -> set[str]:
        """Special tokens that a text does not call."""
        if allowed_special == "all":
            return set()
        unknown = [allowed_special] if isinstance(allowed_special, str) else set(allowed_special) - set(self.special)
        if unknown:
            raise ValueError(
                f'allowed_special has {sorted(unknown)}: take "all", or a set of {sorted(self.special)[:5]}'
            )
        return {token for token in self.special if self.flags[token]["special"]} - set(allowed_special)

    def encode(self, text: str, allowed_special: str | Collection[str] = "all") -> list[int]:
        """Ids of a text. Special tokens in it are found wherever they stand, or only those in `allowed_special`.

        Text of users is encoded with `allowed_special=()`: who writes <|end|> into a message then sends its letters,
        and cannot end the turn or speak for the system.
        """
        ids = []
        for start, stop, token in self._parts(text, self._plain(allowed_special)):
            if token:
                ids.append(self.special[token])
            else:
                ids.extend(chain.from_iterable(map(self.word, WORDS.findall(text, start, stop))))
        return ids

    def encode_iterable(self, chunks: Iterable[str], allowed_special: str | Collection[str] = "all") -> Iterator[int]:
        """The ids of the chunks put together, as they become certain; what is held back is a few words.

        The end of a text so far may still become another word, or the start of a special token: of the words before
        any that could be, all but the last two are certain. Raises ValueError where a token is a `single_word`, for
        which more would have to be known of what went before.
        """
        plain, held, longest = self._plain(allowed_special), "", max(map(len, self.special), default=0)
        if words := [token for token in self.special if self.flags[token]["single_word"]]:
            raise ValueError(f"{words} are single words, which a stream cannot find; encode the whole text")
        for chunk in chunks:
            held += chunk
            tails = range(max(0, len(held) - longest), len(held))
            begun = (at for at in tails if any(s.startswith(held[at:]) and s != held[at:] for s in self.special))
            certain = next(begun, len(held))
            pieces = []  # where each ends, and its ids
            for start, stop, token in self._parts(held, plain):
                if token:
                    pieces.append((stop, token))
                else:
                    pieces += [(word.end(), word) for word in WORDS.finditer(held, start, stop)]
            pieces = [piece for piece in pieces if piece[0] <= certain][:-2]
            for _, piece in pieces:
                yield from [self.special[piece]] if isinstance(piece, str) else self.word(piece[0])
            held = held[pieces[-1][0] :] if pieces else held
        yield from self.encode(held, allowed_special)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Bytes that are no UTF-8, such as half a character's, become U+FFFD."""
        ids = list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < len(self.tokens):
            raise ValueError(f"ids {min(ids)} to {max(ids)}, but there are {len(self.tokens)}: 0 and on")
        tokens = [self.tokens[i] for i in ids]
        if b"" in tokens:
            raise ValueError(f"id {ids[tokens.index(b'')]} stands for no token: the file leaves it out")
        return b"".join(tokens).decode("utf-8", "replace")

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, as `tokenizers` and transformers read it."""
        name = {i: s for s, i in self.special.items()}
        names = [name.get(i) or "".join(byte_characters()[b] for b in t) for i, t in enumerate(self.tokens)]
        vocab = {}
        for i, token in enumerate(names):
            if token in vocab:
                raise ValueError(f"ids {vocab[token]} and {i} are both {token!r} in a file: rename the special token")
            if token:
                vocab[token] = i
        added = [{"id": i, "content": name[i], **self.flags[name[i]]} for i in sorted(name)]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        merges = [[names[a], names[b]] for a, b in self.merges]
        model = {"type": "BPE", "ignore_merges": self.ignore_merges, "vocab": vocab, "merges": merges}
        whole = dict(version="1.0", added_tokens=added, pre_tokenizer=level, decoder=level, model=model)
        Path(path).write_text(json.dumps(whole, ensure_ascii=False, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> BPE:
        """Read a tokenizer.json. Raises ValueError, naming the field, on one that asks for more than this does: bytes
        after GPT-2's words, deterministic merges, nothing added or cut."""
        file = json.loads(Path(path).read_text(encoding="utf-8"))
        _check(file, path)
        model, added = file["model"], file.get("added_tokens") or []
        special = {token["content"]: token["id"] for token in added}
        vocab = special | model["vocab"]
        if moved := [token for token in special if vocab[token] != special[token]]:
            raise ValueError(f"{path}: {moved} have one id in added_tokens and another in model.vocab; which is right?")
        if len(set(vocab.values())) < len(vocab):
            raise ValueError(f"{path}: two tokens of model.vocab and added_tokens have one id; each needs its own")
        tokens, value = [b""] * (1 + max(vocab.values(), default=-1)), byte_values()
        for token, i in vocab.items():
            if token not in special and not value.keys() >= set(token):
                raise ValueError(f"{path}: model.vocab has {token!r}, which is not made of ByteLevel's 256 characters")
            tokens[i] = token.encode() if token in special else bytes(value[c] for c in token)
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        if unknown := {part for pair in pairs for part in pair} - vocab.keys():
            raise ValueError(f"{path}: model.merges join {sorted(unknown)[:5]}, which are not in model.vocab")
        flags = {token["content"]: {name: token.get(name, PLAIN[name]) for name in PLAIN} for token in added}
        merges = [(vocab[a], vocab[b]) for a, b in pairs]
        return cls(tokens, merges, special, flags, bool(model.get("ignore_merges")))


def _check(file: dict, path: str | Path) -> None:
    """Refuses by name what changes ids or text and is not done here.

    The rest of a file changes nothing: unk_token, fuse_unk and byte_fallback are for letters without a token, and
    every byte has one; trim_offsets moves offsets only.
    """
    model = file.get("model") or {}
    kinds = {"model": "BPE", "pre_tokenizer": "ByteLevel", "decoder": "ByteLevel"}
    found = {part: (file.get(part) or {}).get("type") for part in kinds}
    if {"vocab", "merges"} <= model.keys():
        found["model"] = model.get("type", "BPE")  # GPT-2's own file does not say it
    if found != kinds:
        raise ValueError(f"{path} is {found}; but this reads {kinds}")
    level, after = file["pre_tokenizer"], file.get("post_processor") or {"type": "ByteLevel"}
    asked = {
        "truncation": file.get("truncation"),
        "padding": file.get("padding"),
        "normalizer": file.get("normalizer"),
        "pre_tokenizer.add_prefix_space": level.get("add_prefix_space", True),
        "pre_tokenizer.use_regex = false": not level.get("use_regex", True),
        "post_processor": after.get("type") != "ByteLevel" and after,
        "model.dropout": model.get("dropout"),
        "model.continuing_subword_prefix": model.get("continuing_subword_prefix"),
        "model.end_of_word_suffix": model.get("end_of_word_suffix"),
    }
    if refused := {name: value for name, value in asked.items() if value}:
        raise ValueError(f"{path} asks for {refused}, which changes ids or text and is not done here; use `tokenizers`")


def _greater_first(token: bytes) -> list[int]:
    """Sorts before that of any smaller token; its end is greater than any byte, so that "ab" comes before "a"."""
    return [255 - b for b in token] + [256]


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
