"""Paged attention: decoding from a cache that lies in pages anywhere in memory (Kwon et al. 2023, arXiv:2309.06180).

    key j of sequence b is at k_pages[tables[b, j // page], j % page]            section 4.1, equation 4

    q, out [B, H, Dh]     k_pages, v_pages [pages, page, K, Dh]     tables [B, max_pages]     lengths [B]

Nothing of a sequence need be contiguous but a page, so a cache grows by a page at a time and wastes less than one, and
sequences with a common beginning hold its pages once. Entries of a table beyond a sequence's last page are never read
as pages: they may hold anything.

The kernel is that of ops/flash_decoding.py, split and merged as there, with a look-up before each key. It asks for the
table's 4 bytes key by key, so that a page may have any size, once for each KV head. With N = Σ lengths that adds

    4 N K bytes        to 2 b N K Dh of keys and values: 1/128 in fp16 with heads of 128

while gathering the pages first writes and reads the cache once more: 4 b N K Dh.
"""

import numpy as np
import torch
from numpy import ndarray as Array
from torch import Tensor

from llmstack.ops._triton import available
from llmstack.ops.attention import attention_np, attention_torch
from llmstack.ops.flash_decoding import build, check_lengths, launch


def paged_attention_np(
    q: Array, k_pages: Array, v_pages: Array, tables: Array, lengths: Array, scale: float | None = None
) -> Array:
    page = _check(q, k_pages, v_pages, tables, lengths)
    out = np.empty_like(q)
    for b, n in enumerate(lengths):
        mine = tables[b, : -(-int(n) // page)]  # this sequence's pages in order
        k, v = (x[mine].reshape(-1, *x.shape[2:])[:n].swapaxes(0, 1) for x in (k_pages, v_pages))  # [K, n, Dh]
        out[b] = attention_np(q[b, None, :, None], k[None], v[None], scale=scale)[0, :, 0]
    return out


def paged_attention_torch(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, lengths: Tensor, scale: float | None = None
) -> Tensor:
    """Gathers the pages into a cache as long as the longest table, then attends."""
    page = _check(q, k_pages, v_pages, tables, lengths)
    there = torch.arange(tables.shape[1] * page, device=q.device) < lengths[:, None]  # [B, S]
    mine = tables.long().masked_fill(~there[:, ::page], 0)
    k, v = (x[mine].flatten(1, 2).transpose(1, 2) for x in (k_pages, v_pages))  # [B, K, S, Dh]
    k, v = (x.masked_fill(~there[:, None, :, None], 0) for x in (k, v))  # a weight of 0 hides no NaN
    return attention_torch(q[:, :, None], k, v, there[:, None, None], scale=scale)[:, :, 0]


def paged_attention_triton(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, lengths: Tensor, scale: float | None = None,
    splits: int = 1,
) -> Tensor:  # fmt: skip
    """Heads of up to 256 values, at most 128 splits; fp32, fp16 or bf16."""
    _check(q, k_pages, v_pages, tables, lengths)
    return launch(q, k_pages, v_pages, tables, lengths, splits, scale)[0]


def _check(q, k_pages, v_pages, tables, lengths) -> int:
    """The size of a page."""
    fits = [q.ndim, k_pages.ndim, tables.ndim] == [3, 4, 2] and k_pages.shape == v_pages.shape and len(tables) == len(q)
    if not (fits and q.shape[2] == k_pages.shape[3] and k_pages.shape[2]) or q.shape[1] % k_pages.shape[2]:
        raise ValueError(
            "q is [B, H, Dh], k_pages and v_pages are [pages, page, K, Dh], tables [B, max_pages], and H divides by K: "
            f"got q {list(q.shape)}, {list(k_pages.shape)}, {list(v_pages.shape)}, tables {list(tables.shape)}"
        )
    pages, page = k_pages.shape[:2]
    check_lengths(lengths, len(q), tables.shape[1] * page)
    if {str(tables.device), str(lengths.device)} == {"cpu"}:
        used = np.asarray(tables)[np.arange(tables.shape[1]) * page < np.asarray(lengths)[:, None]]
        if ((used < 0) | (used >= pages)).any():
            raise ValueError(f"tables name pages 0 to {pages - 1} within each length, got {sorted(set(used.tolist()))}")
    return page


IMPLS = available({"numpy": paged_attention_np, "torch": paged_attention_torch, "triton": paged_attention_triton})
AOT = [build("*bf16 *bf16 *bf16 *i32 *i32", flags_ptr=None)]
