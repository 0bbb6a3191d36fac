"""Pruning and LoRA together: channels of the feed-forward networks go, and what stays is tuned: SPLoRA and LoRAPrune.

    y = (W + ΔW) (x ⊙ columns) ⊙ rows          ΔW = (α / r) B A          masks of 0 and 1 over whole channels

A channel is a row of gate and up and a column of down. The mask covers the adapter too, so that masked and small agree:
W[rows, columns] + B[rows] A[:, columns] is the layer, dense (SPLoRA: Hedegaard et al. 2022, arXiv:2211.10155).

Which channels? SPLoRA here takes the least of Σ (W + ΔW)² once. LoRAPrune (Zhang et al. 2023, arXiv:2305.18403, eqs. 6
to 11) wants (∂L/∂W ⊙ W)², but a frozen W has no gradient: what one step does to B A stands in for it,

    Ĝ = ∂B A + B ∂A − ∂B ∂A          I = (Ĝ ⊙ (W + ΔW))², summed over a channel, a running mean over steps

and a few channels go at a time, while the rest learn to do without them. Every layer keeps the same number, so what is
left is an ordinary model with a smaller d_ff.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmstack.architectures.layers import FeedForward
from llmstack.execution.finetune.base import Tuned
from llmstack.execution.finetune.lora import LoRA, attach, dense


class MaskedLoRA(LoRA):
    """LoRA whose inputs (`columns`) and outputs (`rows`) can be switched off."""

    def __init__(self, base: nn.Linear, r: int, alpha: float, rng: torch.Generator):
        super().__init__(base, r, alpha, rng)
        for name, size in (("rows", base.out_features), ("columns", base.in_features)):
            self.register_buffer(name, torch.ones(size, dtype=torch.bool, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.columns) * self.rows

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The layer without masks and adapter, [kept rows, kept columns]."""
        bias = self.base.bias
        return dense(self.weight[self.rows][:, self.columns], None if bias is None else bias[self.rows])


def lora_importance(module: MaskedLoRA) -> Tensor:
    """LoRAPrune's I [out, in] from A, B and their gradients alone."""
    da, db = module.a.grad, module.b.grad
    return ((db @ module.a + module.b @ da - db @ da) * module.weight) ** 2


def parts(ffn: FeedForward) -> list[tuple[MaskedLoRA, str, int]]:
    """Whose rows or columns the inner channels are: (layer, name of its mask, axis to sum over)."""
    return [(m, "rows", 1) for m in (ffn.gate, ffn.up) if m is not None] + [(ffn.down, "columns", 0)]


@torch.no_grad()
def channels(ffn: FeedForward, importance: Callable[[MaskedLoRA], Tensor]) -> Tensor:
    """The importance of each of the F inner channels, summed over what belongs to it."""
    return sum(importance(m).sum(axis) for m, _, axis in parts(ffn))  # [F]


def mask(ffn: FeedForward, scores: Tensor, kept: int) -> None:
    """Keep the `kept` channels of the highest scores among those that are left."""
    best = scores.masked_fill(~ffn.down.columns, -torch.inf).topk(kept).indices
    for m, which, _ in parts(ffn):
        getattr(m, which).zero_()[best] = True


def splora(model: nn.Module, r: int = 8, alpha: float = 16.0, keep: float = 0.5, seed: int = 0) -> Tuned:
    """Keep that share of the channels, by magnitude, and tune the rest. `merge()` gives the small dense model."""
    ffns, kept, tuned = _prepare(model, r, alpha, keep, seed)
    for ffn in ffns:
        mask(ffn, channels(ffn, lambda m: m.weight**2), kept)
    return tuned


def loraprune(model: nn.Module, r=8, alpha=16.0, keep=0.5, rounds=5, every=10, momentum=0.9, seed=0) -> Tuned:
    """Prune as it trains: after every `every` steps a share goes, `rounds` times. `merge()` gives the small model."""
    if min(rounds, every) < 1:
        raise ValueError(f"rounds = {rounds!r} and every = {every!r}, but both are at least 1")
    ffns, kept, tuned = _prepare(model, r, alpha, keep, seed)
    scores, steps = [0.0] * len(ffns), 0

    def after_backward() -> None:
        nonlocal steps
        steps += 1
        for i, ffn in enumerate(ffns):
            scores[i] = momentum * scores[i] + (1 - momentum) * channels(ffn, lora_importance)
            if steps % every == 0 and steps <= rounds * every:
                gone = (len(scores[i]) - kept) * steps / (rounds * every)
                mask(ffn, scores[i], round(len(scores[i]) - gone))

    tuned.after_backward = after_backward
    return tuned


def _prepare(model: nn.Module, r: int, alpha: float, keep: float, seed: int) -> tuple[list[FeedForward], int, Tuned]:
    """MaskedLoRA in every FFN; the FFNs, how many channels stay in each, and the Tuned whose merge makes it small."""
    ffns = [m for m in model.modules() if isinstance(m, FeedForward)]
    if not 0 < keep <= 1:
        raise ValueError(f"keep = {keep!r}, but the share of channels that stay is above 0 and at most 1")
    if not ffns or model.config.n_experts:
        raise ValueError("channels of plain feed-forward networks are pruned, and this model has experts or none")
    names = [name for name in ("gate", "up", "down") if getattr(ffns[0], name) is not None]
    tuned = attach(model, r, alpha, names, seed, kind=MaskedLoRA)
    cut = tuned.merge

    def merge() -> nn.Module:
        cut()
        model.config = model.config.with_(d_ff=ffns[0].down.in_features)
        return model

    tuned.merge = merge
    tuned.fixed = lambda: {name: b for name, b in model.named_buffers() if name.endswith((".rows", ".columns"))}
    return ffns, max(1, round(keep * model.config.d_ff)), tuned
