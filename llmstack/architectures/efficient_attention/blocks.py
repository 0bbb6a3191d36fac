"""Patterns in forms whose work and memory shrink with the pattern: runs, squares, columns and gathers.

Each equals dense attention under its mask (masks.py). Where a pattern is a union, as window and columns are, its parts
are attended to one by one and joined by their log-denominators (ops/merge.py). Shapes: q, k, v, out [B, H, T, Dh].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmstack.architectures.efficient_attention.masks import Mask
from llmstack.ops.attention import attention_torch
from llmstack.ops.banded import banded_lse
from llmstack.ops.merge import attention_lse, merge_torch

Triple = tuple[Tensor, Tensor, Tensor]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, width: int, ahead: int = 0, hubs: Sequence[int] = (), hub_qkv: Triple | None = None
) -> Tensor:
    """window(width, ahead) | hubs(…): Longformer. With ahead = 0 it is causal, and early hubs are attention sinks.

    hub_qkv: other projections of the same tokens [B, H, T, Dh], from which the hubs' own rows are made (Longformer has
    them). Work: T (width + ahead + 2 hubs). Raises ValueError on a width under 1 and on hubs outside of 0 … T − 1.
    """
    T, is_causal, hubs = q.shape[2], ahead == 0, sorted(set(hubs))
    if width < 1 or not all(0 <= h < T for h in hubs):
        raise ValueError(f"width = {width}, but a query sees itself: 1 or more; hubs = {hubs} are among {T} positions")
    hub = torch.tensor(hubs, dtype=torch.long, device=q.device)
    keep = torch.ones(T, dtype=torch.bool, device=q.device).index_fill(0, hub, False)
    near = banded_lse(q, k, v, width - 1, ahead, keep)
    if not len(hub):
        return near[0]
    order = torch.arange(T, device=q.device)[:, None] >= hub if is_causal else None  # [T, hubs]
    far = attention_lse(q, k[:, :, hub], v[:, :, hub], order)
    out = merge_torch(*zip(near, far))
    q_hub, k_hub, v_hub = hub_qkv or (q, k, v)
    past = torch.arange(T, device=q.device) <= hub[:, None] if is_causal else None  # [hubs, T]
    rows = attention_torch(q_hub[:, :, hub], k_hub, v_hub, past)
    return out.index_copy(2, hub, rows)


def block_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, block: int, layout: Tensor | None = None) -> Tensor:
    """Any mask, by squares of `block`: those without a pair in them are never touched. Work: open squares × block².

    layout [T / block, T / block]: the open squares, where known; otherwise mask.blocks finds them, which looks at
    all T² pairs once. Rows with the same number of open squares go together, so that nothing is padded.
    Raises ValueError where block does not divide T.
    """
    T, device = q.shape[2], q.device
    layout = mask.blocks(T, block) if layout is None else layout
    if block < 1 or T % block or layout.shape != (T // block, T // block):
        raise ValueError(f"layout {list(layout.shape)} is not [T / block, T / block] for T = {T} and block = {block}")
    cut = lambda x: x.unflatten(2, (-1, block))  # [B, H, N, block, Dh]
    q, k, v = cut(q), cut(k), cut(v)
    out = torch.zeros_like(v)
    inside, counts = torch.arange(block), layout.sum(-1)
    for count in counts[counts > 0].unique().tolist():
        rows = (counts == count).nonzero().flatten()  # [R]
        open_ = layout[rows].nonzero()[:, 1].view(-1, count)  # [R, count]
        keys = (open_[..., None] * block + inside).flatten(1)  # [R, count · block]
        seen = mask((rows[:, None] * block + inside)[..., None], keys[:, None])  # [R, block, count · block]
        gather = lambda x: x[:, :, open_.to(device)].flatten(3, 4)  # [B, H, R, count · block, Dh]
        part, _ = attention_lse(q[:, :, rows.to(device)], gather(k), gather(v), seen.to(device))
        out = out.index_copy(2, rows.to(device), part)
    return out.flatten(2, 3)


def column_attention(q: Tensor, k: Tensor, v: Tensor, stride: int, itself: bool = True) -> tuple[Tensor, Tensor]:
    """column(stride) as dense attention in T / stride rows of a transposed view: T² / stride work. Returns out, lse.

    itself: whether a query sees its own position.
    """
    T = q.shape[2]
    if stride < 1:
        raise ValueError(f"stride = {stride}, but it counts positions: 1 or more; √T is usual")
    fill = -T % stride
    fold = lambda x: torch.nn.functional.pad(x, (0, 0, 0, fill)).unflatten(2, (-1, stride)).transpose(2, 3)
    q, k, v = fold(q), fold(k), fold(v)  # [B, H, stride, T / stride, Dh]
    rows = q.shape[3]
    order = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril(0 if itself else -1)
    out, lse = attention_lse(q, k, v, order)
    return out.transpose(2, 3).flatten(2, 3)[:, :, :T], lse.transpose(2, 3).flatten(2, 3)[:, :, :T]


def strided_attention(q: Tensor, k: Tensor, v: Tensor, stride: int) -> Tensor:
    """strided(stride): the last `stride` keys, and the columns before them. 1.5 T √T pairs at stride √T."""
    return merge_torch(*zip(column_attention(q, k, v, stride, itself=False), banded_lse(q, k, v, stride - 1)))


def dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, patterns: Sequence[tuple[int, int]], causal: bool = False
) -> Tensor:
    """LongNet's mix of (segment, rate) patterns: gather every rate-th token of a segment, attend, scatter, and weigh
    the patterns by their softmax denominators. Head h starts at h mod rate. Work: Σ T segment / rate².

    A key that several patterns hold counts in each, as in the paper; a token that none holds gets zeros.
    """
    mixed = [_one_dilation(q, k, v, segment, rate, causal) for segment, rate in patterns]
    if not mixed:
        raise ValueError("patterns is empty: give (segment, rate) pairs, such as [(64, 1), (256, 4)]")
    return merge_torch(*zip(*mixed))


def _one_dilation(q: Tensor, k: Tensor, v: Tensor, segment: int, rate: int, causal: bool) -> tuple[Tensor, Tensor]:
    (B, H, T, Dh), device = q.shape, q.device
    if segment < 1 or rate < 1 or segment % rate:
        raise ValueError(f"segment = {segment}, rate = {rate}: the rate must divide the segment")
    fill = -T % segment
    starts = torch.arange(0, T + fill, segment, device=device)[:, None]  # [N, 1]
    shift = (torch.arange(H, device=device) % rate)[:, None, None]  # [H, 1, 1]
    at = starts + torch.arange(0, segment, rate, device=device) + shift  # [H, N, segment / rate]
    flat = at.flatten(1)[None, :, :, None].expand(B, H, -1, Dh)  # [B, H, T / rate, Dh]
    pick = lambda x: torch.nn.functional.pad(x, (0, 0, 0, fill)).gather(2, flat).unflatten(2, at.shape[1:])
    seen = (at < T)[:, :, None]  # [H, N, 1, segment / rate]
    if causal:
        seen = seen & torch.ones(at.shape[-1], at.shape[-1], dtype=torch.bool, device=device).tril()
    out, lse = attention_lse(pick(q), pick(k), pick(v), seen)  # [B, H, N, segment / rate, Dh]
    whole = torch.zeros(B, H, T + fill, Dh, dtype=v.dtype, device=device).scatter(2, flat, out.flatten(2, 3))
    empty = torch.full((B, H, T + fill), -torch.inf, dtype=lse.dtype, device=device)
    return whole[:, :, :T], empty.scatter(2, flat[..., 0], lse.flatten(2, 3))[:, :, :T]


def pairs(attend: Callable[..., Tensor], T: int, **options) -> int:
    """Query-key pairs that a form really computes at length T, from the operations that PyTorch counts in its products.

    attend(q, k, v, **options) with one head of 16.
    """
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.randn(1, 1, T, 16)
    with FlopCounterMode(display=False) as counter:
        attend(q, q, q, **options)
    return counter.get_total_flops() // (4 * 16)
