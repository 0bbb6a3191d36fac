"""Tiled attention in NumPy, which counts every byte that crosses between memory and the chip.

A chip that holds M values cannot hold T·S scores. FlashAttention (Dao et al. 2022, arXiv:2205.14135) keeps a tile of
them, and `HBM` counts the tiles that come and go. The order is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691,
Algorithms 1 and 2); `standard_np` works without tiles. Values moved for one head, in blocks of Br queries and Bc keys:

    standard            2 T Dh + 2 S Dh + 4 T S                              scores and weights, written and read
    flash-2             2 T Dh + T + 2 S Dh ⌈T/Br⌉                           k and v come again for each block
    its backward        3 T Dh + T + 4 S Dh + ⌈S/Bc⌉ (4 T Dh + 2 T)          dq comes and goes for each block
    flash-1             T Dh + 2 T + 2 S Dh + ⌈S/Bc⌉ (3 T Dh + 4 T)          so did out, its maximum and its sum

Where four tiles fit, Bc = ⌈M / 4 Dh⌉ and Br = min(Bc, Dh), ⌈T/Br⌉ is 4 T Dh / M: flash-2 moves 8 T S Dh² / M values and
flash-1 12 T S Dh² / M, both Θ(S² Dh² / M).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmstack.ops.softmax import softmax_np


@dataclass
class HBM:
    """Bytes that tiles of arrays moved to the chip (read) and from it (written)."""

    read: int = 0
    written: int = 0

    def load(self, tile: np.ndarray) -> np.ndarray:
        self.read += tile.nbytes
        return tile

    def store(self, place: np.ndarray, tile: np.ndarray | float):
        self.written += place.nbytes
        place[...] = tile


def block_rule(M: int, Dh: int) -> tuple[int, int]:
    """Br, Bc for M values on chip, as FlashAttention 1 has it; raises ValueError where no row of each tile fits."""
    if M < 4 * Dh:
        raise ValueError(f"a chip with {M} values holds no row of q, k, v and out of {Dh}: it takes {4 * Dh} at least")
    Bc = -(-M // (4 * Dh))
    return min(Bc, Dh), Bc


def values_moved(T: int, S: int, Dh: int, Br: int, Bc: int) -> dict[str, int]:
    """The table above for one head."""
    rows, keys = -(-T // Br), -(-S // Bc)
    return {
        "standard": 2 * T * Dh + 2 * S * Dh + 4 * T * S,
        "flash-1": T * Dh + 2 * T + 2 * S * Dh + keys * (3 * T * Dh + 4 * T),
        "flash-2": 2 * T * Dh + T + 2 * S * Dh * rows,
        "flash-2 backward": 3 * T * Dh + T + 4 * S * Dh + keys * (4 * T * Dh + 2 * T),
    }


def standard_np(q: np.ndarray, k: np.ndarray, v: np.ndarray, hbm: HBM | None = None) -> np.ndarray:
    """Attention as three kernels, each of which reads and writes whole arrays: q [B, H, T, Dh], k, v [B, H, S, Dh]."""
    hbm = hbm or HBM()
    scores, weights = np.empty((2, *q.shape[:3], k.shape[2]), q.dtype)  # [B, H, T, S]
    out = np.empty_like(q)  # [B, H, T, Dh]
    hbm.store(scores, hbm.load(q) @ hbm.load(k).swapaxes(-1, -2) * q.shape[-1] ** -0.5)
    hbm.store(weights, softmax_np(hbm.load(scores)))
    hbm.store(out, hbm.load(weights) @ hbm.load(v))
    return out


def flash_np(
    q, k, v, causal=False, window=0, bias=None, alibi=None, scale=None, return_lse=False, blocks=(64, 64), hbm=None
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """A block of queries stays while the keys pass by; arguments as flash_triton's, blocks (Br, Bc), hbm counts."""
    check(q, k, v, causal, window)
    hbm, tiles = hbm or HBM(), _Tiles(q, k, causal, window, bias, alibi, scale)
    out, lse = np.empty_like(q), np.empty_like(q[..., 0])  # [B, H, T, Dh], [B, H, T]
    for b, h in np.ndindex(q.shape[:2]):
        g = h // tiles.group
        for rows in _blocks(q.shape[2], blocks[0]):
            q_i = hbm.load(q[b, h, rows])  # [Br, Dh]
            m, total, acc = np.full(len(q_i), -np.inf, q.dtype), np.zeros(len(q_i), q.dtype), np.zeros_like(q_i)
            for keys, seen in tiles.of(rows, None, blocks):
                s = tiles.scores(b, h, rows, keys, q_i, hbm.load(k[b, g, keys]), seen, hbm)  # [Br, Bc]
                new = np.maximum(m, s.max(-1))
                shift = np.where(np.isinf(new), 0, new)  # a row that has seen no key yet stays at −∞
                p, shrink = np.exp(s - shift[:, None]), np.exp(m - shift)
                total = total * shrink + p.sum(-1)
                acc = acc * shrink[:, None] + p @ hbm.load(v[b, g, keys])
                m = new
            served = np.where(total == 0, 1, total)
            hbm.store(out[b, h, rows], acc / served[:, None])
            hbm.store(lse[b, h, rows], m + np.log(served))
    return (out, lse) if return_lse else out


def flash_np_backward(
    dout, q, k, v, causal=False, window=0, bias=None, alibi=None, scale=None, saved=None, blocks=(64, 64), hbm=None
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """dq, dk, dv. saved: forward's out and lse, computed again where None."""
    out, lse = saved or flash_np(q, k, v, causal, window, bias, alibi, scale, True, blocks)
    hbm, tiles = hbm or HBM(), _Tiles(q, k, causal, window, bias, alibi, scale)
    dq, dk, dv, delta = np.empty_like(q), np.empty_like(k), np.empty_like(v), np.empty_like(lse)
    hbm.store(dq, 0)
    hbm.store(delta, (hbm.load(dout) * hbm.load(out)).sum(-1))  # [B, H, T]
    for b, g in np.ndindex(k.shape[:2]):
        for keys in _blocks(k.shape[2], blocks[1]):
            k_j, v_j = hbm.load(k[b, g, keys]), hbm.load(v[b, g, keys])  # [Bc, Dh]
            dk_j, dv_j = np.zeros_like(k_j), np.zeros_like(v_j)
            for h in range(g * tiles.group, (g + 1) * tiles.group):
                for rows, seen in tiles.of(None, keys, blocks):
                    q_i, dout_i, lse_i, delta_i, dq_i = (hbm.load(x[b, h, rows]) for x in (q, dout, lse, delta, dq))
                    s = tiles.scores(b, h, rows, keys, q_i, k_j, seen, hbm)
                    p = np.exp(s - np.where(np.isinf(lse_i), np.inf, lse_i)[:, None])  # [Br, Bc]
                    ds = p * (dout_i @ v_j.T - delta_i[:, None])
                    dv_j += p.T @ dout_i
                    dk_j += ds.T @ q_i * tiles.scale
                    hbm.store(dq[b, h, rows], dq_i + ds @ k_j * tiles.scale)
            hbm.store(dk[b, g, keys], dk_j)
            hbm.store(dv[b, g, keys], dv_j)
    return dq, dk, dv


def check(q, k, v, causal: bool, window: int, packed: bool = False):
    """Raises ValueError on shapes that do not fit, and on a window that nothing is causal for."""
    fits = q.ndim == k.ndim == 4 - packed and k.shape == v.shape and q.shape[-1] == k.shape[-1]
    if not (fits and q.shape[0] == k.shape[0] and k.shape[1] and q.shape[1] % k.shape[1] == 0):
        what = "[N, H, Dh], k and v [N, K, Dh]" if packed else "[B, H, T, Dh], k and v [B, K, S, Dh]"
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"q is {what}, and H divides by K: got {shapes}")
    if window < 0 or window and not causal:
        raise ValueError(f"window = {window} counts the last keys of a causal query: 0 or more, with causal=True")


def _blocks(length: int, block: int) -> list[slice]:
    return [slice(i, min(i + block, length)) for i in range(0, length, block)]


class _Tiles:
    """Which tiles hold a pair that may be seen, and the scores of one."""

    def __init__(self, q, k, causal, window, bias, alibi, scale):
        self.shape, self.group = (*q.shape[:3], k.shape[2]), q.shape[1] // k.shape[1]  # [B, H, T, S]
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.causal, self.window, self.alibi = causal, window or np.inf, alibi
        self.bias = None if bias is None else np.broadcast_to(bias, self.shape)

    def away(self, rows: slice, keys: slice) -> np.ndarray:
        place = np.arange(rows.start, rows.stop)[:, None] + self.shape[3] - self.shape[2]  # the last query is at S − 1
        return place - np.arange(keys.start, keys.stop)  # [Br, Bc]

    def of(self, rows: slice | None, keys: slice | None, blocks) -> Iterator[tuple[slice, np.ndarray | bool]]:
        """The blocks along the axis that is None, with what is seen of each, without those where nothing is."""
        for block in _blocks(self.shape[2], blocks[0]) if rows is None else _blocks(self.shape[3], blocks[1]):
            away = self.away(rows or block, keys or block)
            seen = (away >= 0) & (away < self.window) if self.causal else np.ones_like(away, bool)
            if seen.any():
                yield block, seen

    def scores(self, b, h, rows, keys, q_i, k_j, seen, hbm) -> np.ndarray:
        s = q_i @ k_j.T * self.scale  # [Br, Bc]
        if self.bias is not None:
            s = s + hbm.load(self.bias[b, h, rows, keys])
        if self.alibi is not None:
            s = s - (self.alibi[h] * np.abs(self.away(rows, keys))).astype(s.dtype)
        return np.where(seen, s, -np.inf)
