"""GGUF, the file format of llama.cpp: one file holds the configuration, the tokenizer and the quantised weights.

Layout, little-endian: magic `GGUF`, version (2 or 3), number of tensors, number of metadata entries; then the entries
(name, type, value), then a line for each tensor (name, dimensions with the fastest first, type, offset); then padding
to `general.alignment` (32 bytes unless said otherwise) and the data. The file is memory-mapped, so opening reads the
head alone, and a tensor's bytes come from disk when they are asked for.

A row of weights is cut into blocks of 32 that share a scale d (fp16), and in Q4_1 a minimum m (fp16):

    type   block                                    weight      bytes  bits a weight
    Q4_0   d, 16 bytes of nibbles                   (q - 8) d   18     4.5
    Q4_1   d, m, 16 bytes of nibbles                q d + m     20     5.0
    Q8_0   d, 32 signed bytes                       q d         34     8.5
    F16, BF16, F32 are stored as they are                       2, 4   16, 32

The low nibble of byte j is weight j of its block, the high nibble is weight j + 16. Products and sums are in fp32.
The K types have blocks of 256, cut into 8 or 16 parts whose scales and minima are numbers of 4 to 8 bits times the
block's own two; the IQ types look groups of weights up in tables. Those, Q5 and the rest are the `gguf`
package's.

A file mixes types: Q4_K_M has Q4_K with half of the value and down projections in Q6_K.

Source: the GGUF specification and the block structures of the ggml project (docs/gguf.md, ggml-common.h).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class GGUFError(ValueError):
    """A file that is not GGUF, ends too early, or holds what this reader does not know; the message says which."""


def _halves(blocks: np.ndarray) -> np.ndarray:
    """Two nibbles a byte, [N, 16] -> [N, 32]."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=1)


def _fp16(two_bytes: np.ndarray) -> np.ndarray:
    return two_bytes.view("<f2").astype(np.float32)


def q4_0(blocks: np.ndarray) -> np.ndarray:
    """uint8 [N, 18] -> fp32 [N, 32]."""
    return _fp16(blocks[:, :2]) * (_halves(blocks[:, 2:]).astype(np.int8) - np.int8(8))


def q4_1(blocks: np.ndarray) -> np.ndarray:
    """uint8 [N, 20] -> fp32 [N, 32]."""
    values = _fp16(blocks[:, :2]) * _halves(blocks[:, 4:])
    values += _fp16(blocks[:, 2:4])
    return values


def q8_0(blocks: np.ndarray) -> np.ndarray:
    """uint8 [N, 34] -> fp32 [N, 32]."""
    return _fp16(blocks[:, :2]) * blocks[:, 2:].view(np.int8)


class Quantisation(NamedTuple):
    """How one block of weights is stored: its name, weights a block, bytes a block, and the way back to fp32."""

    name: str
    weights: int
    bytes: int
    decode: Callable[[np.ndarray], np.ndarray]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights


def bf16(blocks: np.ndarray) -> np.ndarray:
    """uint8 [N, 2] -> fp32 [N, 1]: the upper half of an fp32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _packaged(name: str) -> Callable[[np.ndarray], np.ndarray]:
    def decode(blocks: np.ndarray) -> np.ndarray:
        import gguf

        try:
            return gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
        except (KeyError, NotImplementedError):
            raise GGUFError(f"the installed gguf package does not know {name}: pip install --upgrade gguf") from None

    return decode


TYPES = {
    0: Quantisation("F32", 1, 4, lambda b: b.view("<f4").astype(np.float32)),
    1: Quantisation("F16", 1, 2, _fp16),
    2: Quantisation("Q4_0", 32, 18, q4_0),
    3: Quantisation("Q4_1", 32, 20, q4_1),
    8: Quantisation("Q8_0", 32, 34, q8_0),
    28: Quantisation("F64", 1, 8, lambda b: b.view("<f8").astype(np.float32)),
    30: Quantisation("BF16", 1, 2, bf16),
}
_OTHERS = """
6 Q5_0 32 22, 7 Q5_1 32 24, 10 Q2_K 256 84, 11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210,
16 IQ2_XXS 256 66, 17 IQ2_XS 256 74, 18 IQ3_XXS 256 98, 19 IQ1_S 256 50, 20 IQ4_NL 32 18, 21 IQ3_S 256 110,
22 IQ2_S 256 82, 23 IQ4_XS 256 136, 29 IQ1_M 256 56, 34 TQ1_0 256 54, 35 TQ2_0 256 66, 39 MXFP4 32 17
"""
for _line in _OTHERS.split(","):
    _id, _name, _weights, _size = _line.split()
    TYPES[int(_id)] = Quantisation(_name, int(_weights), int(_size), _packaged(_name))
WHOLE_NUMBERS = {24: "I8", 25: "I16", 26: "I32", 27: "I64", 9: "Q8_1", 15: "Q8_K"}


def dequantise(data: np.ndarray, type_id: int) -> np.ndarray:
    """Stored bytes -> fp32 [weights]. Raises GGUFError for a type outside TYPES or a length that is no whole block."""
    kind = _kind(type_id)
    if data.nbytes % kind.bytes:
        raise GGUFError(f"{data.nbytes} bytes are no whole number of {kind.name} blocks of {kind.bytes}")
    return kind.decode(data.view(np.uint8).reshape(-1, kind.bytes)).reshape(-1)


def _kind(type_id: int, of: str = "the data") -> Quantisation:
    if type_id not in TYPES:
        known = ", ".join(t.name for t in TYPES.values())
        raise GGUFError(
            f"{of} has quantisation type {type_id} ({WHOLE_NUMBERS.get(type_id, 'unknown')}); "
            f"this reader knows {known}. Use a file in one of these (llama-quantize makes them)"
        )
    return TYPES[type_id]


class Tensor(NamedTuple):
    """Where one tensor lies. `shape` is slowest first, as in NumPy: [out, in]."""

    shape: tuple[int, ...]
    type_id: int
    start: int  # bytes from the beginning of the file

    @property
    def bytes(self) -> int:
        kind = TYPES[self.type_id]
        return math.prod(self.shape) // kind.weights * kind.bytes


class GGUF:
    """An open file: `.version`, `.metadata` (name -> value), `.tensors` (name -> Tensor); `.array(name)` in fp32.

    Raises FileNotFoundError, or GGUFError for a damaged or unknown file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.stat().st_size:
            raise GGUFError(f"{self.path.name} is empty, not GGUF")
        self._bytes = np.memmap(self.path, mode="r")
        self._view, self._at = memoryview(self._bytes), 0
        if (magic := bytes(self._view[:4])) != b"GGUF":
            raise GGUFError(f"{self.path.name} begins with {magic!r}, not b'GGUF': it is another format")
        _, self.version = self._take("II")
        if self.version not in (2, 3):
            raise GGUFError(
                f"{self.path.name} is GGUF version {self.version}; this reader knows 2 and 3, little-endian"
            )
        n_tensors, n_entries = self._take("QQ")
        self.metadata: dict[str, Any] = {self._string(): self._value(*self._take("I")) for _ in range(n_entries)}
        lines = [self._tensor_line() for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise GGUFError(f"{self.path.name}: general.alignment = {alignment!r}, but it must be a number of bytes")
        data = -(-self._at // alignment) * alignment
        self.tensors = {name: Tensor(shape, kind, data + offset) for name, shape, kind, offset in lines}
        for name, t in self.tensors.items():
            if t.start + t.bytes > len(self._view):
                self._ended(f"{name} needs bytes {t.start:,} to {t.start + t.bytes:,}")

    def _ended(self, what: str):
        raise GGUFError(f"{self.path.name} ends after {len(self._view):,} bytes, but {what}: fetch the file again")

    def _take(self, layout: str) -> tuple:
        size = struct.calcsize("<" + layout)
        if self._at + size > len(self._view):
            self._ended(f"the head goes on to byte {self._at + size:,}")
        self._at += size
        return struct.unpack_from("<" + layout, self._view, self._at - size)

    def _string(self) -> str:
        (length,) = self._take("Q")
        if self._at + length > len(self._view):
            self._ended(f"a string of {length:,} bytes begins at byte {self._at:,}")
        self._at += length
        try:
            return str(self._view[self._at - length : self._at], "utf-8")
        except UnicodeDecodeError:
            raise GGUFError(
                f"{self.path.name} is damaged: the string at byte {self._at - length:,} is no UTF-8"
            ) from None

    _NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def _value(self, kind: int) -> Any:
        if kind in self._NUMBERS:
            return self._take(self._NUMBERS[kind])[0]
        if kind == 8:
            return self._string()
        if kind == 9:
            kind, length = self._take("IQ")
            if length > len(self._view):
                self._ended(f"a list of {length:,} values begins at byte {self._at:,}")
            if kind in self._NUMBERS:
                return list(self._take(f"{length}{self._NUMBERS[kind]}"))
            if kind == 8:
                return [self._string() for _ in range(length)]
            if kind == 9:
                return [self._value(9) for _ in range(length)]
        raise GGUFError(f"{self.path.name} is damaged: a metadata value before byte {self._at:,} has type {kind}")

    def _tensor_line(self) -> tuple[str, tuple[int, ...], int, int]:
        name, (n_dims,) = self._string(), self._take("I")
        if n_dims > 8:
            raise GGUFError(f"{self.path.name} is damaged: {name} has {n_dims} dimensions")
        shape = self._take(f"{n_dims}Q")[::-1]
        type_id, offset = self._take("IQ")
        kind = _kind(type_id, of=name)
        if math.prod(shape[-1:]) % kind.weights:
            raise GGUFError(f"{name}: rows of {shape[-1]} weights are no whole number of {kind.name} blocks")
        return name, shape, type_id, offset

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes as stored, uint8 [bytes], mapped and read-only."""
        t = self.tensors[name]
        return np.asarray(self._bytes[t.start : t.start + t.bytes])

    def array(self, name: str) -> np.ndarray:
        """A tensor in fp32, in its own shape."""
        t = self.tensors[name]
        return dequantise(self.raw(name), t.type_id).reshape(t.shape)
