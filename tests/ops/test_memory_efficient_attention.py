"""xFormers' interface: every kind of bias against PyTorch's attention with the bias written out; blocks; memory."""

import pytest
import torch
from op_checks import check, randn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from llmstack.ops._triton import HAVE_TRITON
from llmstack.ops.attention import attention_formula
from llmstack.ops.flash import flash_triton
from llmstack.ops.memory_efficient_attention import (
    AttentionBias,
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    memory_efficient_attention,
)

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
B, H, K, INF = 2, 3, 16, torch.inf

KINDS = {  # the bias for M queries and N keys, and the pairs it shows by its definition in words
    "nothing": lambda M, N: (None, lambda i, j: True),
    "a bias that hides nothing": lambda M, N: (AttentionBias(), lambda i, j: True),
    "lower triangle": lambda M, N: (LowerTriangularMask(), lambda i, j: j <= i),
    "window of 5": lambda M, N: (LocalAttentionFromBottomRightMask(4, 0), lambda i, j: 0 <= i + N - M - j <= 4),
    "both ways": lambda M, N: (LocalAttentionFromBottomRightMask(3, 2), lambda i, j: -2 <= i + N - M - j <= 3),
    "blocks": lambda M, N: blocks(M, N, False),
    "causal blocks": lambda M, N: blocks(M, N, True),
}
SIZES = [(1, 1), (7, 7), (63, 63), (20, 33), (33, 20)]


def blocks(M, N, causal):
    """Three sequences, the middle one of nothing where there is room for no more."""
    q, kv = [M // 3, 0, M - M // 3], [N // 2, 0, N - N // 2]
    mask = BlockDiagonalMask.from_seqlens(q, kv)

    def seen(i, j):
        second = i >= q[0]
        same = second == (j >= kv[0])
        return same and (not causal or j - second * kv[0] <= i - second * q[0])

    return mask.make_causal() if causal else mask, seen


def inputs(M, N, batch=B, H=H, dtype=torch.float32):
    return [randn(batch, n, H, K, seed=s, dtype=dtype) for s, n in enumerate((M, N, N))]


def reference(added, scale=None):
    """PyTorch's operator, numbers added; zeros for a query without a key."""

    def attend(q, k, v):
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        bias = added.to(q.dtype).expand(*heads[0].shape[:2], q.shape[1], k.shape[1])
        lost = (bias == -INF).all(-1, keepdim=True)
        out = scaled_dot_product_attention(*heads, bias.masked_fill(lost, 0), scale=scale).masked_fill(lost, 0)
        return out.transpose(1, 2)

    return attend


def agree(tensors, bias, added, scale=None, op=None):
    """Values and gradients, as near to double precision as PyTorch's fp32."""
    dout, attend = randn(*tensors[0].shape, seed=9), reference(added, scale)

    def all_of(fn, dtype):
        leaves = [x.to(dtype).detach().requires_grad_() for x in tensors]
        out = fn(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype), materialize_grads=True)]

    ours = lambda q, k, v: memory_efficient_attention(q, k, v, bias, scale=scale, op=op)
    check(all_of(ours, torch.float32), all_of(attend, torch.float64), all_of(attend, torch.float32))


def written_out(M, N, seen):
    return torch.tensor([[0.0 if seen(i, j) else -INF for j in range(N)] for i in range(M)])


@pytest.mark.parametrize("M, N", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_sdpa_with_the_bias_written_out(kind, M, N):
    bias, seen = KINDS[kind](M, N)
    added = written_out(M, N, seen)
    if bias is not None:
        whole = bias.materialize((B, H, M, N))
        assert whole.shape == (B, H, M, N) and torch.equal(whole[1, 2], added)
        assert bias.materialize((M, N), torch.float64).dtype == torch.float64
    agree(inputs(M, N, 1 if "blocks" in kind else B), bias, added, scale=0.3)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_does_the_same(kind):
    bias, seen = KINDS[kind](20, 33)
    agree(inputs(20, 33, 1, 2), bias, written_out(20, 33, seen), op=flash_triton)


@pytest.mark.parametrize("M, N", SIZES)
@pytest.mark.parametrize("shape", [(B, H), (1, H), ()], ids=str)
def test_numbers_as_bias_alone_and_on_a_lower_triangle(shape, M, N):
    numbers = randn(*shape, M, N, seed=5)
    agree(inputs(M, N), numbers, numbers)
    mask = LowerTriangularMask().add_bias(numbers)
    assert isinstance(mask, LowerTriangularMaskWithTensorBias)
    added = numbers + written_out(M, N, lambda i, j: j <= i)
    assert torch.equal(mask.materialize((B, H, M, N)), added.expand(B, H, M, N))
    agree(inputs(M, N), mask, added)


def test_the_numbers_get_their_gradient():
    numbers = randn(H, 9, 9, dtype=torch.float64).requires_grad_()
    tensors, dout = inputs(9, 9, dtype=torch.float64), randn(B, 9, H, K, seed=9, dtype=torch.float64)
    ours = memory_efficient_attention(*tensors, LowerTriangularMask().add_bias(numbers))
    theirs = reference(numbers + written_out(9, 9, lambda i, j: j <= i))(*tensors)
    torch.testing.assert_close(*(torch.autograd.grad(out, numbers, dout) for out in (ours, theirs)))


def test_sequences_of_a_list_as_if_each_were_alone():
    sequences = [[randn(1, n, H, K, seed=10 * n + s) for n in (5, 1, 12)] for s in range(3)]
    mask, q = BlockDiagonalMask.from_tensor_list(sequences[0])
    k, v = (torch.cat(x, 1) for x in sequences[1:])
    assert type(mask.make_causal()) is BlockDiagonalCausalMask and q.shape == (1, 18, H, K)
    for packed, alone in ((mask, None), (mask.make_causal(), LowerTriangularMask())):
        outs = packed.split(memory_efficient_attention(q, k, v, packed))
        assert [o.shape[1] for o in outs] == [5, 1, 12]
        for out, *qkv in zip(outs, *sequences):
            torch.testing.assert_close(out, memory_efficient_attention(*qkv, alone))


def test_one_head_groups_of_heads_and_shared_keys():
    q, k, v = inputs(9, 9, H=6)
    want = memory_efficient_attention(q, k, v, LowerTriangularMask())
    one = memory_efficient_attention(q[:, :, 2], k[:, :, 2], v[:, :, 2], LowerTriangularMask())
    torch.testing.assert_close(one, want[:, :, 2])
    numbers = randn(B, 9, 9, seed=5)
    one = memory_efficient_attention(q[:, :, 2], k[:, :, 2], v[:, :, 2], numbers)
    torch.testing.assert_close(one, memory_efficient_attention(q, k, v, numbers[:, None])[:, :, 2])
    grouped = [x.unflatten(2, (2, 3)) for x in (q, k, v)]
    assert torch.equal(memory_efficient_attention(*grouped, LowerTriangularMask()), want.unflatten(2, (2, 3)))
    shared = [x[:, :, ::3] for x in (k, v)]  # two heads for six
    repeated = [x.repeat_interleave(3, 2) for x in shared]
    torch.testing.assert_close(memory_efficient_attention(q, *shared), memory_efficient_attention(q, *repeated))


def test_only_the_blocks_are_computed():
    """Work is Σ mᵢ nᵢ, where padding would take 3 · 30² and one long row 45²."""

    def operations(lengths, bias):
        by_formula = lambda q, k, v, **_: attention_formula(q, k, v)
        with FlopCounterMode(display=False) as counter:
            memory_efficient_attention(*inputs(sum(lengths), sum(lengths), 1), bias, op=by_formula)
        return counter.get_total_flops()

    lengths = [30, 10, 5]
    assert operations([45], None) == 4 * H * K * 45**2
    assert operations(lengths, BlockDiagonalMask.from_seqlens(lengths)) == 4 * H * K * sum(n * n for n in lengths)


class Largest(TorchDispatchMode):
    """The most values of any tensor that an operator made."""

    values = 0

    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        out = fn(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.values = max(self.values, x.numel() if torch.is_tensor(x) else 0)
        return out


@pytest.mark.parametrize(
    "bias", [None, LowerTriangularMask(), BlockDiagonalMask.from_seqlens([100, 156]).make_causal()]
)
def test_no_scores_are_written(bias):
    """Forward and backward, the largest tensor has M · H · K values: no head's M · N."""
    tensors = [x.requires_grad_() for x in inputs(256, 256, 1, 2)]
    with Largest() as largest:
        memory_efficient_attention(*tensors, bias).sum().backward()
    assert 0 < largest.values <= 256 * 2 * K < 256 * 256


def test_bad_input():
    q, k, v = inputs(8, 8)
    with pytest.raises(ValueError, match="p = 0.1, but no weights are kept to be dropped"):
        memory_efficient_attention(q, k, v, p=0.1)
    with pytest.raises(ValueError, match=r"query, key and value are \[B, M, H, K\].*got \[2, 8, 3, 16\], \[2, 8, 16\]"):
        memory_efficient_attention(q, k[:, :, 0], v)
    with pytest.raises(ValueError, match="reaches 0 or more keys each way, got -1, 0"):
        LocalAttentionFromBottomRightMask(-1, 0)
    with pytest.raises(ValueError, match="a length of 0 or more a sequence"):
        BlockDiagonalMask.from_seqlens([3, 2], [5])
    for wrong in ((k[:, :7], v), (k[:1], v[:1])):
        with pytest.raises(ValueError, match="one batch, and a value stands by each key: got .2, 8, 3, 16"):
            memory_efficient_attention(q, *wrong)
    with pytest.raises(TypeError, match="added to scores, got torch.bool"):
        memory_efficient_attention(q, k, v, torch.ones(8, 8, dtype=torch.bool))
    assert BlockDiagonalMask.from_seqlens([]).pieces(0, 0) == []
    mask = BlockDiagonalMask.from_seqlens([5, 3])
    with pytest.raises(ValueError, match="batch of 1, got 2: see from_tensor_list"):
        memory_efficient_attention(q, k, v, mask)
    with pytest.raises(ValueError, match="for 8 queries and 8 keys, got 7 and 8"):
        memory_efficient_attention(q[:1, :7], k[:1], v[:1], mask)
    with pytest.raises(ValueError, match="for 8 queries and 8 keys, got 8 and 9"):
        mask.materialize((8, 9))
