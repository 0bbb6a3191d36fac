"""Our reading of GGUF against the `gguf` package's writer, reader and dequantisation, bit for bit; damaged files."""

import struct

import gguf
import numpy as np
import pytest
import torch

from llmstack.architectures.gguf import GGUF, TYPES, GGUFError, dequantise
from llmstack.architectures.gguf_models import to_hf

KINDS = {kind.name: number for number, kind in TYPES.items()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A one-layer Llama of 4 heads over 2, a tensor of each type, made by the `gguf` package."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    rng = np.random.default_rng(0)
    D, F, V, L, H, K = 64, 96, 50, 1, 4, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(L), writer.add_context_length(128), writer.add_embedding_length(D)
    writer.add_feed_forward_length(F), writer.add_head_count(H), writer.add_head_count_kv(K)
    writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(5000.0)
    writer.add_array("test.numbers", [1, -2, 3])
    writer.add_array("test.strings", ["a", "", "naïve ☃"])
    writer.add_bool("test.flag", True)
    writer.add_float64("test.double", 1e-300)
    shapes = {"token_embd": (V, D), "output_norm": (D,)}
    layer = {"attn_norm": (D,), "attn_q": (D, D), "attn_k": (K * 16, D), "attn_v": (K * 16, D), "attn_output": (D, D)}
    layer |= {"ffn_norm": (D,), "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    shapes |= {f"blk.0.{n}": s for n, s in layer.items()}
    types = {"attn_q": "F16", "attn_k": "Q8_0", "ffn_gate": "Q4_0", "ffn_up": "Q4_1", "ffn_down": "Q8_0"}
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType[types.get(name.rpartition(".")[2], "F32")]
        data = gguf.quantize(rng.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_the_package_s_bit_for_bit(kind):
    """Random bytes, so that every nibble, sign, subnormal and infinity of a scale occurs."""
    quantisation = TYPES[KINDS[kind]]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (1000, quantisation.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        got = dequantise(data, KINDS[kind])
        if kind in ("F64", "BF16"):  # not in every version of the package
            wide = {"F64": torch.float64, "BF16": torch.bfloat16}[kind]
            want = torch.from_numpy(data.reshape(-1)).view(wide).float().numpy()
        else:
            want = gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(-1)
    np.testing.assert_array_equal(got, want)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[finite].view(np.uint32), want[finite].view(np.uint32))


def test_bits_per_weight_are_the_package_s():
    for number, t in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (t.name, t.weights, t.bytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    assert [TYPES[KINDS[k]].bits_per_weight for k in ("Q4_0", "Q4_1", "Q8_0")] == [4.5, 5.0, 8.5]


def test_a_file_reads_as_the_package_reads_it(small):
    ours, theirs = GGUF(small), gguf.GGUFReader(small)
    assert {t.name for t in theirs.tensors} == set(ours.tensors)
    for t in theirs.tensors:
        want = gguf.dequantize(t.data, t.tensor_type)
        np.testing.assert_array_equal(ours.array(t.name), want)
        assert ours.tensors[t.name].bytes == t.n_bytes == len(ours.raw(t.name))
    plain = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == plain
    assert ours.metadata["test.strings"] == ["a", "", "naïve ☃"] and ours.metadata["test.flag"] is True


def test_queries_and_keys_are_put_back_into_halves(small):
    """llama.cpp's converter interleaves a head's rows: row 2 i is i of the first half, 2 i + 1 is i of the second."""
    file = GGUF(small)
    config, tensors = to_hf(file)
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 5000.0, True)
    for part, heads in (("q", 4), ("k", 2)):
        half = tensors[f"model.layers.0.self_attn.{part}_proj.weight"]
        as_stored = half.view(heads, 2, 8, 64).transpose(1, 2).reshape(half.shape)
        torch.testing.assert_close(as_stored, torch.from_numpy(file.array(f"blk.0.attn_{part}.weight")), rtol=0, atol=0)


def test_version_2_and_another_alignment(small, tmp_path):
    data = bytearray(small.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    (tmp_path / "v2.gguf").write_bytes(data)
    assert GGUF(tmp_path / "v2.gguf").version == 2
    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_custom_alignment(256)
    x = np.arange(40, dtype=np.float32)
    writer.add_tensor("x", x), writer.add_tensor("y", x + 1)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    file = GGUF(tmp_path / "wide.gguf")
    assert file.tensors["y"].start % 256 == 0
    np.testing.assert_array_equal(file.array("y"), x + 1)


def test_a_file_cut_anywhere_is_refused(small, tmp_path):
    whole, path = small.read_bytes(), tmp_path / "cut.gguf"
    head = GGUF(small).tensors["token_embd.weight"].start
    for length in [0, 3, 4, 7, 8, 23, *range(24, head, 41), head, head + 5, len(whole) - 4096, len(whole) - 40]:
        path.write_bytes(whole[:length])
        with pytest.raises(GGUFError, match="ends after|is empty|another format"):
            GGUF(path)


def patched(data, old, new):
    assert old in data
    return data.replace(old, new, 1)


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda d: patched(d, struct.pack("<IIQ", 9, 5, 3), struct.pack("<IIQ", 9, 5, 2**62)), "a list of 4,611"),
        (lambda d: b"\x80\x02PK" + d[4:], "another format"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version 1; this reader knows 2 and 3"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "version 50331648"),
        (lambda d: d[:16] + struct.pack("<Q", 2**60) + d[24:], "ends after|damaged"),
        (lambda d: d[:24] + struct.pack("<Q", 2**63) + d[32:], "a string of 9,223"),
        (lambda d: patched(d, b"general.architecture", b"general.architectur\xff"), "no UTF-8"),
        (
            lambda d: patched(d, b"test.flag" + struct.pack("<I", 7), b"test.flag" + struct.pack("<I", 77)),
            "has type 77",
        ),
        (
            lambda d: patched(d, b"ffn_up.weight" + struct.pack("<I", 2), b"ffn_up.weight" + struct.pack("<I", 99)),
            "99 dim",
        ),
        (
            lambda d: patched(
                d,
                b"ffn_up.weight" + struct.pack("<IQQI", 2, 64, 96, 3),
                b"ffn_up.weight" + struct.pack("<IQQI", 2, 64, 96, 12),
            ),
            "rows of 64 weights are no whole number of Q4_K blocks",
        ),
        (
            lambda d: patched(
                d,
                b"ffn_up.weight" + struct.pack("<IQQI", 2, 64, 96, 3),
                b"ffn_up.weight" + struct.pack("<IQQI", 2, 64, 96, 26),
            ),
            r"blk.0.ffn_up.weight has quantisation type 26 \(I32\); this reader knows F32, F16, Q4_0, Q4_1, Q8_0, ",
        ),
        (
            lambda d: patched(
                d, b"ffn_up.weight" + struct.pack("<IQ", 2, 64), b"ffn_up.weight" + struct.pack("<IQ", 2, 63)
            ),
            "rows of 63 weights are no whole number of Q4_1 blocks",
        ),
        (
            lambda d: patched(
                d, b"ffn_up.weight" + struct.pack("<IQ", 2, 64), b"ffn_up.weight" + struct.pack("<IQ", 2, 2**40)
            ),
            "ends after",
        ),
    ],
    ids=[
        "list",
        "magic",
        "version 1",
        "big-endian",
        "entries",
        "string",
        "UTF-8",
        "value",
        "dimensions",
        "whole blocks",
        "type",
        "block",
        "size",
    ],
)
def test_damage_is_named(small, tmp_path, damage, says):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(small.read_bytes()))
    with pytest.raises(GGUFError, match=says):
        GGUF(path)


def test_what_is_no_llama(small, tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(patched(small.read_bytes(), struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"bloom"))
    with pytest.raises(GGUFError, match="architecture 'bloom'; only llama, qwen2 are mapped"):
        to_hf(GGUF(path))
    path.write_bytes(patched(small.read_bytes(), b"llama.block_count", b"lxxma.block_count"))
    with pytest.raises(GGUFError, match="lacks 'llama.block_count'"):
        to_hf(GGUF(path))
    with pytest.raises(GGUFError, match="33 bytes are no whole number of Q8_0 blocks of 34"):
        dequantise(np.zeros(33, np.uint8), 8)


def test_lists_of_lists_are_read(tmp_path):
    """Valid metadata, whatever its depth."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x"
    inner = struct.pack("<IQ", 5, 2) + struct.pack("<ii", 1, -2), struct.pack("<IQ", 8, 1) + struct.pack("<Q", 1) + b"y"
    (tmp_path / "x.gguf").write_bytes(head + struct.pack("<IIQ", 9, 9, 2) + b"".join(inner) + bytes(64))
    assert GGUF(tmp_path / "x.gguf").metadata == {"x": [[1, -2], ["y"]]}
