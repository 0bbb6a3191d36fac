"""Labs of chapter 1 on state spaces: what a state remembers of its past, and what one more token costs."""

from functools import cache

import numpy as np
import torch

from llmstack.architectures.ssm import hippo_memory
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.course.plots import si

LENGTH, SIZES, PASTS = 240, (2, 4, 8, 16, 32, 64), ("waves", "steps", "noise")


@cache
def recalled(past: str, N: int) -> tuple[np.ndarray, np.ndarray, float]:
    """A past of 240 steps, what N states give back of it, and the share of its energy that they leave out, in %."""
    t, rng = torch.arange(LENGTH) / LENGTH, torch.Generator().manual_seed(3)
    steps, noise = torch.randn(12, generator=rng).repeat_interleave(20), torch.randn(LENGTH, generator=rng)
    x = {"waves": (9 * t).sin() + 0.6 * (31 * t * t).sin(), "steps": steps, "noise": noise}[past]
    back = hippo_memory(x, N)
    return x.numpy(), back.numpy(), 100 * float((back - x).square().sum() / x.square().sum())


def state_memory() -> Lab:
    """What a state of N numbers gives back of its past, when HiPPO chooses the numbers."""

    def draw(states: int, past: str):
        fig, (left, right) = plots.axes("", "", size=(9.8, 3.6), panels=2)
        x, back, missing = recalled(past, states)
        both = {"what was": x, f"what {states} states give back": back}
        plots.line(both, xlabel="step", ylabel="value", title=f"the past: {past}", ax=left)
        curves = {kind: [recalled(kind, N)[2] for N in SIZES] for kind in PASTS}
        plots.line(curves, SIZES, xlabel="states", ylabel="energy left out (%)", title="by size", logx=True, ax=right)
        right.axvline(states, color="#888888", linestyle=":")
        right.set_xticks(SIZES, SIZES)
        right.minorticks_off()
        return fig, f"{states} numbers for {LENGTH} steps of {past} leave out {missing:.2g} % of the energy."

    return lab(draw, "What a state remembers", states=[16, 2, 4, 8, 32, 64], past=list(PASTS))


def state_cost() -> Lab:
    """One more token after T: operations and cached values of one Transformer block (12 D² parameters) and of the two
    Mamba layers (6 D² each) that take its place."""

    def draw(d_model: int, states: int):
        D, I, T = d_model, 2 * d_model, 2 ** np.arange(5, 18)
        layer = 2 * I * (3 * D + 2 * D // 16 + 2 * states + 4) + 7 * I * states
        work = {"Transformer block": 24 * D**2 + 4 * D * T, "two Mamba layers": 2 * layer + 0 * T}
        kept = {"Transformer block": 2 * D * T, "two Mamba layers": 2 * I * (states + 3) + 0 * T}
        fig, (left, right) = plots.axes("", "", size=(9.8, 3.6), panels=2)
        look = dict(x=T, xlabel="tokens before it", logx=True, logy=True, marks=False)
        plots.line(work, ylabel="operations", title="the work of a token", ax=left, **look)
        plots.line(kept, ylabel="values", title="what is kept for it", ax=right, **look)
        (block, two), (cache, state) = ([int(y[-1]) for y in both.values()] for both in (work, kept))
        return fig, (
            f"d_model = {D}, {states} states: equal work at {(2 * layer - 24 * D**2) / (4 * D):.0f} tokens, equal room "
            f"at {state / (2 * D):.0f}. After 131,072 the block does {block / two:.1f} times the work, and keeps "
            f"{si(cache)} values to {si(state)}."
        )

    return lab(draw, "A token after T others", d_model=[2560, 768, 1024, 2048], states=[16, 4, 64, 128])
