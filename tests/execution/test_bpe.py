"""Words, vocabulary, merges and ids are those of the library `tokenizers`; any text comes back; streams are lazy."""

import json
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from llmstack.execution.bpe import BPE, byte_characters, words_pattern
from llmstack.facts import data_path

SPECIAL = ("<|end|>", "<|end|>>", "<|e", "é¦")
TEXTS = [
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; aaaa aaaaaaa",
    "He'll say they're what we've got: it's 12,345.67 — don't (I'd) 'twas  \n\n\tlists:\n - one\n - two  \r\n\x1c\x85 ",
    "naïve Ünïcödé 日本語のテキスト русский текст ٣٤٥ ⅷ² 🙂🙃 x_y __init__ <|end|> a\u00a0b \u2003 c",
] * 3
# texts of what the pattern cares for, and of anything else
TRICKY = st.lists(st.sampled_from(["'", "ll", "s", " ", "  ", "\n", "a", "B", "7", "_", ".", "²", "é", "<|", *SPECIAL]))
ANY = st.one_of(TRICKY.map("".join), st.text(max_size=40))


def theirs(texts, size):
    peer = Tokenizer(models.BPE())
    peer.pre_tokenizer, peer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = dict(special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    peer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **how))
    return peer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Ours and theirs of the same texts: few, so that most merges are ties; and ours as a file that theirs reads."""
    ours, peer = BPE.train(TEXTS, 420, SPECIAL), theirs(TEXTS, 420)
    ours.save(path := tmp_path_factory.mktemp("bpe") / "tokenizer.json")
    return ours, peer, path


def test_vocabulary_and_merges_are_equal_to_the_last_tie(pair):
    ours, peer, path = pair
    mine, want = json.loads(path.read_text(encoding="utf-8"))["model"], json.loads(peer.to_str())["model"]
    assert len(ours.tokens) == 420 and len(want["merges"]) == 420 - 256 - len(SPECIAL)
    assert mine["vocab"] == want["vocab"] and mine["merges"] == want["merges"]
    few = BPE.train(["ab ab"], 400)
    assert len(few.tokens) == 256 + 2 and few.merges == [(few.bytes[97], few.bytes[98]), (few.bytes[32], 256)]


@settings(deadline=None, database=None, max_examples=80)
@given(text=ANY)
def test_ids_are_theirs_and_any_text_comes_back(pair, text):
    ours, peer, _ = pair
    ids = ours.encode(text)
    assert ids == peer.encode(text).ids
    assert ours.decode(ids) == text


@settings(deadline=None, database=None, max_examples=80)
@given(text=ANY, cuts=st.lists(st.integers(0, 60)))
def test_a_stream_gives_the_ids_of_the_whole_however_it_is_cut(pair, text, cuts):
    at = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    chunks = [text[a:b] for a, b in zip(at, at[1:])]
    assert list(pair[0].encode_iterable(chunks)) == pair[0].encode(text)
    assert list(pair[0].encode_iterable(text)) == pair[0].encode(text)  # a character at a time


def test_a_stream_is_read_as_it_is_needed(pair):
    taken = []

    def endless():
        while True:
            taken.append("in the beginning, ")
            yield taken[-1]

    stream = pair[0].encode_iterable(endless())
    ids = [next(stream) for _ in range(300)]
    assert ids == pair[0].encode("".join(taken))[:300]
    assert len(pair[0].encode("".join(taken))) < 300 + 40


def test_words_are_those_of_the_pattern_on_every_character():
    """Every code point that this Python's Unicode assigns, beside a letter, a digit, a sign and a space."""
    unicode = Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(unicode, "isolated")
    classes = {"L": [], "N": [], "other": []}
    for c in map(chr, range(sys.maxunicode + 1)):
        category = unicodedata.category(c)
        if category not in ("Cn", "Cs", "Co") or c == "\ue000":  # of the private ones, one
            classes[category[0] if category[0] in "LN" else "other"].append(c)
    others = [f"{c}a{c}1{c}.{c} x" for c in classes["other"]] + [f"{c}a.{c}1 {c}" for c in classes["N"]]
    for text in ("".join(others), ".".join(classes["N"]), "1".join(classes["L"][::37]), "".join(classes["L"])):
        assert words_pattern().findall(text) == [word for word, _ in split.pre_tokenize_str(text)]


def test_characters_of_bytes_are_gpt2s():
    assert set(byte_characters()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert byte_characters()[32] == "Ġ" and byte_characters()[10] == "Ċ" and byte_characters()[65] == "A"
    every = bytes(range(256)).decode("latin-1")
    mapped = [word for word, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(every)]
    assert mapped == ["".join(byte_characters()[b] for b in every.encode())]


def test_special_tokens_are_split_longest_first(pair):
    ours = pair[0]
    one = lambda s: SPECIAL.index(s)
    assert ours.encode("<|end|>><|end|><|e<|en") == [
        one("<|end|>>"), one("<|end|>"), one("<|e"), one("<|e"), ours.bytes[ord("n")]
    ]  # fmt: skip
    assert BPE.train(["x"], 300).encode("<|end|>") == [BPE.train(["x"], 300).bytes[b] for b in b"<|end|>"]


def test_files_go_both_ways(pair, tmp_path):
    ours, peer, path = pair
    text = "".join(TEXTS)
    assert Tokenizer.from_file(str(path)).encode(text).ids == ours.encode(text) == BPE.load(path).encode(text)
    assert Tokenizer.from_file(str(path)).decode(ours.encode("naïve 🙂"), skip_special_tokens=False) == "naïve 🙂"
    kept = data_path() / "checkpoints" / "tokenizer.json"
    assert BPE.load(kept).encode(text) == Tokenizer.from_file(str(kept)).encode(text).ids
    BPE.load(kept).save(again := tmp_path / "again.json")
    assert (
        json.loads(again.read_text(encoding="utf-8"))["model"]["vocab"]
        == json.loads(kept.read_text())["model"]["vocab"]
    )


def test_a_word_that_comes_letter_by_letter_is_merged_once(monkeypatch):
    ours, merged = BPE.train(["ab" * 9], 260), []
    monkeypatch.setattr(ours, "word", lambda word: merged.append(word) or ours._word(word))
    assert list(ours.encode_iterable("ab" * 50 + " b")) == ours.encode("ab" * 50 + " b")
    assert len(merged) == 4  # two by each way


def test_bytes_that_are_no_text_are_marked(pair):
    ours = pair[0]
    smile = ours.encode("🙃")
    assert ours.decode([ours.bytes[0xF0]]) == "\ufffd" and ours.decode(smile) == "🙃"


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is the corpus empty"):
        BPE.train([], 300)
    with pytest.raises(ValueError, match="vocab_size = 256, but 256 bytes and 1 special tokens need more"):
        BPE.train(["a"], 256, ["<|end|>"])
    for texts, special in (("abc", ()), (["abc"], "<|end|>"), (["abc"], ["<a>", "<a>"]), (["abc"], [""])):
        with pytest.raises(ValueError, match="lists of texts, and special tokens differ and are not empty"):
            BPE.train(texts, 300, special)
    for wrong in (-100, 256):
        with pytest.raises(ValueError, match=f"ids {wrong} to {wrong}, but there are 256: 0 and on"):
            BPE.train(["a"], 256).decode([wrong])
    for change in ({"normalizer": {"type": "NFC"}}, {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}):
        BPE.train(["a"], 256).save(path := tmp_path / "changed.json")
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
        with pytest.raises(ValueError, match="this reads BPE after ByteLevel"):
            BPE.load(path)
    (tmp_path / "changed.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="this reads BPE after ByteLevel"):
        BPE.load(path)
    word_piece = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    word_piece.save(str(path := tmp_path / "tokenizer.json"))
    with pytest.raises(
        ValueError, match="is WordPiece after None, normalizer None; but this reads BPE after ByteLevel"
    ):
        BPE.load(path)
