"""Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762, eq. 1), also with grouped heads (2305.13245).

    out = softmax(Q Kᵀ / √Dh + bias) V              a mask sets scores to −∞ where it is False

    q, out [B, H, T, Dh]        k, v [B, K, S, Dh]        mask, bias broadcastable to [B, H, T, S]

Query head h reads key-value head h // (H / K): H = K is multi-head, K = 1 multi-query. The group is an axis of the
matmul, so keys and values are never repeated. A query that may see no key gets zeros. T queries are the last T of S
positions. Components of variance 1 give scores of variance Dh; 1/√Dh brings it back to 1.

With weights P (kept or computed again) and scale s, backward is

    dV = Pᵀ dO       dS = P · (dO Vᵀ − rowsum(dO Vᵀ · P))       dQ = s dS K       dK = s dSᵀ Q       dbias = dS

summed over the heads of a group for K and V. In operations, and values moved when scores are written out:

    forward     4 B H T S Dh + 6 B H T S          scores written and read twice: about 4 B H T S values
    backward    8 B H T S Dh + 4 B H T S          and 2 B H T S Dh where P is computed again

A causal model of T = S needs half of it. The forms that never write the scores come with chapter 3.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from llmstack.ops.softmax import softmax_np, softmax_np_backward, softmax_torch


def causal_mask(T: int, S: int, window: int = 0, device: torch.device | str | None = None) -> torch.Tensor:
    """[T, S], True where query i may see key j: j <= i + S − T, and with a window only the last `window` of those.

    Raises ValueError on a negative window.
    """
    if window < 0:
        raise ValueError(f"window = {window}, but a query sees a positive number of keys; 0 stands for all")
    distance = torch.arange(S, device=device) - torch.arange(S - T, S, device=device)[:, None]  # [T, S]
    return (distance <= 0) & (distance > -window) if window else distance <= 0


def attention_np(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    scale: float | None = None,
    softmax: Callable = softmax_np,
) -> np.ndarray:
    B, H, T, Dh = q.shape
    K, S = k.shape[1:3]
    grouped = q.reshape(B, K, H // K, T, Dh)
    scores = grouped @ k[:, :, None].swapaxes(-1, -2)  # [B, K, H/K, T, S]
    scores = scores.reshape(B, H, T, S) * (Dh**-0.5 if scale is None else scale)  # [B, H, T, S]
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = softmax(scores).reshape(B, K, H // K, T, S)
    return (weights @ v[:, :, None]).reshape(B, H, T, v.shape[-1])  # [B, H, T, Dh]


def attention_np_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv, and dbias [B, H, T, S] (sum it over the axes that the bias was broadcast along)."""
    B, H, T, Dh = q.shape
    K, S = k.shape[1:3]
    scale = Dh**-0.5 if scale is None else scale
    grouped = lambda x: x.reshape(B, K, H // K, *x.shape[2:])  # [B, K, H/K, ...]
    scores = (grouped(q) @ k[:, :, None].swapaxes(-1, -2)).reshape(B, H, T, S) * scale
    scores = scores if bias is None else scores + bias
    weights = softmax_np(scores if mask is None else np.where(mask, scores, -np.inf))  # [B, H, T, S]
    dweights = grouped(dout) @ v[:, :, None].swapaxes(-1, -2)  # [B, K, H/K, T, S]
    ds = softmax_np_backward(dweights.reshape(B, H, T, S), weights)  # [B, H, T, S]
    dq = (grouped(ds) @ k[:, :, None]).reshape(q.shape) * scale
    dk = (grouped(ds).swapaxes(-1, -2) @ grouped(q)).sum(2) * scale  # [B, K, S, Dh]
    dv = (grouped(weights).swapaxes(-1, -2) @ grouped(dout)).sum(2)
    return dq, dk, dv, ds


def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    softmax: Callable = softmax_torch,
) -> torch.Tensor:
    """Who looks at whom: [B, H, T, S], each row summing to 1, or to 0 where a query may see no key."""
    B, H, T, Dh = q.shape
    K, S = k.shape[1:3]
    grouped = q.reshape(B, K, H // K, T, Dh)
    scores = grouped @ k[:, :, None].transpose(-1, -2)  # [B, K, H/K, T, S]
    scores = scores.reshape(B, H, T, S) * (Dh**-0.5 if scale is None else scale)  # [B, H, T, S]
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return softmax(scores)


def attention_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    softmax: Callable = softmax_torch,
) -> torch.Tensor:
    """The formula step by step. attention_torch is the same, faster."""
    B, H, T, _ = q.shape
    K, S = k.shape[1:3]
    weights = attention_weights(q, k, mask, bias, scale, softmax).reshape(B, K, H // K, T, S)
    return (weights @ v[:, :, None]).reshape(B, H, T, v.shape[-1])  # [B, H, T, Dh]


def attention_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """attention_formula by PyTorch's fused operator, which is what models call.

    causal=True adds causal_mask(T, S), without building it where T = S and there is no other mask.
    Raises ValueError on shapes that do not fit and TypeError on a mask that is not boolean.
    """
    H, T, K, S = *q.shape[1:3], *k.shape[1:3]
    if H % K or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "q is [B, H, T, Dh], k and v are [B, K, S, Dh], and H divides by K: "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask is boolean, True where attention is allowed; got {mask.dtype}: pass numbers as bias")
    causal = causal and T > 1  # the last position sees every key
    if causal and (T != S or mask is not None or bias is not None):
        order = causal_mask(T, S, device=q.device)
        mask, causal = order if mask is None else mask & order, False
    if bias is not None:  # the operator has one argument for both
        mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, -torch.inf)
    return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=H != K)


IMPLS = {"numpy": attention_np, "torch": attention_formula}  # attention_torch is one call: nothing to read
BACKWARDS = {"numpy": attention_np_backward}
