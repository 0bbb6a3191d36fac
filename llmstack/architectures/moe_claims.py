"""What the surveys claim about mixtures of experts, recomputed. data/claims.toml names these functions."""

import torch

from llmstack.architectures.routers import z_loss
from llmstack.config import preset
from llmstack.facts import Computed


def capacity_and_cost() -> Computed:
    """AC-09, BC-37: Mixtral's layer with 64 experts against 8: parameters, operations a token, bytes sent a token."""
    c = preset("mixtral-8x7b")
    expert = 3 * c.d_model * c.d_expert
    stored = {E: E * (expert + c.d_model) for E in (8, 64)}
    operations = {E: 2 * c.top_k * expert + 2 * E * c.d_model for E in (8, 64)}
    away = {
        E: c.top_k * c.d_model * 2 * 2 * (1 - 1 / E) for E in (8, 64)
    }  # there and back in 16 bits, an expert a rank
    ratios = [part[64] / part[8] for part in (stored, operations, away)]
    text = "64 experts for 8: {:.2f} times the parameters, {:.4f} times the operations, {:.3f} times the bytes sent"
    return Computed(ratios, "times", text.format(*ratios))


def shazeer_2017() -> Computed:
    """BC-39: 131,072 experts of two matrices 512 × 1,024, 4 for a token (arXiv:1701.06538, section 5.2, appendix D)."""
    expert = 2 * 512 * 1024
    total = 131_072 * expert
    text = f"131,072 experts of {expert:,} weights: {total:,}; a token passes 4 experts, {4 * expert:,} weights"
    return Computed(total, "parameters", text)


def gshard_2020() -> Computed:
    """BC-41: 36 layers, in every second one 2,048 experts of two matrices 1,024 × 8,192 (arXiv:2006.16668)."""
    total = 36 // 2 * 2048 * 2 * 1024 * 8192
    return Computed(total, "parameters", f"18 layers of 2,048 experts: {total:,} weights; June 2020, before Switch")


def z_loss_alone() -> Computed:
    """BC-43: what the z-loss does to logits when nothing else pulls: the stability half of ST-MoE."""
    h = 4 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    before = float(h.logsumexp(-1).abs().mean())
    h.requires_grad_()
    for _ in range(100):
        (step,) = torch.autograd.grad(z_loss(h), h)
        h.data -= 10 * step
    after = float(h.detach().logsumexp(-1).abs().mean())
    return Computed(
        None,
        "",
        f"100 steps of the z-loss take |logsumexp| from {before:.2f} to {after:.2f}; transfer itself is not run",
    )
