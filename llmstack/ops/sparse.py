"""Matrices whose zeros are not stored: y = x Wᵀ for W [N, K] with a share d of its values kept.

    CSR       values [nnz], columns [nnz], and where each row begins [N + 1]                 any pattern
    blocks    values [blocks, b, b], block columns [blocks], where each row of blocks begins  zeros in squares of b
    2:4       values [N, K/2] and the places of two in each four, 2 bits each [N, K/8]        Ampere's tensor cores

    bytes of W, values of v bytes, indices of 4     CSR     d N K (v + 4) + 4 (N + 1)
                                                    blocks  d N K (v + 4/b²) + 4 (N/b + 1)
                                                    2:4     N K v/2 + N K/8
    operations with M rows of x                     2 M d N K; 2:4 as a dense matmul of half the depth

An index an element is why CSR saves nothing in 16 bits until a third of the values is left; blocks and 2:4 pay little
for theirs, and ask for a pattern. Mishra et al. 2021 (2:4), arXiv:2104.08378; Gale et al. 2020, arXiv:2006.10901.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CSR:
    """Rows of W one after the other, without zeros."""

    values: np.ndarray  # [nnz]
    columns: np.ndarray  # [nnz], int32
    starts: np.ndarray  # [N + 1], int32
    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.values.nbytes + self.columns.nbytes + self.starts.nbytes

    @property
    def rows(self) -> np.ndarray:
        """[nnz]: the row of each value."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


@dataclass(frozen=True)
class Blocks(CSR):
    """CSR of squares: values [blocks, b, b], columns and starts count blocks."""


@dataclass(frozen=True)
class TwoOfFour:
    """Of each four neighbours in a row the two that are largest in size."""

    values: np.ndarray  # [N, K/2]
    places: np.ndarray  # [N, K/8], uint8: four places of 2 bits, the first in the lowest bits
    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.values.nbytes + self.places.nbytes


def csr(w: np.ndarray) -> CSR:
    """w [N, K] without its zeros."""
    rows, columns = np.nonzero(_matrix(w))
    starts = np.searchsorted(rows, np.arange(len(w) + 1)).astype(np.int32)
    return CSR(w[rows, columns], columns.astype(np.int32), starts, w.shape)


def blocks(w: np.ndarray, b: int) -> Blocks:
    """w [N, K] without the squares [b, b] that are all zero. Raises ValueError where b does not divide N and K."""
    N, K = _matrix(w).shape
    if b < 1 or N % b or K % b:
        raise ValueError(f"w is {N} by {K}, but squares of {b} must fill it: pad w, or take another b")
    squares = w.reshape(N // b, b, K // b, b).swapaxes(1, 2)  # [N/b, K/b, b, b]
    rows, columns = np.nonzero((squares != 0).any((2, 3)))
    starts = np.searchsorted(rows, np.arange(N // b + 1)).astype(np.int32)
    return Blocks(squares[rows, columns], columns.astype(np.int32), starts, w.shape)


def two_of_four(w: np.ndarray) -> TwoOfFour:
    """w [N, K] pruned to 2:4. Raises ValueError where K is no multiple of 8, four places a byte."""
    N, K = _matrix(w).shape
    if K % 8:
        raise ValueError(f"w has {K} columns, but 2:4 packs 8 of them into a byte of places: pad w")
    fours = w.reshape(N, K // 4, 4)
    kept = np.sort(np.argsort(-np.abs(fours), -1, kind="stable")[..., :2], -1)  # [N, K/4, 2]
    packed = (kept.reshape(N, K // 8, 4).astype(np.uint8) << np.array([0, 2, 4, 6], np.uint8)).sum(-1, dtype=np.uint8)
    return TwoOfFour(np.take_along_axis(fours, kept, -1).reshape(N, K // 2), packed, (N, K))


def dense(w: CSR | Blocks | TwoOfFour) -> np.ndarray:
    """[N, K] with its zeros."""
    out = np.zeros(w.shape, w.values.dtype)
    if isinstance(w, TwoOfFour):
        fours = out.reshape(w.shape[0], w.shape[1] // 4, 4)
        np.put_along_axis(fours, _places(w), w.values.reshape(*fours.shape[:2], 2), -1)
        return out
    if isinstance(w, Blocks):
        b = w.values.shape[-1]
        out.reshape(w.shape[0] // b, b, w.shape[1] // b, b).swapaxes(1, 2)[w.rows, w.columns] = w.values
    else:
        out[w.rows, w.columns] = w.values
    return out


def sparse_linear_np(x: np.ndarray, w: CSR | Blocks | TwoOfFour) -> np.ndarray:
    """x [M, K] Wᵀ -> [M, N], without ever making W: only what is stored is multiplied."""
    if x.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x is [M, {w.shape[1]}], as W is {list(w.shape)}, but it has shape {list(x.shape)}")
    if isinstance(w, TwoOfFour):
        places = _places(w) + 4 * np.arange(w.shape[1] // 4)[:, None]  # [N, K/4, 2]: columns of what is kept
        return np.einsum("mnk,nk->mn", x[:, places.reshape(w.values.shape)], w.values)
    if isinstance(w, Blocks):
        b = w.values.shape[-1]
        runs = x.reshape(len(x), w.shape[1] // b, b)[:, w.columns]  # [M, blocks, b]
        parts = np.einsum("msk,snk->smn", runs, w.values)  # [blocks, M, b]
        out = np.zeros((len(w.starts) - 1, len(x), b), parts.dtype)
        np.add.at(out, w.rows, parts)
        return out.swapaxes(0, 1).reshape(len(x), w.shape[0])
    out = np.zeros((w.shape[0], len(x)), np.result_type(x, w.values))
    np.add.at(out, w.rows, (x[:, w.columns] * w.values).T)
    return out.T


def _places(w: TwoOfFour) -> np.ndarray:
    """[N, K/4, 2]: which two of each four."""
    places = w.places[..., None] >> np.array([0, 2, 4, 6], np.uint8) & 3  # [N, K/8, 4]
    return places.reshape(w.shape[0], w.shape[1] // 4, 2).astype(np.int64)


def _matrix(w: np.ndarray) -> np.ndarray:
    if w.ndim != 2:
        raise ValueError(f"w is a matrix [N, K], but it has shape {list(w.shape)}")
    return w


IMPLS = {"numpy": sparse_linear_np}
