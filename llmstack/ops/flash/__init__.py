"""FlashAttention-2: exact attention that never writes a score to memory (Dao 2023, arXiv:2307.08691).

    out = softmax(scale · Q Kᵀ + bias − alibi · distance) V         lse = log Σ exp of a row's scores

    q, out [B, H, T, Dh]     k, v [B, K, S, Dh]     bias broadcastable to [B, H, T, S]     alibi [H]     lse [B, H, T]

Query head h reads key-value head h // (H / K). causal is aligned at the end (query i sees keys j <= i + S − T), and
window leaves the last `window` of those. A bias of −∞ hides a key. A query that may see no key gets zeros and lse −∞.
Operations are those of attention, 4 B H T S Dh forward; backward computes the scores again and keeps out and lse alone:
memory is Θ(T), and bytes Θ(T S Dh / block) in place of Θ(T S). Tiles whose pairs are all hidden are never visited, so
a causal call does half the work and a window Θ(T · window).

`ref` counts the bytes in NumPy, `kernel` and `backward` hold the Triton kernels with their formulas. Packed sequences
of different lengths (ByteTransformer: Zhai et al. 2023, arXiv:2210.03052) go through flash_varlen_triton, with work
Σ s_i² in place of B · max s².
"""

from itertools import pairwise

import torch
from torch.autograd.function import once_differentiable

from llmstack.ops._triton import available
from llmstack.ops.attention import attention_torch, causal_mask
from llmstack.ops.flash.backward import backward
from llmstack.ops.flash.kernel import Call, forward
from llmstack.ops.flash.ref import HBM as HBM
from llmstack.ops.flash.ref import check, flash_np, flash_np_backward
from llmstack.ops.merge import attention_lse

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def flash_torch(
    q, k, v, causal=False, window=0, bias=None, alibi=None, scale=None, return_lse=False
) -> Result:  # fmt: skip
    """The same by PyTorch's operator, with masks and slopes written out, or by the formula where lse is asked."""
    check(q, k, v, causal, window)
    T, S, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if alibi is not None:
        distance = torch.arange(S, device=q.device) - torch.arange(S - T, S, device=q.device)[:, None]  # [T, S]
        bias = (0 if bias is None else bias) - alibi.to(q.dtype)[:, None, None] * distance.abs()  # [.., H, T, S]
    mask = causal_mask(T, S, window, q.device) if causal else None
    if not return_lse:
        return attention_torch(q, k, v, mask, bias, scale)
    q = q if scale is None else q * (scale * q.shape[-1] ** 0.5)
    return attention_lse(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask, bias)


class Flash(torch.autograd.Function):
    """Keeps q, k, v, out and the log-sum-exp for backward. options are Call's; a bias gets no gradient."""

    @staticmethod
    def forward(ctx, q, k, v, bias, options):
        ctx.set_materialize_grads(False)
        out, lse = forward(Call(q, k, v, bias, **options))
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.options = options
        return out.to(q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, bias, out, lse = ctx.saved_tensors
        call, dout = Call(q, k, v, bias, **ctx.options), torch.zeros_like(q) if dout is None else dout
        return *(g.to(q.dtype) for g in backward(call, out, lse, dout, dlse)), None, None


def flash_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, window: int = 0,
    bias: torch.Tensor | None = None, alibi: torch.Tensor | None = None, scale: float | None = None,
    return_lse: bool = False,
) -> Result:  # fmt: skip
    """fp32, fp16 or bf16, heads of up to 256 values, any strides; differentiable in q, k, v and through lse.

    Raises ValueError on shapes that do not fit, on a window without causal, and on a bias or alibi that wants a
    gradient; TypeError on dtypes.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (bias, alibi)):
        raise ValueError("bias and alibi get no gradient here: detach them, or use flash_torch")
    out, lse = Flash.apply(q, k, v, bias, dict(causal=causal, window=window, alibi=alibi, scale=scale))
    return (out, lse) if return_lse else out


def flash_varlen_torch(q, k, v, cu_seqlens: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Packed sequences one by one: q [N, H, Dh], k, v [N, K, Dh]; sequence b is rows cu_seqlens[b] to [b + 1].

    Raises ValueError where cu_seqlens does not rise from 0 to N.
    """
    _longest(cu_seqlens, len(q))
    heads = lambda x, a, b: x[a:b].transpose(0, 1)[None]  # [1, H, s, Dh]
    spans = pairwise(cu_seqlens.tolist())
    outs = [attention_torch(*(heads(x, a, b) for x in (q, k, v)), causal=causal)[0].transpose(0, 1) for a, b in spans]
    return torch.cat([q[:0], *outs])


def _longest(cu_seqlens: torch.Tensor, N: int) -> int:
    """The greatest length. Rows that no sequence holds are an error: they would be lost or left unwritten."""
    lengths = cu_seqlens.diff().tolist()
    if not lengths or cu_seqlens[0] != 0 or cu_seqlens[-1] != N or min(lengths) < 0:
        raise ValueError(f"cu_seqlens [B + 1] rises from 0 to N = {N}, got {cu_seqlens.tolist()}")
    return max(lengths)


def flash_varlen_triton(q, k, v, cu_seqlens: torch.Tensor, causal: bool = False, longest: int = 0) -> torch.Tensor:
    """Packed sequences in one launch, differentiable. longest: their greatest length, looked up (and waited for) if 0.

    Raises ValueError where cu_seqlens does not rise from 0 to N.
    """
    longest = longest or _longest(cu_seqlens, len(q))
    return Flash.apply(q, k, v, None, dict(causal=causal, cu=cu_seqlens.to(torch.int32), longest=longest))[0]


IMPLS = available({"numpy": flash_np, "torch": flash_torch, "triton": flash_triton})
BACKWARDS = {"numpy": flash_np_backward}
