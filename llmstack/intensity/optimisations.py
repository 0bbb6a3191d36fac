"""What the optimisations of both surveys have in common: fewer operations, or more of them for each byte.

    optimisations() -> [Optimisation, …]      .before .after (Points under a roofline) .gain .run() .tolerance

Each row prices an optimisation before and after, on Llama-3.1-8B or on the operation itself, and runs it on a small
example. Operations never rise; they fall, or the intensity rises; results stay within the row's tolerance: rounding
for what only moves fewer bytes, the format's own error for what stores fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm

from llmstack.architectures import build
from llmstack.architectures.cache import ContiguousCache
from llmstack.config import preset
from llmstack.intensity.counts import FUSED, USUAL, terms, total, traffic
from llmstack.intensity.fusion import capture, cost, fuse
from llmstack.intensity.roof import Point
from llmstack.ops import fused
from llmstack.ops.attention import attention_formula
from llmstack.ops.flash import flash_torch
from llmstack.ops.packed import NFLinear

MODEL, TOKENS = "llama3.1-8b", 8192


@dataclass(frozen=True)
class Optimisation:
    """before and after: operations and bytes; run gives the results before and after of a small example."""

    name: str
    before: Point
    after: Point
    run: Callable[[], tuple[Tensor, Tensor]]
    tolerance: float = 1e-5  # of the results' difference, relative to their norm

    @property
    def gain(self) -> float:
        """How many times fewer bytes an operation, or fewer operations, whichever is more."""
        return max(self.after.intensity / self.before.intensity, self.before.flops / self.after.flops)

    def error(self) -> float:
        before, after = (x.double() for x in self.run())
        return ((after - before).norm() / before.norm()).item()


def optimisations() -> list[Optimisation]:
    """One row each, in the order of chapter 3."""
    return [_pointwise(), _add_norm(), _flash(), _loss(), _bits(), _precision(), _cache()]


def _row(name: str, before: tuple, after: tuple, run: Callable, tolerance: float = 1e-5) -> Optimisation:
    return Optimisation(name, Point(f"{name}: before", *before), Point(f"{name}: after", *after), run, tolerance)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _pointwise() -> Optimisation:
    def chain(x, b, r):
        return torch.sigmoid(x + b) * 2 + r

    inputs = _randn(64, 256), _randn(256, seed=1), _randn(64, 256, seed=2)
    graph = capture(chain, *inputs)
    before, work = cost(graph), 4 * inputs[0].numel() + 3 * inputs[0].numel()  # a sigmoid is four operations
    fuse(graph, "numpy")
    return _row(
        "pointwise fusion", (work, before.bytes), (work, cost(graph).bytes), lambda: (chain(*inputs), graph(*inputs))
    )


def _add_norm() -> Optimisation:
    R, D = TOKENS, preset(MODEL).d_model
    work, moved = 5 * R * D + 3 * R, 2 * (5 * R * D + D)  # ops/rmsnorm.py and the sum; bytes by ops/fused.py
    x, r, g = _randn(4, 64), _randn(4, 64, seed=1), _randn(64, seed=2)
    return _row(
        "residual + RMSNorm",
        (work, moved),
        (work, moved - 2 * R * D),
        lambda: (rms_norm(x + r, g.shape, g, 1e-6), fused.add_norm_torch(x, r, g)[1]),
    )


def _flash() -> Optimisation:
    price = lambda convention: total(
        t for t in terms(preset(MODEL), 1, TOKENS, convention=convention) if t.part in ("attention", "softmax")
    )
    scores, kept = price(USUAL), price(FUSED)
    q, k, v = (_randn(1, 2, 50, 16, seed=i) for i in range(3))
    return _row(
        "FlashAttention",
        (scores.flops, scores.bytes),
        (kept.flops, kept.bytes),
        lambda: (attention_formula(q, k, v), flash_torch(q, k, v)),
    )


def _loss() -> Optimisation:
    c = preset(MODEL)
    R, V, D = TOKENS, c.vocab_size, c.d_model
    work, moved = 2 * R * V * D + 4 * R * V, 2 * (R * D + V * D + 2 * R * V)
    x, w, targets = _randn(20, 16), _randn(300, 16, seed=1), torch.arange(20)
    return _row(
        "linear + cross-entropy",
        (work, moved),
        (work, moved - 4 * R * V),
        lambda: (cross_entropy(x @ w.T, targets), fused.linear_cross_entropy_torch(x, w, targets)),
    )


def _bits() -> Optimisation:
    """Weights of a decoding step in NF4 with double quantisation, 4.127 bits each as stored; activations stay."""
    step = traffic(preset(MODEL), 1, TOKENS, "decode")
    layer, x = nn.Linear(256, 64, bias=False), _randn(4, 256)
    layer.weight.data = _randn(64, 256, seed=1)
    packed = NFLinear(layer)
    fewer = replace(step, weight_bytes=step.weight_bytes * packed.bits / 16)
    return _row(
        "4-bit weights", (step.flops, step.bytes), (step.flops, fewer.bytes), lambda: (layer(x), packed(x)), 0.15
    )


def _precision() -> Optimisation:
    wide = traffic(preset(MODEL), 1, TOKENS, "train", replace(USUAL, bytes=4.0))
    half = traffic(preset(MODEL), 1, TOKENS, "train")
    x, w = _randn(20, 64), _randn(64, 64, seed=1)
    narrow = lambda t: t.bfloat16().float()  # operands of 16 bits, sums of 32, as a matrix unit does it
    return _row(
        "mixed precision",
        (wide.flops, wide.bytes),
        (half.flops, half.bytes),
        lambda: (x @ w, narrow(x) @ narrow(w)),
        1e-2,
    )


def _cache() -> Optimisation:
    """The next token of TOKENS: all of them again, or one that reads the keys and values of the others."""
    c = preset(MODEL)
    again, step = traffic(c, 1, TOKENS), traffic(c, 1, TOKENS, "decode")

    @torch.no_grad()
    def run():
        small = replace(
            preset(MODEL), d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_head=8, d_ff=48, vocab_size=50
        )
        model, ids, cache = build(small), torch.arange(12)[None], ContiguousCache(small, 1, 12)
        model(ids[:, :-1], cache=cache)
        return model(ids)[:, -1], model(ids[:, -1:], cache=cache)[:, -1]

    return _row("KV cache", (again.flops, again.bytes), (step.flops, step.bytes), run)
