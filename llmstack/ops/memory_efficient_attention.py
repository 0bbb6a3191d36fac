"""Attention behind the interface of xFormers (Lefaudeux et al. 2022, github.com/facebookresearch/xformers), in memory
linear in the length (Rabe and Staats 2021, arXiv:2112.05682).

    out = softmax(scale · Q Kᵀ + attn_bias) V        query, out [B, M, H, K]     key, value [B, N, H, K]

Here M and N are query and key positions, K the width of a head, and a position's heads lie side by side, as the
projections leave them. A bias is an object that knows which pairs it hides, so most are never written out: it names
`pieces` of queries and keys with the causal order and window in each, and only those are computed. `materialize(shape)`
writes it out as numbers, 0 and −∞. BlockDiagonalMask puts sequences of different lengths one after another in one row:
no padding, and work Σ mᵢ nᵢ in place of B · max m · max n (ByteTransformer: Zhai et al. 2023, arXiv:2210.03052).

    from the top left      query i sees keys j <= i              LowerTriangularMask, BlockDiagonalCausalMask
    from the bottom right  −left <= j − (i + N − M) <= right     LocalAttentionFromBottomRightMask

They differ where M ≠ N. `op` computes a piece: PyTorch's fused operator by default, or ops.flash's flash_triton.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmstack.ops.attention import attention_torch, causal_mask

Piece = tuple[slice, slice, dict]  # queries, keys, and options of flash_triton: causal, window, bias


@dataclass(frozen=True, eq=False)
class AttentionBias:
    """Which pairs count, and what is added to their scores. This one lets every query see every key."""

    def seen(self, M: int, N: int) -> Tensor:
        """[M, N], True where a query sees a key."""
        return torch.ones(M, N, dtype=torch.bool)

    def pieces(self, M: int, N: int) -> list[Piece]:
        """What to compute, with all queries once and in order."""
        return [(slice(M), slice(N), {})]

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """The bias as numbers of this shape, whose last two axes are M and N."""
        hidden = ~self.seen(*shape[-2:]).to(device)
        return torch.zeros(*shape, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)


class LowerTriangularMask(AttentionBias):
    """Causal from the top left: with more keys than queries, the last keys are seen by nobody."""

    def seen(self, M, N):
        return super().seen(M, N).tril()

    def pieces(self, M, N):
        n = min(M, N)
        return [(slice(n), slice(n), {"causal": True}), (slice(n, M), slice(n), {})][: 1 + (M > n)]

    def add_bias(self, bias: Tensor) -> "LowerTriangularMaskWithTensorBias":
        return LowerTriangularMaskWithTensorBias(bias)


@dataclass(frozen=True, eq=False)
class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal from the top left, with numbers that are added to the scores (relative positions, ALiBi)."""

    bias: Tensor  # broadcastable to [B, H, M, N], M and N written out

    def pieces(self, M, N):
        return [(q, k, {**how, "bias": self.bias[..., q, k]}) for q, k, how in super().pieces(M, N)]

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return super().materialize(shape, dtype, device) + self.bias.to(device, dtype)


@dataclass(frozen=True, eq=False)
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A window around the key that stands level with the query when both end together."""

    window_left: int
    window_right: int

    def __post_init__(self):
        if min(self.window_left, self.window_right) < 0:
            raise ValueError(f"a window reaches 0 or more keys each way, got {self.window_left}, {self.window_right}")

    def seen(self, M, N):
        away = torch.arange(N) - torch.arange(N - M, N)[:, None]  # [M, N]
        return (away >= -self.window_left) & (away <= self.window_right)

    def pieces(self, M, N):
        if self.window_right:
            return [(slice(M), slice(N), {"bias": self.materialize((M, N))})]
        return [(slice(M), slice(N), {"causal": True, "window": self.window_left + 1})]


@dataclass(frozen=True, eq=False)
class BlockDiagonalMask(AttentionBias):
    """Sequences side by side in one row of a batch of 1, each of which sees itself alone."""

    q_seqlens: tuple[int, ...]
    kv_seqlens: tuple[int, ...]
    block = AttentionBias()  # what holds within a sequence

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None) -> "BlockDiagonalMask":
        q, kv = tuple(q_seqlen), tuple(q_seqlen if kv_seqlen is None else kv_seqlen)
        if len(q) != len(kv) or any(n < 0 for n in q + kv):
            raise ValueError(f"q_seqlen and kv_seqlen give a length of 0 or more a sequence, got {list(q)}, {list(kv)}")
        return cls(q, kv)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple["BlockDiagonalMask", Tensor]:
        """From sequences [1, mᵢ, H, K]: the mask, and the sequences as one [1, Σ mᵢ, H, K]."""
        return cls.from_seqlens([t.shape[1] for t in tensors]), torch.cat(list(tensors), 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The sequences of a result [1, Σ mᵢ, ...] again."""
        return list(tensor.split(self.q_seqlens, 1))

    def make_causal(self) -> "BlockDiagonalCausalMask":
        return BlockDiagonalCausalMask(self.q_seqlens, self.kv_seqlens)

    def seen(self, M, N):
        self._check(M, N)
        return torch.block_diag(*(self.block.seen(m, n) for m, n in zip(self.q_seqlens, self.kv_seqlens))).bool()

    def pieces(self, M, N):
        self._check(M, N)
        shift = lambda part, by: slice((part.start or 0) + by, part.stop + by)
        found, q_start, k_start = [], 0, 0
        for m, n in zip(self.q_seqlens, self.kv_seqlens):
            found += [(shift(q, q_start), shift(k, k_start), how) for q, k, how in self.block.pieces(m, n)]
            q_start, k_start = q_start + m, k_start + n
        return found

    def _check(self, M: int, N: int):
        if (sum(self.q_seqlens), sum(self.kv_seqlens)) != (M, N):
            raise ValueError(
                f"the mask is for {sum(self.q_seqlens)} queries and {sum(self.kv_seqlens)} keys, got {M} and {N}: "
                "put the sequences one after another along axis 1, in a batch of 1"
            )


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each sequence causal, from its own top left."""

    block = LowerTriangularMask()


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | AttentionBias | None = None, p: float = 0.0,
    scale: float | None = None, op: Callable | None = None,
) -> Tensor:  # fmt: skip
    """query [B, M, H, K], key and value [B, N, H, K], or one head [B, M, K], or groups [B, M, G, H, K] of heads.

    A tensor as bias is broadcastable to [B, H, M, N], or [B, M, N] beside one head. Keys may have fewer heads, where H
    divides by them. op takes (q, k, v, causal=, window=, bias=, scale=) with heads on axis 1. Raises ValueError on
    shapes that do not fit and on p > 0: dropout of weights is not here, as no weights are kept.
    """
    if p:
        raise ValueError(f"p = {p}, but no weights are kept to be dropped: pass p=0.0, and drop values of the output")
    if not 3 <= query.ndim <= 5 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            "query, key and value are [B, M, H, K], or all [B, M, K], or all [B, M, G, H, K]: "
            f"got {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    if key.shape[:-1] != value.shape[:-1] or len(query) != len(key):
        raise ValueError(
            "query, key and value have one batch, and a value stands by each key: "
            f"got {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    if isinstance(attn_bias, Tensor) and not attn_bias.is_floating_point():
        raise TypeError(f"a bias is added to scores, got {attn_bias.dtype}: give 0 where allowed and -inf elsewhere")
    heads = lambda x: (x[:, :, None] if x.ndim == 3 else x.flatten(2, -2)).transpose(1, 2)  # [B, H, M, K]
    q, k, v = heads(query), heads(key), heads(value)
    if isinstance(attn_bias, BlockDiagonalMask) and len(q) != 1:
        raise ValueError(f"with a BlockDiagonalMask sequences lie in a batch of 1, got {len(q)}: see from_tensor_list")
    if isinstance(attn_bias, Tensor):
        attn_bias = attn_bias[:, None] if query.ndim == attn_bias.ndim == 3 else attn_bias
        pieces = [(slice(None), slice(None), {"bias": attn_bias})]
    else:
        pieces = (attn_bias or AttentionBias()).pieces(q.shape[2], k.shape[2])
    outs = []
    for i, j, how in pieces:
        how = {name: x.to(q.device) if name == "bias" else x for name, x in how.items()}
        outs.append((op or _fused)(q[:, :, i], k[:, :, j], v[:, :, j], scale=scale, **how))
    return torch.cat(outs or [q], 2).transpose(1, 2).reshape(*query.shape[:-1], v.shape[-1])


def _fused(q, k, v, causal: bool = False, window: int = 0, bias: Tensor | None = None, scale: float | None = None):
    """PyTorch's operator, which writes no scores either."""
    mask = causal_mask(q.shape[2], k.shape[2], window, q.device) if window else None
    return attention_torch(q, k, v, mask, bias, scale, causal and not window)


IMPLS = {"torch": memory_efficient_attention}
