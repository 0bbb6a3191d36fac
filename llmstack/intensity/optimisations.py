"""What the optimisations of both surveys have in common: fewer operations, or more of them for each byte.

    optimisations() -> [Optimisation, …]      .name .before .after (Points under a roofline) .gain

Each is priced before and after, for Llama-3.1-8B at a context of 8,192 tokens in 16 bits: a kernel by the formulas of
its file, a model by `counts`. Operations never rise; they fall, or the intensity rises. What it does to results is
rounding where only fewer bytes move, and the format's own error where fewer bits are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from llmstack.config import preset
from llmstack.intensity.counts import FUSED, USUAL, Convention, Term, terms, total, traffic
from llmstack.intensity.fusion import capture, cost, fuse
from llmstack.intensity.roof import Point

MODEL, TOKENS = "llama3.1-8b", 8192
NF4_BITS = 4.127  # a weight with its double-quantised constants: QLoRA, arXiv:2305.14314, section 3; ops/nf4.py


@dataclass(frozen=True)
class Optimisation:
    """Operations and bytes before and after."""

    name: str
    before: Point
    after: Point

    @property
    def gain(self) -> float:
        """How many times more operations a byte, or fewer operations, whichever is more."""
        return max(self.after.intensity / self.before.intensity, self.before.flops / self.after.flops)


def optimisations() -> list[Optimisation]:
    """One row each, in the order of chapter 3."""
    c, R, b = preset(MODEL), TOKENS, 2
    D, V = c.d_model, c.vocab_size
    sums, logits = b * R * D, b * R * V  # bytes of the residual stream, of the logits
    add_norm, loss = 5 * R * D + 3 * R, 2 * R * V * D + 4 * R * V
    step, again, train = (traffic(c, 1, R, phase) for phase in ("decode", "forward", "train"))
    wide = traffic(c, 1, R, "train", replace(USUAL, bytes=4.0))
    few = replace(step, weight_bytes=step.weight_bytes * NF4_BITS / 16)
    chain = _chain()
    rows = {
        "pointwise fusion": [(chain[0], chain[1]), (chain[0], chain[2])],
        "residual + RMSNorm": [(add_norm, 5 * sums + b * D), (add_norm, 4 * sums + b * D)],
        "FlashAttention": [_attention(USUAL), _attention(FUSED)],
        "linear + cross-entropy": [(loss, sums + b * V * D + moved) for moved in (2 * logits, 0)],
        "4-bit weights": [step, few],
        "mixed precision": [wide, train],
        "KV cache": [again, step],
    }
    pairs = {name: [(x.flops, x.bytes) if isinstance(x, Term) else x for x in pair] for name, pair in rows.items()}
    return [Optimisation(n, Point(f"{n}, before", *old), Point(f"{n}, after", *new)) for n, (old, new) in pairs.items()]


def chain(x, b, r):
    """Four pointwise operations: what fusion joins."""
    return torch.sigmoid(x + b) * 2 + r


def _chain() -> tuple[int, int, int]:
    """Operations of the chain (a sigmoid is four), bytes before, bytes after: as the pass itself counts them."""
    inputs = torch.zeros(64, 256), torch.zeros(256), torch.zeros(64, 256)
    graph = capture(chain, *inputs)
    before = cost(graph).bytes
    fuse(graph, "numpy")
    return 7 * inputs[0].numel(), before, cost(graph).bytes


def _attention(convention: Convention) -> Term:
    return total(
        t for t in terms(preset(MODEL), 1, TOKENS, convention=convention) if t.part in ("attention", "softmax")
    )
