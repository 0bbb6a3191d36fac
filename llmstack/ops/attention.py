"""To be documented below."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from llmstack.ops.softmax import softmax_torch


def causal_mask(T: int, S: int, window: int = 0, device=None) -> torch.Tensor:
    back = torch.arange(S - T, S, device=device)[:, None] - torch.arange(S, device=device)  # [T, S], query minus key
    return (back >= 0) & (back < window) if window else back >= 0


def attention_weights(q, k, mask=None, bias=None, scale=None) -> torch.Tensor:
    B, H, T, Dh = q.shape
    K = k.shape[1]
    grouped = q.reshape(B, K, H // K, T, Dh)
    scores = grouped @ k[:, :, None].transpose(-1, -2)  # [B, K, H/K, T, S]
    scores = scores.reshape(B, H, T, -1) * (Dh**-0.5 if scale is None else scale)  # [B, H, T, S]
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return softmax_torch(scores)


def attention_formula(q, k, v, mask=None, bias=None, scale=None) -> torch.Tensor:
    B, H, T, _ = q.shape
    K = v.shape[1]
    weights = attention_weights(q, k, mask, bias, scale).reshape(B, K, H // K, T, -1)
    return (weights @ v[:, :, None]).reshape(B, H, T, -1)  # [B, H, T, Dh]


def attention_torch(q, k, v, mask=None, bias=None, scale=None, causal: bool = False) -> torch.Tensor:
    T, S = q.shape[2], k.shape[2]
    if causal and (mask is not None or bias is not None or T != S):
        order = causal_mask(T, S, device=q.device)
        mask, causal = order if mask is None else mask & order, False
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    return scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
