"""Labs of chapter 1: patterns of attention, what they cost, how far they reach and what they leave out."""

from collections.abc import Callable, Mapping

import torch

from llmstack.architectures.efficient_attention import masks as m
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.ops.attention import attention_weights

PATTERNS: dict[str, Callable[[int, int, int], m.Mask]] = {
    "window + sinks": lambda T, width, far: (m.window(width) | m.sinks(far)) & m.causal(),
    "window": lambda T, width, far: m.window(width) & m.causal(),
    "window + columns": lambda T, width, far: (m.window(width) & m.causal()) | m.column(far),
    "window + hubs": lambda T, width, far: m.window(width, ahead=width - 1) | m.hubs(range(0, T, T // far)),
    "dilated": lambda T, width, far: (m.dilated(width, 1) | m.dilated(T, far)) & m.causal(),
    "full past": lambda T, width, far: m.causal(),
}
LENGTH = 64


def attention_patterns() -> Lab:
    """A pattern, its steps from token to token, and its error in attention among vectors that drift, so that near ones
    are alike."""
    x, v = torch.randn(2, 1, 1, LENGTH, 16, generator=torch.Generator().manual_seed(0))  # [1, 1, T, Dh] each
    for t in range(1, LENGTH):
        x[:, :, t] = 0.9 * x[:, :, t - 1] + 0.44 * x[:, :, t]

    def draw(pattern: str, width: int, far: int, sharpness: float):
        mask = PATTERNS[pattern](LENGTH, width, far)
        table = mask.matrix(LENGTH)
        whole = (m.everything() if pattern == "window + hubs" else m.causal()).matrix(LENGTH)
        steps = m.hops(table)
        dense, sparse = (attention_weights(sharpness * x, x, seen)[0, 0] for seen in (whole, table))  # [T, S]
        kept, error = float(dense[table].sum() / LENGTH), float((sparse @ v - dense @ v).norm() / (dense @ v).norm())
        fig, (left, right) = plots.axes("", "", size=(9.6, 4.2), panels=2)
        draw_mask(table, left, f"{pattern}: {int(table.sum())} pairs")
        away = torch.where(steps < 0, torch.nan, steps.float())
        plots.heatmap(away, xlabel="key", ylabel="", title="layers until a key is heard", unit="layers", ax=right)
        reached = int((steps >= 0)[whole].sum()) / int(whole.sum())
        says = f"{pattern}: {int(table.sum())} of {int(whole.sum())} pairs; {reached:.0%} of them within reach, in "
        says += f"{int(steps.max())} layers at most. One layer keeps {kept:.0%} of dense attention's weight"
        return fig, f"{says}; its output is off by {error:.0%}."

    dials = dict(pattern=list(PATTERNS), width=(1, 32, 1, 8), far=(1, 16, 1, 4), sharpness=(0.5, 6.0, 0.5, 1.0))
    return lab(draw, "Patterns (far: sinks, stride, number of hubs, or rate)", **dials)


def draw_mask(table: torch.Tensor, ax, title: str) -> None:
    """One boolean table: black where a query may look."""
    plots.heatmap(table.float(), xlabel="key", ylabel="query", title=title, ax=ax)
    ax.images[0].set_clim(0, 1)
    ax.set_aspect("equal")


def gallery(masks: Mapping[str, m.Mask], T: int) -> None:
    """Patterns side by side with the pairs that they leave."""
    fig, axes = plots.axes("", "", size=(2.6 * len(masks), 2.9), panels=len(masks))
    for ax, (name, mask) in zip(axes, masks.items()):
        draw_mask(mask.matrix(T), ax, f"{name}: {mask.nnz(T):,}")
        ax.set(xticks=[], yticks=[], ylabel="query" if ax is axes[0] else "")
    plots.show(fig, "; ".join(f"{name}: {mask.nnz(T):,} of {T * T:,} pairs" for name, mask in masks.items()))
