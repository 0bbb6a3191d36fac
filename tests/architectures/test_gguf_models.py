"""Models and tokenizers out of GGUF files that the `gguf` package writes, against transformers' reading of the same."""

import copy

import gguf
import numpy as np
import pytest
import torch

from llmstack.architectures.gguf import GGUF, GGUFError
from llmstack.architectures.gguf_models import IRRELEVANT, READ, to_hf
from llmstack.architectures.hf import CheckpointError
from llmstack.architectures.zoo import pretrained, tokenizer_from_gguf

D, F, L, H, K = 256, 256, 2, 4, 2
BYTES = [f"<0x{b:02X}>" for b in range(256)]
PIECES = (
    "▁ e t a o h i n s r th he in er an the ▁t ▁th ▁the ▁a at ▁at on re hat that ▁that é 1 2 12 ▁▁ . <think>".split()
)
SPM = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]


def alphabet():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def merged(words):
    """A byte-level vocabulary whose merges spell these words from the left, and some marks after it."""
    tokens, merges = alphabet(), []
    for word in words:
        known = word[1:] in tokens[256:]  # joined to its space at last, as the merges before make it
        if known:
            tokens.append(word)
            merges.append(f"{word[0]} {word[1:]}")
        for i in range(2, 0 if known else len(word) + 1):
            if word[:i] not in tokens:
                tokens.append(word[:i])
                merges.append(f"{word[: i - 1]} {word[i - 1]}")
    return tokens, merges


def write(path, arch="llama", kinds=None, tokenizer="llama", head=D // H, keys=(), more=(), rope_freqs=None, pre=None):
    """A small model. `kinds`: a tensor's type by its part; `keys`: further metadata (name, value)."""
    writer, rng = gguf.GGUFWriter(path, arch), np.random.default_rng(0)
    writer.add_block_count(L), writer.add_context_length(128), writer.add_embedding_length(D)
    writer.add_feed_forward_length(F), writer.add_head_count(H), writer.add_head_count_kv(K)
    writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(5000.0), writer.add_file_type(15)
    tokens = vocabulary(writer, tokenizer, pre)
    for name, value in keys:
        add = {bool: writer.add_bool, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add.get(type(value), writer.add_uint32)(name, value)
    shapes = {"token_embd": (len(tokens), D), "output_norm": (D,), "output": (len(tokens), D)}
    layer = {"attn_norm": (D,), "attn_q": (H * head, D), "attn_k": (K * head, D), "attn_v": (K * head, D)}
    layer |= {"attn_output": (D, H * head), "ffn_norm": (D,), "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    shapes |= {f"blk.{n}.{name}": shape for n in range(L) for name, shape in layer.items()}
    weights = {f"{name}.weight": rng.normal(size=s, scale=0.2) + (len(s) == 1) for name, s in shapes.items()}
    if arch == "qwen2":
        biases = [f"blk.{n}.attn_{x}" for n in range(L) for x in "qkv"]
        weights |= {f"{name}.bias": rng.normal(size=shapes[name][0]) for name in biases}
    weights |= dict(more) | ({} if rope_freqs is None else {"rope_freqs.weight": rope_freqs})
    for name, values in weights.items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name.split(".")[-2], "F32")]
        values = np.asarray(values, np.float32)
        try:
            data = gguf.quantize(values, kind)
        except NotImplementedError:  # the package writes no K types: any bytes with a small scale are one
            data = blocks(values, kind, rng)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(values, kind, rng):
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (len(values), values.shape[1] // weights, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    if kind.name == "Q6_K":
        data[..., -2:] = scale
    else:
        data[..., :2] = data[..., 2:4] = scale
    return data.reshape(len(values), -1)


def vocabulary(writer, kind, pre):
    if kind == "llama":
        writer.add_tokenizer_model("llama")
        types = [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 1) + [4]
        tokens, scores = SPM, [0.0] * 259 + [-float(i) for i in range(len(PIECES))]
        writer.add_token_scores(scores)
        writer.add_bos_token_id(1), writer.add_eos_token_id(2), writer.add_unk_token_id(0)
    else:
        words = "the that Ġthe Ġthat Ġis 12 123 don 't Ċ ĠĠ".split()
        tokens, merges = merged(words)
        tokens += ["<|end|>", "<|begin|>", "<think>"]
        types = [1] * (len(tokens) - 3) + [3, 3, 4]
        writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre(pre or "gpt-2"), writer.add_token_merges(merges)
        writer.add_bos_token_id(len(tokens) - 2), writer.add_eos_token_id(len(tokens) - 3)
    writer.add_token_list(tokens), writer.add_token_types(types)
    writer.add_chat_template(
        "{{ bos_token }}{{ unk_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    return tokens


def logits_of(path):
    """Ours and transformers', from the same file."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = pretrained(path)
    peer = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = torch.randint(len(tokenizer), (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids), peer(ids).logits


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.std().item())


MIXED = dict(attn_q="Q4_K", attn_k="Q5_K", attn_v="Q6_K", attn_output="BF16", ffn_gate="Q5_0", ffn_up="Q5_1")
MIXED |= dict(ffn_down="Q4_K", token_embd="Q8_0", output="Q6_K")


def test_the_types_that_files_have_are_read_as_transformers_reads_them(tmp_path):
    path = write(tmp_path / "m.gguf", kinds=MIXED)
    assert {GGUF(path).tensors[f"blk.0.{part}.weight"].type_id for part in ("attn_q", "attn_v")} == {12, 14}
    same(*logits_of(path))


def test_qwen2_with_its_biases_and_halves(tmp_path):
    same(*logits_of(write(tmp_path / "q.gguf", "qwen2", tokenizer="gpt2", pre="qwen2")))


def test_a_head_of_another_width_than_d_over_h(tmp_path):
    keys = [
        ("llama.attention.key_length", 32),
        ("llama.attention.value_length", 32),
        ("llama.rope.dimension_count", 32),
    ]
    path = write(tmp_path / "h.gguf", head=32, keys=keys)
    assert to_hf(GGUF(path))[0]["head_dim"] == 32
    same(*logits_of(path))
    with pytest.raises(CheckpointError, match=r"self_attn.\w_proj.weight is .* in w.gguf, but what the file says"):
        pretrained(write(tmp_path / "w.gguf", head=32))


def test_rope_freqs_are_llama_3_s_scaling(tmp_path):
    """The divisors that the converter writes for Llama 3.1 and 3.2; transformers has the formula, and leaves out the
    tensor when it reads the file."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    told = dict(rope_type="llama3", rope_theta=5000.0, low_freq_factor=1.0, high_freq_factor=4.0)
    for factor in (8.0, 32.0):
        told |= dict(factor=factor, original_max_position_embeddings=8192)
        config = LlamaConfig(hidden_size=D, num_attention_heads=H, rope_parameters=told)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 5000.0 ** -(torch.arange(0, D // H, 2).float() / (D // H))
        path = write(tmp_path / f"r{factor}.gguf", rope_freqs=(plain / scaled).numpy())
        config, tensors = to_hf(GGUF(path))
        assert config["rope_parameters"] == pytest.approx(told)
        peer = LlamaForCausalLM(LlamaConfig(**copy.deepcopy(config), attn_implementation="eager")).eval()
        peer.load_state_dict(tensors, strict=False)
        ids = torch.arange(120)[None] % 50
        with torch.no_grad():
            got, want = pretrained(path)[0](ids), peer(ids).logits
            without = pretrained(write(tmp_path / "plain.gguf"))[0](ids)
        same(got, want)
        assert (got - without).abs().max() > 0.01 * want.std()
    own = np.linspace(1, 3, D // H // 2).astype(np.float32)
    rope = to_hf(GGUF(write(tmp_path / "own.gguf", rope_freqs=own)))[0]["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["short_factor"] == rope["long_factor"] == own.tolist()
    ones = to_hf(GGUF(write(tmp_path / "ones.gguf", rope_freqs=np.ones(D // H // 2))))[0]
    assert ones["rope_parameters"]["rope_type"] == "default"
    with pytest.raises(GGUFError, match=r"rope_freqs.weight is \[7\], but a head has 32 pairs"):
        to_hf(GGUF(write(tmp_path / "bad.gguf", rope_freqs=np.ones(7))))


@pytest.mark.parametrize(
    "keys, want",
    [
        ([("rope.scaling.type", "none"), ("rope.scaling.finetuned", True)], dict(rope_type="default")),
        ([("rope.scaling.type", "linear"), ("rope.scaling.factor", 4.0)], dict(rope_type="linear", factor=4.0)),
        ([("rope.scale_linear", 2.0)], dict(rope_type="linear", factor=2.0)),
        ([("rope.scaling.factor", 2.0)], dict(rope_type="linear", factor=2.0)),
        (
            [("rope.scaling.type", "yarn"), ("rope.scaling.factor", 4.0), ("rope.scaling.original_context_length", 32)],
            dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0),
        ),
    ],
    ids=["none", "linear", "old linear", "untyped", "yarn"],
)
def test_scalings_of_rope(tmp_path, keys, want):
    path = write(tmp_path / "s.gguf", keys=[(f"llama.{key}", value) for key, value in keys])
    assert to_hf(GGUF(path))[0]["rope_parameters"] == {"rope_theta": 5000.0, **want}


@pytest.mark.parametrize(
    "keys, says",
    [
        ([("llama.rope.dimension_count", 32)], "llama.rope.dimension_count = 32, but only a head's whole width, 64"),
        ([("llama.attention.value_length", 32)], "attention.value_length = 32"),
        ([("llama.attention.clamp_kqv", 8.0)], "llama.attention.clamp_kqv = 8.0, which no dial here says"),
        ([("llama.expert_count", 8)], "llama.expert_count = 8"),
        ([("llama.logit_scale", 2.0)], "llama.logit_scale"),
        ([("llama.rope.scaling.type", "longrope")], "rope.scaling.type = 'longrope'"),
        ([("split.count", 3)], "one of 3 parts: llama-gguf-split --merge"),
    ],
    ids=lambda k: k[0][0] if isinstance(k, list) else "",
)
def test_keys_that_no_dial_says_are_refused_by_name(tmp_path, keys, says):
    with pytest.raises(GGUFError, match=says):
        to_hf(GGUF(write(tmp_path / "k.gguf", keys=keys)))


def test_every_key_of_the_specification_is_read_irrelevant_or_refused(tmp_path):
    """Keys.Attention, Keys.Rope and Keys.LLM of the package: none is passed over without a decision."""
    groups = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
    names = {v.removeprefix("{arch}.") for g in groups for v in vars(g).values() if str(v).startswith("{arch}.")}
    assert set(READ) - {"rope.scale_linear"} <= names
    file = GGUF(write(tmp_path / "k.gguf"))
    for name in names - set(READ) - set(IRRELEVANT):
        file.metadata[f"llama.{name}"] = 7
        with pytest.raises(GGUFError, match=rf"llama\.{name} = 7, which no dial here says"):
            to_hf(file)
        del file.metadata[f"llama.{name}"]


def test_valid_metadata_is_not_called_damaged(tmp_path):
    file = GGUF(write(tmp_path / "l.gguf"))
    file.metadata["llama.attention.head_count_kv"] = [K] * L
    assert to_hf(file)[0]["num_key_value_heads"] == K  # for each layer, all alike
    for key, value in (("attention.head_count", [4, 2]), ("attention.head_count", 0), ("context_length", "long")):
        other = GGUF(tmp_path / "l.gguf")
        other.metadata[f"llama.{key}"] = value
        with pytest.raises(GGUFError, match=f"llama.{key} = ") as error:
            to_hf(other)
        assert "damaged" not in str(error.value)


def test_tensors_without_a_place(tmp_path):
    """Tensors that change the result must not be left out in silence."""
    for name in ("rope_freqs0.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "blk.0.attn_q.scale"):
        path = write(tmp_path / "t.gguf", more={name: np.ones(4)})
        with pytest.raises(GGUFError, match=f"holds {name}; a model of llama here has no place for that"):
            to_hf(GGUF(path))


def test_a_file_by_its_path_and_a_folder_of_one(tmp_path):
    path = write(tmp_path / "m.gguf")
    model, tokenizer = pretrained(str(path))
    assert model.config.name == "m.gguf" and len(tokenizer) == len(SPM)
    with pytest.raises(CheckpointError, match=r"holds GGUF: give the file itself, pretrained\('.*m.gguf'\)"):
        pretrained(tmp_path)
    (tmp_path / "x.txt").write_text("words")
    with pytest.raises(GGUFError, match="x.txt begins with b'word', not b'GGUF'"):
        pretrained(tmp_path / "x.txt")


TEXTS = [
    "the that",
    " that  the\nat",
    "naïve été ½ 12112 🦊",
    "<s>the</s> that",
    "a<think>the</think>",
    "",
    " ",
    "12 1234 don't DON'T",
]


@pytest.mark.parametrize(
    "kind, pre", [("llama", None), *(("gpt2", p) for p in ("gpt-2", "llama-bpe", "qwen2", "tekken"))]
)
def test_tokenizers_are_transformers(tmp_path, kind, pre):
    from transformers import AutoTokenizer

    path = write(tmp_path / "t.gguf", tokenizer=kind, pre=pre, keys=[("tokenizer.ggml.add_bos_token", True)])
    ours, peer = tokenizer_from_gguf(GGUF(path)), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        for special in (True, False):
            want = peer(text, add_special_tokens=special).input_ids
            assert ours.encode(text, special=special) == want, text
        assert ours.tokens(want) == peer.convert_ids_to_tokens(want)
        assert ours.decode(want) == peer.decode(want, skip_special_tokens=True), text
        assert ours.decode(want, special=True) == peer.decode(want), text
    assert (ours.bos, ours.eos, ours.eos_ids) == (peer.bos_token_id, peer.eos_token_id, (peer.eos_token_id,))
    talk = [{"role": "user", "content": "the"}]
    assert ours.apply_chat_template(talk) == peer.apply_chat_template(talk, tokenize=False)
    assert ours.apply_chat_template(talk, tokenize=True) == peer.apply_chat_template(talk)["input_ids"]


def test_what_transformers_leaves_out_of_a_tokenizer(tmp_path):
    ids = lambda text, **how: tokenizer_from_gguf(GGUF(write(tmp_path / "t.gguf", **how))).encode(text)
    at = lambda *tokens: [SPM.index(t) for t in tokens]
    assert ids("the") == at("<s>", "▁the")  # SentencePiece's begin a text unless the file says otherwise
    assert ids("the", keys=[("tokenizer.ggml.add_bos_token", False)]) == at("▁the")
    assert ids("the", keys=[("tokenizer.ggml.add_space_prefix", False)]) == at("<s>", "the")
    assert ids("the", keys=[("tokenizer.ggml.add_eos_token", True)]) == at("<s>", "▁the", "</s>")
    file = GGUF(
        write(tmp_path / "e.gguf", keys=[("tokenizer.ggml.eot_token_id", 7), ("tokenizer.ggml.eom_token_id", 2)])
    )
    assert tokenizer_from_gguf(file).eos_ids == (2, 7)
    file = GGUF(write(tmp_path / "w.gguf", tokenizer="gpt2", pre="llama-bpe"))
    assert len(tokenizer_from_gguf(file).encode("the")) == 2  # <|begin|>, which llama.cpp adds to Llama 3's
    file.metadata["tokenizer.ggml.merges"] = file.metadata["tokenizer.ggml.merges"][:2]
    assert len(tokenizer_from_gguf(file).encode("that")) == 2  # a word that is a token is taken whole
    file.metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert len(tokenizer_from_gguf(file).encode("that")) == 3


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model": "bert"}, r"has the tokenizer \('bert', None\); byte-level BPE, 'gpt2' with pre gpt-2, smollm"),
        ({"model": "gpt2", "pre": "poro"}, r"\('gpt2', 'poro'\)"),
        ({"scores": None}, "lacks tokenizer.ggml's tokens and scores"),
        ({"tokens": None}, "lacks tokenizer.ggml's tokens and scores"),
        ({"precompiled_charsmap": [1, 2]}, "has tokenizer.ggml.precompiled_charsmap"),
        ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces = True"),
        ({"scores": [0.0]}, "damaged tokenizer"),
        ({"token_type": [1]}, "damaged tokenizer"),
        ({"bos_token_id": 10**6}, "damaged tokenizer"),
        ({"tokens": ["a"] * len(SPM)}, "damaged tokenizer: the token 'a' stands twice"),
    ],
    ids=str,
)
def test_tokenizers_that_are_refused(tmp_path, change, says):
    file = GGUF(write(tmp_path / "t.gguf"))
    file.metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    file.metadata = {key: value for key, value in file.metadata.items() if value is not None}
    with pytest.raises(GGUFError, match=says):
        tokenizer_from_gguf(file)
    assert len(tokenizer_from_gguf(GGUF(tmp_path / "t.gguf"))) == len(SPM)
