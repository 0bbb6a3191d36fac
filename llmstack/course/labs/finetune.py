"""The lab of section 2.3: how much of an update a product of two thin matrices can hold."""

import numpy as np

from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.execution.claims_finetune import runs

SHAPES = {"ffn.up": (384, 192)}  # of llama-2m; what is not named here is 192 × 192


def updates() -> dict[str, np.ndarray]:
    """Singular values by name: what full tuning added to three matrices, a matrix itself, and two made up."""
    rng = np.random.default_rng(0)
    noise, thin = rng.normal(size=(192, 192)), rng.normal(size=(192, 4)) @ rng.normal(size=(4, 192))
    named = {f"ΔW of {n.removeprefix('blocks.1.')}": s for n, s in runs()["full"]["spectra"].items() if n[0] != "W"}
    named |= {"W itself, ffn.up": runs()["full"]["spectra"]["W of blocks.1.ffn.up"]}
    made = {"rank 4, and a little noise": thin + 0.1 * noise, "noise alone": noise}
    return {n: np.array(s) for n, s in named.items()} | {n: np.linalg.svd(w)[1] for n, w in made.items()}


def lora_rank() -> Lab:
    """The best update of rank r keeps the r largest singular values (Eckart and Young 1936)."""
    known = updates()

    def draw(update: str, rank: int):
        s = known[update]
        left_out = np.sqrt(np.append(np.cumsum((s**2)[::-1])[::-1], 0) / (s**2).sum())  # by rank, from 0
        rows, columns = next((shape for name, shape in SHAPES.items() if update.endswith(name)), (192, 192))
        share = rank * (rows + columns) / (rows * columns)
        fig, (left, right) = plots.axes("", "", size=(9.8, 3.6), panels=2)
        left.bar(range(1, len(s) + 1), s / s[0], width=1.0, color=["#222222"] * rank + ["#c8c8c8"] * (len(s) - rank))
        left.set(xlabel="singular value", ylabel="size, first = 1", title=update)
        shown = {"left out": (range(len(s) + 1), left_out), "the chosen rank": ([rank], [left_out[rank]])}
        plots.line(shown, xlabel="rank r", ylabel="‖ΔW − BA‖ / ‖ΔW‖", marks=False, ax=right)
        right.lines[1].set(marker="o", markersize=9, linestyle="none")
        right.legend(frameon=False)
        says = f"{update}, rank {rank}: BA has {share:.1%} of the matrix's values and leaves out {left_out[rank]:.1%}"
        return fig, f"{says} of the update (in norm)."

    return lab(draw, "The rank of an update", update=list(known), rank=(1, 191, 1, 16))
