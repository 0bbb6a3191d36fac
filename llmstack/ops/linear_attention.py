"""Attention whose weight is a product of features, and the features (Katharopoulos et al. 2020, arXiv:2006.16236;
Choromanski et al. 2021, Performer, arXiv:2009.14794).

    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)          j over all keys, or j <= i where causal

    φ(q) [B, H, T, M]       φ(k) [B, H, S, M]       v, out [B, H, S or T, Dv]

Read from the right it needs no T × S table: A = Σ φ(k) vᵀ [M, Dv] and z = Σ φ(k) [M] hold all that a query asks for.
Causal, A and z are the state of a recurrent network, so that one step costs the same at every length:

    operations  4 T M Dv in all, or a step      state  M (Dv + 1) values       against  4 T S Dh  and  2 T Dh in a cache

Features: elu(x) + 1 (positive, M = Dh; another attention than softmax's), and FAVOR+'s, positive too, with random
w_1 … w_M ~ N(0, I) and x already divided by Dh^(1/4), whose product is softmax's exp(q·k / √Dh) on average:

    φ(x) = exp(w·x − |x|²/2) / √M          the error falls as M^(−1/2), faster where the w are orthogonal
"""

import numpy as np
import torch
from torch.nn.functional import elu

EPS = 1e-6  # of a denominator that has underflowed


def linear_attention_np(phi_q: np.ndarray, phi_k: np.ndarray, v: np.ndarray, causal: bool = False) -> np.ndarray:
    weights = phi_q @ phi_k.swapaxes(-1, -2)  # [B, H, T, S]: the specification has the table
    weights = np.tril(weights) if causal else weights
    return weights @ v / np.maximum(weights.sum(-1, keepdims=True), EPS)  # [B, H, T, Dv]


def linear_attention_np_backward(
    dout: np.ndarray, phi_q: np.ndarray, phi_k: np.ndarray, v: np.ndarray, causal: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weights = phi_q @ phi_k.swapaxes(-1, -2)  # [B, H, T, S]
    weights = np.tril(weights) if causal else weights
    total = np.maximum(weights.sum(-1, keepdims=True), EPS)
    out = weights @ v / total
    dweights = (dout @ v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True)) / total
    dweights = np.tril(dweights) if causal else dweights
    return dweights @ phi_k, dweights.swapaxes(-1, -2) @ phi_q, (weights / total).swapaxes(-1, -2) @ dout


def linear_attention_torch(
    phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, causal: bool = False, chunk: int = 64
) -> torch.Tensor:
    """Causal in chunks: the state before a chunk, and within it the table. Raises ValueError where T ≠ S is causal."""
    if not causal:
        state = phi_k.transpose(-1, -2) @ v  # [B, H, M, Dv]
        total = phi_q @ phi_k.sum(-2)[..., None]  # [B, H, T, 1]
        return phi_q @ state / total.clamp(min=EPS)
    if phi_q.shape != phi_k.shape:
        raise ValueError(f"causal features share a shape, got {list(phi_q.shape)} and {list(phi_k.shape)}")
    T = v.shape[2]
    cut = lambda x: torch.nn.functional.pad(x, (0, 0, 0, -T % chunk)).unflatten(2, (-1, chunk))  # [B, H, N, chunk, …]
    q, k = cut(phi_q), cut(phi_k)
    v1 = cut(torch.cat([v, torch.ones_like(v[..., :1])], -1))  # with a column of ones, A and z are one state
    states = (k.transpose(-1, -2) @ v1).cumsum(2)  # [B, H, N, M, Dv + 1]
    before = torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1]], 2)
    out = (q @ before + (q @ k.transpose(-1, -2)).tril() @ v1).flatten(2, 3)[:, :, :T]  # [B, H, T, Dv + 1]
    return out[..., :-1] / out[..., -1:].clamp(min=EPS)


def linear_attention_step(
    phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: phi_q, phi_k [B, H, M], v [B, H, Dv], state [B, H, M, Dv + 1] -> out [B, H, Dv] and the new state."""
    v1 = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    added = phi_k[..., :, None] * v1[..., None, :]  # [B, H, M, Dv + 1]
    state = added if state is None else state + added
    out = (phi_q[..., None, :] @ state).squeeze(-2)  # [B, H, Dv + 1]
    return out[..., :-1] / out[..., -1:].clamp(min=EPS), state


def elu_features(x: torch.Tensor) -> torch.Tensor:
    return elu(x) + 1


def favor_features(x: torch.Tensor, w: torch.Tensor, stable: bool = True) -> torch.Tensor:
    """x [B, H, T, Dh], w [M, Dh] -> [B, H, T, M]. stable divides by the largest value of each sequence and head,
    which cancels in the ratio; without it products are unbiased estimates of exp(q·k / √Dh), and may overflow."""
    x = x * x.shape[-1] ** -0.25
    logits = x @ w.T - x.pow(2).sum(-1, keepdim=True) / 2  # [B, H, T, M]
    top = logits.detach().amax((-2, -1), keepdim=True) if stable else 0
    return torch.exp(logits - top) * w.shape[0] ** -0.5


def favor_directions(M: int, Dh: int, orthogonal: bool = True, seed: int = 0) -> torch.Tensor:
    """w [M, Dh]: Gaussian rows, orthogonal within each group of Dh, their lengths those of independent rows."""
    if M < 1 or Dh < 1:
        raise ValueError(f"M = {M} and Dh = {Dh}, but both count something: at least 1")
    rng = torch.Generator().manual_seed(seed)
    w = torch.randn(M, Dh, generator=rng)
    if not orthogonal:
        return w
    lengths = torch.randn(M, Dh, generator=rng).norm(dim=-1, keepdim=True)
    Q, R = torch.linalg.qr(torch.randn(-(-M // Dh), Dh, Dh, generator=rng))
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # LAPACK fixes signs; without this some directions never come
    return Q.mT.reshape(-1, Dh)[:M] * lengths


IMPLS = {"numpy": linear_attention_np, "torch": linear_attention_torch}
BACKWARDS = {"numpy": linear_attention_np_backward}
