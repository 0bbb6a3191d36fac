"""Where a token stands: added to embeddings (sinusoidal, learned), or to attention scores (Shaw, T5 buckets, ALiBi).

    sinusoidal    PE[p, 2i] = sin(p ω_i), PE[p, 2i+1] = cos(p ω_i), ω_i = base^(−2i/d)     arXiv:1706.03762, section 3.5
    learned       a row of a table [max_seq_len, D] for each position (ops/embedding.py)   arXiv:1810.04805
    Shaw          score += q_i · a_r / √Dh, r = clip(j − i, −k, k)                         arXiv:1803.02155, eq. 3 and 4
    T5            score += table[bucket(j − i), head], one table for all layers            arXiv:1910.10683, section 2.1
    ALiBi         score −= slope_head · |i − j|, nothing learnt                            arXiv:2108.12409, section 3

i is a query's position, j a key's, and distance always means j − i. T queries are the last T of S positions. RoPE,
which turns queries and keys instead, has its own file. A shift by k turns each sinusoidal pair by the angle k ω_i:
PE(p + k) is PE(p) times a matrix that does not depend on p.
"""

import math

import numpy as np
import torch


def sinusoidal_np(n: int, d: int, base: float = 10000.0, interleaved: bool = True) -> np.ndarray:
    """[n, d], sines and cosines in turn as in the paper, or all sines and then all cosines. Raises ValueError on odd d.

    tensor2tensor and Whisper space their frequencies to reach 1/base exactly: pass base ** (d / (d - 2)) for theirs.
    """
    if d % 2:
        raise ValueError(f"sinusoidal positions come in pairs of sine and cosine: d must be even, got {d}")
    angle = np.arange(n)[:, None] * base ** -(np.arange(0, d, 2) / d)  # [n, d/2]
    pair = (np.sin(angle), np.cos(angle))
    return np.stack(pair, -1).reshape(n, d) if interleaved else np.concatenate(pair, -1)


def alibi_slopes_np(H: int) -> np.ndarray:
    """[H]: 2^(−8h/H) for h = 1…H. Where H is no power of two: those of the power P below, then every other of 2P's."""
    if H < 1:
        raise ValueError(f"H = {H}, but there is at least one head")
    P = 1 << (H.bit_length() - 1)
    return 2.0 ** np.array([-8 * h / P for h in range(1, P + 1)] + [-4 * h / P for h in range(1, 2 * (H - P), 2)])


def relative_index_np(T: int, S: int, k: int) -> np.ndarray:
    """[T, S] rows of Shaw's tables [2k + 1, Dh]: distances clipped to ±k, counted from 0."""
    return np.clip(np.arange(S) - np.arange(S - T, S)[:, None], -k, k) + k


def shaw_scores_np(q: np.ndarray, a: np.ndarray, S: int) -> np.ndarray:
    """q [B, H, T, Dh] · a [2k + 1, Dh] of each pair's distance: [B, H, T, S], to be scaled like q · k."""
    index = relative_index_np(q.shape[-2], S, len(a) // 2)  # [T, S]
    return np.take_along_axis(q @ a.T, np.broadcast_to(index, (*q.shape[:-1], S)), -1)


def shaw_values_np(weights: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Σ_j weights_ij a_r: weights [B, H, T, S], a [2k + 1, Dh] -> [B, H, T, Dh], to be added to weights @ v."""
    return _by_distance(weights, len(a)) @ a


def shaw_scores_np_backward(ds: np.ndarray, q: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ds [B, H, T, S] -> dq, da. Reading by distance is the transpose of summing by distance."""
    near = _by_distance(ds, len(a))  # [B, H, T, 2k+1]
    return near @ a, np.einsum("bhtr,bhtd->rd", near, q)


def _by_distance(weights: np.ndarray, rows: int) -> np.ndarray:
    T, S = weights.shape[-2:]
    hot = relative_index_np(T, S, rows // 2)[..., None] == np.arange(rows)  # [T, S, 2k+1]
    return np.einsum("bhts,tsr->bhtr", weights, hot.astype(weights.dtype))


def sinusoidal(n: int, d: int, base: float = 10000.0, interleaved: bool = True) -> torch.Tensor:
    return torch.from_numpy(sinusoidal_np(n, d, base, interleaved)).float()  # [n, d]


def relative_bucket(
    distance: torch.Tensor, bidirectional: bool = True, buckets: int = 32, max_distance: int = 128
) -> torch.Tensor:
    """T5's bucket of each distance: exact for near keys, then wider by powers, the last for all from max_distance on.

    Both directions take half the buckets each; with one direction (a decoder) all keys ahead share bucket 0.
    Raises ValueError where there are too few buckets, or none of them is wide.
    """
    exact = buckets // 4 if bidirectional else buckets // 2
    if not 0 < exact < max_distance:
        raise ValueError(
            f"buckets = {buckets}, max_distance = {max_distance}, but a direction needs 2 buckets, "
            "and max_distance lies beyond the half of them that is exact"
        )
    if bidirectional:
        buckets //= 2
        ahead, away = (distance > 0) * buckets, distance.abs()
    else:
        ahead, away = 0, (-distance).clamp(min=0)
    power = torch.log(away.clamp(min=1) / exact) / math.log(max_distance / exact)  # 0 at exact, 1 at max_distance
    far = exact + (power * (buckets - exact)).to(distance.dtype)
    return ahead + torch.where(away < exact, away, far.clamp(max=buckets - 1))


def alibi_slopes(H: int) -> torch.Tensor:
    return torch.from_numpy(alibi_slopes_np(H)).float()  # [H]


def alibi_bias(T: int, S: int, H: int) -> torch.Tensor:
    """[H, T, S], to be added to the scaled scores. Symmetric: a decoder's causal mask hides the other half."""
    distance = torch.arange(S) - torch.arange(S - T, S)[:, None]  # [T, S]
    return -alibi_slopes(H)[:, None, None] * distance.abs()


IMPLS = {"numpy": sinusoidal_np, "torch": sinusoidal}
