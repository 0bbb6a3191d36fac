"""CTranslate2's `model.bin`, the flat binary that faster-whisper uses, and its Whisper under Hugging Face's names.

Layout, little-endian: format version, name of the specification, its revision, number of variables; for each variable
its name, rank (1 byte), dimensions (4 bytes each), data type (1 byte), length in bytes, data; then the aliases, pairs
of names for tied variables. A string has its length (2 bytes) before it and a zero byte at its end.

Queries, keys and values are stored in one matrix, stacked by rows; in cross-attention keys and values are, because
they read the encoder's output and the queries read the decoder. They are taken apart here.

Source: CTranslate2, python/ctranslate2/specs/model_spec.py (format version 6).
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

_KIND = {"gamma": "weight", "beta": "bias"}
TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}


def read(path: str | Path) -> tuple[str, dict[str, np.ndarray]]:
    """Name of the specification, and name -> array, mapped and read-only. Raises ValueError for a damaged file."""
    name, at = Path(path).name, 0
    if not Path(path).stat().st_size:
        raise ValueError(f"{name} is empty, not CTranslate2's model.bin")
    data = np.memmap(path, mode="r")

    def take(layout: str | int):
        nonlocal at
        size = layout if isinstance(layout, int) else struct.calcsize("<" + layout)
        at += size
        if at > len(data):
            raise ValueError(f"{name} ends after {len(data):,} bytes, but goes on to byte {at:,}: install it again")
        part = data[at - size : at]
        return part if isinstance(layout, int) else struct.unpack("<" + layout, part)[0]

    string = lambda: bytes(take(take("H")))[:-1].decode("latin-1")
    if (version := take("I")) != 6:
        raise ValueError(f"{name} has format version {version}, but this reader knows 6 of CTranslate2's model.bin")
    spec, _, arrays = string(), take("I"), {}
    for _ in range(take("I")):
        key = string()
        shape, kind, length = [take("I") for _ in range(take("B"))], take("B"), take("I")
        if kind not in TYPES or math.prod(shape) * np.dtype(TYPES[kind]).itemsize != length:
            raise ValueError(f"{name} is damaged: {key} of shape {shape} and type {kind} has {length:,} bytes")
        arrays[key] = np.asarray(take(length)).view(TYPES[kind]).reshape(shape)
    for _ in range(take("I")):
        alias, key = string(), string()
        if key not in arrays:
            raise ValueError(f"{name} is damaged: {alias} is an alias of {key!r}, which it does not hold")
        arrays[alias] = arrays[key]
    return spec, arrays


_LAYER = {  # what stands in one matrix there, and the modules that it becomes
    "self_attention/layer_norm": ["self_attn_layer_norm"],
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "attention/layer_norm": ["encoder_attn_layer_norm"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
    "ffn/layer_norm": ["final_layer_norm"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
_ENDS = {
    "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
    "decoder/projection/weight": "proj_out.weight",
    "encoder/position_encodings/encodings": "model.encoder.embed_positions.weight",
    "decoder/position_encodings/encodings": "model.decoder.embed_positions.weight",
}


def whisper_to_hf(path: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A Whisper's config.json and fp32 tensors under Hugging Face's names. Raises ValueError for another model."""
    spec, arrays = read(path)
    if spec != "WhisperSpec":
        raise ValueError(f"{Path(path).name} holds a {spec}; only WhisperSpec is mapped")
    needs = [*_ENDS, *(f"{side}/layer_0/ffn/linear_0/weight" for side in ("encoder", "decoder"))]
    needs += ["encoder/num_heads", "decoder/num_heads", "encoder/conv1/weight", "decoder/scale_embeddings"]
    if lacks := [name for name in needs if name not in arrays]:
        raise ValueError(f"{Path(path).name} lacks {', '.join(lacks)}: install it again")
    tensors = {}
    for name, array in arrays.items():
        if not array.ndim:
            continue  # a setting, not a weight
        array = torch.from_numpy(array.astype(np.float32))
        if layer := re.fullmatch(r"(encoder|decoder)/layer_(\d+)/(\w+/\w+)/(\w+)", name):
            side, i, part, kind = layer.groups()
            for module, piece in zip(_LAYER[part], array.chunk(len(_LAYER[part]))):
                if (module[-6:], kind) != (
                    "k_proj",
                    "bias",
                ):  # a shift of all scores alike: Whisper has none, here zeros
                    tensors[f"model.{side}.layers.{i}.{module}.{_KIND.get(kind, kind)}"] = piece
        elif name in _ENDS:
            tensors[_ENDS[name]] = array
        else:  # encoder/conv1/bias, decoder/layer_norm/gamma
            module, _, kind = name.rpartition("/")
            tensors[f"model.{module.replace('/', '.')}.{_KIND.get(kind, kind)}"] = array
    layers = lambda side: 1 + max(int(m[1]) for m in (re.match(rf"{side}/layer_(\d+)/", n) for n in arrays) if m)
    width = {side: arrays[f"{side}/layer_0/ffn/linear_0/weight"].shape[0] for side in ("encoder", "decoder")}
    vocab_size, d_model = arrays["decoder/embeddings/weight"].shape
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": d_model,
        "vocab_size": vocab_size,
        "num_mel_bins": arrays["encoder/conv1/weight"].shape[1],
        "activation_function": "gelu",
        "max_source_positions": arrays["encoder/position_encodings/encodings"].shape[0],
        "max_target_positions": arrays["decoder/position_encodings/encodings"].shape[0],
        "scale_embedding": bool(arrays["decoder/scale_embeddings"]),
        "tie_word_embeddings": True,
    }
    for side in ("encoder", "decoder"):
        config |= {f"{side}_layers": layers(side), f"{side}_ffn_dim": width[side]}
        config[f"{side}_attention_heads"] = int(arrays[f"{side}/num_heads"])
    return config, tensors
