"""Attention over a union of disjoint key sets, from attention over each set and the logarithm of its denominator.

    out_i = softmax(s_i) V_i        lse_i = log Σ_j exp(s_ij)              over set i alone
    out = Σ_i w_i out_i             w = softmax(lse_1, lse_2, …)           over all sets

    out_i [..., T, Dv]              lse_i, w [..., T]

What makes it exact: exp(lse_i) is the set's share of the whole denominator. A set without keys has lse −∞ and weighs
nothing; a query that no set serves gets zeros. Sets that share keys count those keys more than once: that is LongNet's
mix (Ding et al. 2023, arXiv:2307.02486, section 2.3). Backward, with dout and w:

    dout_i = w_i dout               dlse_i = w_i dout · (out_i − out)

n sets cost about 3 n T Dv operations; n T Dv values are read and T Dv written.
"""

from collections.abc import Sequence

import numpy as np
import torch

from llmstack.ops.softmax import softmax_np, softmax_torch


def merge_np(outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]) -> np.ndarray:
    w = softmax_np(np.stack(lses, -1))  # [..., T, n]
    return np.sum(np.stack(outs, -1) * w[..., None, :], -1)  # [..., T, Dv]


def merge_np_backward(
    dout: np.ndarray, outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    """The gradients of all outs, then those of all lses."""
    w, out = softmax_np(np.stack(lses, -1)), merge_np(outs, lses)
    douts = [w[..., i, None] * dout for i in range(len(outs))]
    return *douts, *(np.sum(d * (o - out), -1) for d, o in zip(douts, outs))


def merge_torch(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
    w = softmax_torch(torch.stack(list(lses), -1))  # [..., T, n]
    return (torch.stack(list(outs), -1) * w[..., None, :]).sum(-1)  # [..., T, Dv]


def attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-denominator: q [..., T, Dh], k, v [..., S, Dh], mask and bias broadcastable to [..., T, S].

    Returns out [..., T, Dv] and lse [..., T]: zeros and −∞ for a query without a key, with gradients of zero.
    """
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [..., T, S]
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if not scores.shape[-1]:  # no keys at all
        return q.new_zeros(*scores.shape[:-1], v.shape[-1]), scores.new_full(scores.shape[:-1], -torch.inf)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)  # [..., T, 1]
    e = torch.exp(scores - top)
    total = e.sum(-1, keepdim=True)  # [..., T, 1]
    served = total.masked_fill(total == 0, 1)
    lse = (top + served.log()).masked_fill(total == 0, -torch.inf).squeeze(-1)  # [..., T]
    return (e @ v) / served, lse


IMPLS = {"numpy": merge_np, "torch": merge_torch}
BACKWARDS = {"numpy": merge_np_backward}
