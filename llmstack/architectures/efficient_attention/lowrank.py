"""Attention through a few rows in place of all: learned mixtures (Linformer) or landmarks (Nyströmformer).

q, k, v, out [B, H, T, Dh]. Neither has a causal form: every row of the short side mixes the whole sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from llmstack.ops.attention import attention_torch
from llmstack.ops.softmax import softmax_torch


def linformer_attention(q: Tensor, k: Tensor, v: Tensor, E: Tensor, F: Tensor) -> Tensor:
    """Wang et al. 2020, arXiv:2006.04768, eq. 7: attention over the n rows of E k and F v; E, F [n, S]. Work: T n.

    E and F are learned for one length S: ValueError at any other.
    """
    if E.shape != F.shape or E.shape[-1] != k.shape[2]:
        raise ValueError(
            f"E and F are [n, S] for S = {k.shape[2]} keys, got {list(E.shape)} and {list(F.shape)}: "
            "their length is fixed when they are made; pad the sequence to it"
        )
    return attention_torch(q, E @ k, F @ v)


def nystrom_attention(
    q: Tensor, k: Tensor, v: Tensor, landmarks: int, iterations: int = 6, conv: Tensor | None = None
) -> Tensor:
    """Xiong et al. 2021, arXiv:2102.03902, eq. 13: softmax(q k̃ᵀ) · softmax(q̃ k̃ᵀ)⁺ · softmax(q̃ kᵀ) v. Work: 2 T n.

    q̃, k̃: means of the n segments. ⁺: `iterations` of eq. 11, 0 for the exact pseudo-inverse. conv [H, 1, width, 1]:
    the paper's depthwise skip over v. Raises ValueError where landmarks does not divide T.
    """
    T, scale = q.shape[2], q.shape[-1] ** -0.5
    if landmarks < 1 or T % landmarks:
        raise ValueError(f"landmarks = {landmarks} does not divide T = {T} into segments: pad the sequence")
    q_few, k_few = (x.unflatten(2, (landmarks, -1)).mean(3) for x in (q, k))  # [B, H, n, Dh]
    weights = lambda a, b: softmax_torch(a @ b.transpose(-1, -2) * scale)
    middle = weights(q_few, k_few)  # [B, H, n, n]
    inverse = newton_inverse(middle, iterations) if iterations else torch.linalg.pinv(middle)
    out = (weights(q, k_few) @ inverse) @ (weights(q_few, k) @ v)
    if conv is not None:
        out = out + conv2d(v, conv, padding=(conv.shape[2] // 2, 0), groups=conv.shape[0])
    return out


def newton_inverse(A: Tensor, iterations: int) -> Tensor:
    """The pseudo-inverse of A [..., n, n] whose rows sum to 1, by products alone; from Aᵀ over the largest column."""
    I = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Z = A.transpose(-1, -2) / A.sum(-2).amax()
    for _ in range(iterations):
        AZ = A @ Z
        Z = Z @ (13 * I - AZ @ (15 * I - AZ @ (7 * I - AZ))) / 4
    return Z
