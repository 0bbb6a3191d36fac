"""Block and gather forms against dense attention under the same mask, and their work and memory against the length."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmstack.architectures.efficient_attention import blocks as b
from llmstack.architectures.efficient_attention import masks as m

BIRD = m.big_bird(96, 8, seed=3)
FORMS = {
    "window": (lambda q, k, v: b.window_attention(q, k, v, 5), m.window(5) & m.causal(), 50),
    "window of one": (lambda q, k, v: b.window_attention(q, k, v, 1), m.window(1) & m.causal(), 7),
    "longformer": (
        lambda q, k, v: b.window_attention(q, k, v, 5, 4, hubs=[0, 17]),
        m.window(5, 4) | m.hubs([0, 17]),
        63,
    ),
    "sinks": (
        lambda q, k, v: b.window_attention(q, k, v, 6, hubs=range(3)),
        (m.window(6) | m.sinks(3)) & m.causal(),
        50,
    ),
    "strided": (lambda q, k, v: b.strided_attention(q, k, v, 7), m.strided(7), 50),
    "strided, one column": (lambda q, k, v: b.strided_attention(q, k, v, 9), m.strided(9), 7),
    "column": (lambda q, k, v: b.column_attention(q, k, v, 4)[0], m.column(4), 30),
    "big bird": (lambda q, k, v: b.block_attention(q, k, v, BIRD, 8), BIRD, 96),
    "causal big bird": (lambda q, k, v: b.block_attention(q, k, v, BIRD & m.causal(), 8), BIRD & m.causal(), 96),
    "parallel windows": (
        lambda q, k, v: b.block_attention(q, k, v, m.parallel_windows([13, 30], 5), 6),
        m.parallel_windows([13, 30], 5),
        48,
    ),
    "queries without keys": (lambda q, k, v: b.block_attention(q, k, v, ~m.causal(), 4), ~m.causal(), 16),
    "whole empty rows": (lambda q, k, v: b.block_attention(q, k, v, m.dilated(4, 4), 1), m.dilated(4, 4), 8),
}


def qkv(T, H=2, Dh=4, dtype=torch.float64):
    return [torch.randn(2, H, T, Dh, generator=torch.Generator().manual_seed(s), dtype=dtype) for s in range(3)]


def dense(q, k, v, mask):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e9))
    return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-30)


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_dense_attention_under_its_mask(name):
    attend, mask, T = FORMS[name]
    q, k, v = (x.requires_grad_() for x in qkv(T))
    ours, theirs = attend(q, k, v), dense(q, k, v, mask.matrix(T))
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9), dtype=ours.dtype)
    grads = [torch.autograd.grad(out, (q, k, v), dy) for out in (ours, theirs)]
    for a, c in zip(*grads):
        torch.testing.assert_close(a, c)


def mixed(q, k, v, patterns, causal):
    """LongNet's formula with plain exponentials: Σ s_i out_i / Σ s_i, s_i the denominators (section 2.3)."""
    T, total, share = q.shape[2], 0, 0
    for segment, rate in patterns:
        heads = [m.dilated(segment, rate, h % rate) for h in range(q.shape[1])]
        mask = torch.stack([(x & m.causal() if causal else x).matrix(T) for x in heads])
        weights = (q @ k.mT / q.shape[-1] ** 0.5).exp() * mask
        total, share = total + weights @ v, share + weights.sum(-1, keepdim=True)
    return total / share.clamp(min=1e-30)


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("T, patterns", [(48, [(8, 1), (24, 3)]), (45, [(4, 1), (16, 2), (64, 8)]), (20, [(8, 4)])])
def test_dilated_mix(T, patterns, causal):
    q, k, v = qkv(T, H=3)
    out = b.dilated_attention(q, k, v, patterns, causal)
    torch.testing.assert_close(out, mixed(q, k, v, patterns, causal))
    weights = b.dilated_attention(q, k, torch.ones_like(v), patterns, causal)
    covered = out.abs().sum(-1) > 0
    torch.testing.assert_close(weights[covered], torch.ones_like(weights[covered]), msg="weights sum to one")
    assert covered.all() == (patterns[0][1] == 1), "a token that no pattern holds gets zeros"


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
def test_one_segment_without_gaps_is_dense_attention(causal):
    q, k, v = qkv(30)
    mask = (m.causal() if causal else m.everything()).matrix(30)
    torch.testing.assert_close(b.dilated_attention(q, k, v, [(30, 1)], causal), dense(q, k, v, mask))


BIRDS = {T: (m.big_bird(T, 16), 16, m.big_bird(T, 16).blocks(T, 16)) for T in (256, 512, 1024)}
LINEAR = {
    "window": lambda q, k, v: b.window_attention(q, k, v, 17),
    "longformer": lambda q, k, v: b.window_attention(q, k, v, 9, 8, hubs=[0, 1]),
    "dilated": lambda q, k, v: b.dilated_attention(q, k, v, [(16, 1), (64, 4)]),
    "big bird": lambda q, k, v: b.block_attention(q, k, v, *BIRDS[q.shape[2]]),
}


@pytest.mark.parametrize("name", LINEAR)
def test_work_is_linear_in_length(name):
    work = {T: b.pairs(LINEAR[name], T) for T in (256, 512, 1024)}
    assert work[1024] - work[512] == 2 * (work[512] - work[256]) > 0, "a straight line"
    assert work[1024] < 1024**2 / 4


def test_work_is_what_the_pattern_says():
    assert b.pairs(lambda q, k, v: b.dilated_attention(q, k, v, [(64, 1), (256, 4)]), 512) == 512 * (64 + 256 // 16)
    strided = b.pairs(lambda q, k, v: b.strided_attention(q, k, v, 32), 1024)
    assert m.strided(32).nnz(1024) <= strided <= 3.1 * 1024**1.5
    bird, _, layout = BIRDS[512]
    assert b.pairs(LINEAR["big bird"], 512) == layout.sum() * 16**2 == bird.nnz(512)
    assert b.pairs(lambda q, k, v: b.block_attention(q, k, v, m.everything(), 64), 256) == 256**2


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        self.values = max([self.values, *(x.untyped_storage().nbytes() // x.element_size() for x in made)])
        return out


@pytest.mark.parametrize("name", LINEAR)
def test_memory_is_linear_in_length(name):
    largest = []
    for T in (256, 512, 1024):
        with Largest() as seen:
            LINEAR[name](*qkv(T, H=1))
        largest.append(seen.values)
    assert largest[2] - largest[1] <= 2.1 * (largest[1] - largest[0])
    assert largest[2] < 1024 * 300, "no table of 2 × 1024 × 1024 is ever made"


def test_bad_input():
    q, k, v = qkv(30)
    for call, says in [
        (lambda: b.window_attention(q, k, v, 0), "width = 0, but a query sees itself"),
        (lambda: b.strided_attention(q, k, v, 0), "stride = 0"),
        (lambda: b.block_attention(q, k, v, m.causal(), 16), "block = 16 does not divide T = 30: pad"),
        (lambda: b.block_attention(q, k, v, m.causal(), 10, torch.ones(2, 2).bool()), r"layout \[2, 2\] is not"),
        (lambda: b.dilated_attention(q, k, v, [(10, 4)]), "segment = 10, rate = 4: the rate must divide"),
        (lambda: b.dilated_attention(q, k, v, []), "patterns is empty"),
    ]:
        with pytest.raises(ValueError, match=says):
            call()
