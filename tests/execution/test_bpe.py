"""Words, vocabulary, merges and ids are those of the library `tokenizers`; any text comes back; streams are lazy."""

import json
import re
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from llmstack.execution.bpe import BPE, WORDS, byte_characters
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
    parts = [
        part for text in texts for part in re.split("<\\|end\\|>>?|<\\|e|é¦", text)
    ]  # theirs merges inside special tokens
    peer.train_from_iterator(parts, trainers.BpeTrainer(vocab_size=size, **how))
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
        assert WORDS.findall(text) == [word for word, _ in split.pre_tokenize_str(text)]


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
    (tmp_path / "changed.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="this reads .*BPE"):
        BPE.load(tmp_path / "changed.json")
    word_piece = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    word_piece.save(str(path := tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="is {'model': 'WordPiece', .*; but this reads {'model': 'BPE'"):
        BPE.load(path)
    for allowed, told in (("<|end|>", "<|end|>"), (["<|user|>"], "<|user|>")):
        with pytest.raises(ValueError, match=re.escape(f"allowed_special has ['{told}']")):
            BPE.train(["a"], 257, ["<|end|>"]).encode("a", allowed)


# what a file may say of added tokens: their letters begin other words, stand in white space, are each other's start
FLAGS = st.fixed_dictionaries(
    dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], st.booleans())
)
ADDED = ("<a>", "<a>>", "end", " mid ", "é")
AROUND = st.one_of(
    st.sampled_from([*ADDED, " ", "\t ", "\n", "x", "_", "9", ".", "\u0301", "\x1c", "’"]), st.text(max_size=2)
)


@settings(deadline=None, database=None, max_examples=150)
@given(flags=st.tuples(*[FLAGS] * len(ADDED)), pieces=st.lists(AROUND, max_size=12), cut=st.integers(0, 12))
def test_added_tokens_are_found_as_theirs_whatever_their_flags(tmp_path_factory, flags, pieces, cut):
    peer = Tokenizer(models.BPE({c: i for i, c in enumerate(byte_characters())}, []))
    peer.pre_tokenizer, peer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for token, own in zip(ADDED, flags):
        special = own["special"]
        plain = {name: flag for name, flag in own.items() if name != "special"}
        (peer.add_special_tokens if special else peer.add_tokens)([AddedToken(token, special=special, **plain)])
    peer.save(str(path := tmp_path_factory.mktemp("added") / "tokenizer.json"))
    ours, text = BPE.load(path), "".join(pieces)
    assert ours.encode(text) == peer.encode(text).ids
    ours.save(path)
    assert json.loads(path.read_text(encoding="utf-8"))["added_tokens"] == json.loads(peer.to_str())["added_tokens"]
    if not any(own["single_word"] for own in flags):
        assert list(ours.encode_iterable(["".join(pieces[:cut]), "".join(pieces[cut:])])) == peer.encode(text).ids
        assert list(ours.encode_iterable(text)) == peer.encode(text).ids
    else:
        with pytest.raises(ValueError, match="which a stream cannot find"):
            list(ours.encode_iterable([text]))
    peer.encode_special_tokens = True
    assert ours.encode(text, allowed_special=()) == peer.encode(text).ids


@settings(deadline=None, database=None, max_examples=80)
@given(text=ANY)
def test_special_tokens_of_a_user_are_letters(pair, text):
    ours, peer, path = pair
    plain = Tokenizer.from_file(str(path))
    plain.encode_special_tokens = True
    ids = ours.encode(text, allowed_special=())
    assert ids == plain.encode(text).ids == list(ours.encode_iterable(text, allowed_special=()))
    assert not set(ids) & set(ours.special.values()) and ours.decode(ids) == text
    only = ours.encode("<|end|>é¦<|e", allowed_special={"<|end|>"})
    assert only[0] == ours.special["<|end|>"] and not set(only[1:]) & set(ours.special.values())


def changed(path, change, tmp_path):
    """The file with some fields replaced; "model.x" is a field of the model."""
    file = json.loads(path.read_text(encoding="utf-8"))
    for name, value in change.items():
        part, _, field = name.rpartition(".")
        (file[part] if part else file)[field] = value
    (out := tmp_path / "changed.json").write_text(json.dumps(file), encoding="utf-8")
    return out


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
TEMPLATE = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truncation", {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}),
        ("padding", {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<"}),
        ("normalizer", {"type": "NFC"}),
        ("pre_tokenizer.add_prefix_space", True),
        ("pre_tokenizer.use_regex", False),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [LEVEL]}),
        ("post_processor", TEMPLATE),
        ("decoder", None),
        ("decoder", {"type": "Fuse"}),
        ("model.dropout", 0.1),
        ("model.continuing_subword_prefix", "##"),
        ("model.end_of_word_suffix", "</w>"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(pair, tmp_path, field, value):
    with pytest.raises(ValueError, match=field.split(".")[0]) as refusal:
        BPE.load(changed(pair[2], {field: value}, tmp_path))
    named = value["type"] if isinstance(value, dict) and "type" in value else field.split(".")[-1]
    assert named in str(refusal.value)


def test_fields_that_change_nothing_are_read(pair, tmp_path):
    ours, _, path = pair
    idle = {"model.unk_token": "<|end|>", "model.fuse_unk": True, "model.byte_fallback": True, "model.dropout": 0.0}
    idle |= {"pre_tokenizer": LEVEL, "post_processor": LEVEL, "model.continuing_subword_prefix": ""}
    file, text = changed(path, idle, tmp_path), "".join(TEXTS)
    assert Tokenizer.from_file(str(file)).encode(text).ids == BPE.load(file).encode(text) == ours.encode(text)
    whole = json.loads(path.read_text(encoding="utf-8"))
    del whole["model"]["type"]  # as in GPT-2's own file
    file.write_text(json.dumps(whole), encoding="utf-8")
    assert BPE.load(file).encode(text) == ours.encode(text)


def test_a_word_that_has_an_id_gets_it_where_merges_are_ignored(pair, tmp_path):
    vocab = json.loads(pair[2].read_text(encoding="utf-8"))["model"]["vocab"] | {"Ġwhole": 420}
    for ignored in (False, True):
        file = changed(pair[2], {"model.vocab": vocab, "model.ignore_merges": ignored}, tmp_path)
        ours, peer = BPE.load(file), Tokenizer.from_file(str(file))
        ours.save(file)
        ids = ours.encode("the whole earth, wholes")
        assert ids == peer.encode("the whole earth, wholes").ids == BPE.load(file).encode("the whole earth, wholes")
        assert (420 in ids) == ignored


def test_ids_may_have_holes_and_any_text_comes_back(pair, tmp_path):
    _, peer, path = pair
    file = json.loads(path.read_text(encoding="utf-8"))
    file["model"]["vocab"] = {token: 3 * i for token, i in file["model"]["vocab"].items()}
    for token in file["added_tokens"]:
        token["id"] *= 3
    (holes := tmp_path / "holes.json").write_text(json.dumps(file), encoding="utf-8")
    ours, text = BPE.load(holes), "".join(TEXTS)
    assert (
        ours.encode(text) == Tokenizer.from_file(str(holes)).encode(text).ids == [3 * i for i in peer.encode(text).ids]
    )
    assert ours.decode(ours.encode(text)) == text
    assert len(ours) == 3 * 419 + 1 and len(pair[0]) == 420  # rows of an embedding
    with pytest.raises(ValueError, match="id 4 stands for no token"):
        ours.decode([3, 4])
    ours.save(holes)
    assert json.loads(holes.read_text(encoding="utf-8"))["model"]["vocab"] == file["model"]["vocab"]


def test_a_vocabulary_that_does_not_fit_is_refused(pair, tmp_path):
    path = pair[2]
    vocab = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    lacking = {token: i for token, i in vocab.items() if token not in ("!", "Ġ")}
    for change, told in (
        ({"model.vocab": lacking, "model.merges": []}, r"2 bytes have no token \(0x20, 0x21, …\)"),
        ({"model.merges": [["a", "zz"]]}, "model.merges join .'zz'., which are not in model.vocab"),
        ({"model.merges": ["Z Z"]}, "merge 0 makes b'ZZ', which has no id"),
        ({"model.vocab": vocab | {"▁a": 420}}, "model.vocab has '▁a', which is not made of ByteLevel's"),
        ({"model.vocab": vocab | {"ZZ": 5}}, "two tokens .* have one id"),
        ({"model.vocab": vocab | {"<|end|>": 420}}, "'<.end.>'. have one id in added_tokens and another"),
    ):
        with pytest.raises(ValueError, match=told):
            BPE.load(changed(path, change, tmp_path))
    same = BPE.train(["馬馭"], 258, ["é¦"])  # the token's letters stand for the bytes of half the character
    assert b"\xe9\xa6" in same.tokens
    with pytest.raises(ValueError, match="both 'é¦' in a file"):
        same.save(tmp_path / "same.json")


def test_nothing_is_merged_inside_special_tokens():
    ours = BPE.train(["<|endoftext|>a b<|endoftext|>"] * 9, 300, ["<|endoftext|>"])
    assert len(ours) == 256 + 1 + 1 and ours.tokens[-1] == b" b"


def test_equal_pairs_are_taken_by_ids_or_by_bytes():
    """The corpus of Sennrich et al. 2015, figure 1, and what greedy merging by hand gives under either rule."""
    texts = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3
    of = lambda ties: [token.decode() for token in BPE.train(texts, 262, ties=ties).tokens[256:]]
    assert of("bytes") == ["st", "est", "ow", "low", "west", "ne"]
    assert of("ids")[:2] == ["es", "est"]
    with pytest.raises(ValueError, match="ties = 'first'"):
        BPE.train(texts, 262, ties="first")


@settings(deadline=None, database=None, max_examples=40)
@given(words=st.lists(st.text("ab\xff", min_size=1, max_size=9), min_size=1, max_size=6))
def test_merges_by_bytes_are_those_of_counting_all_pairs_anew(words):
    ours = BPE.train(words, 264, ties="bytes")
    cut = [[bytes([b]) for b in word.encode()] for text in words for word in WORDS.findall(text)]
    for merged in ours.tokens[256:]:
        counts = {}
        for word in cut:
            for pair in zip(word, word[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        a, b = max(counts, key=lambda pair: (counts[pair], pair))
        assert merged == a + b
        for word in cut:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (a, b):
                    word[i : i + 2] = [a + b]
                i += 1


def test_a_long_word_is_theirs_and_looks_at_few_pairs(pair, monkeypatch):
    ours, peer, _ = pair
    text = "heavenandearthaaaaaaa" * 800
    assert ours.encode(text) == peer.encode(text).ids
    asked = []

    class Ranks(dict):
        def __contains__(self, key):
            asked.append(key)
            return super().__contains__(key)

    monkeypatch.setattr(ours, "ranks", Ranks(ours.ranks))
    ours._word(text)
    assert len(asked) < 3 * len(text)  # a pair for each letter, two for each merge
