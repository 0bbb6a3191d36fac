"""Labs of chapter 2: how far a policy may drift for a reward, and what PPO's clip takes away."""

import torch

from llmstack import facts
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.execution.ppo import clipped_objective


def kl_coefficient() -> Lab:
    """Stored runs of PPO at six coefficients β and three seeds: what the reward model says, what the reader likes."""
    stored = facts.table("preferences/results")
    runs = {run["seed"]: run["fixed"] for run in stored["run"]}

    def draw(beta: float, seed: int):
        run = runs[seed][str(beta)]
        fig, (left, right) = plots.axes("", "", size=(9.8, 3.6), panels=2)
        steps = [stored["kept"] * i for i in range(len(run["gold"]))]
        curves = {"colours that the reader likes": run["gold"], "reward model": run["reward"]}
        plots.line(
            curves, steps, marks=False, xlabel="step", ylabel="reward, and colours", title=f"β = {beta}", ax=left
        )
        left.set(ylim=(-0.3, 3))
        looks = zip(("last_gold", "last_reward"), ("reader", "reward model"), "os", plots.COLOURS)
        for key, label, marker, colour in looks:
            points = [(r["last_kl"], r[key]) for r in runs[seed].values()]
            right.plot(*zip(*points), marker, label=label, markersize=6, color=colour)
            right.plot(run["last_kl"], run[key], marker, markersize=14, fillstyle="none", color="black")
        right.set(xlabel="KL to the tuned model, nats an answer", ylim=(-0.3, 3), title="all six, after 60 steps")
        right.legend(frameon=False)
        says = f"β = {beta}, seed {seed}: {run['last_kl']:.1f} nats from the tuned model; the reward model says "
        says += f"{run['last_reward']:.1f}, the reader counts {run['last_gold']:.1f} colours. Asked about a cat: "
        return fig, says + run["says"]

    return lab(draw, "How far it may drift", beta=stored["coefficients"][::-1], seed=list(runs))


def clip_range() -> Lab:
    """PPO's objective of one token against its ratio."""

    def draw(advantage: float, clip: float):
        ratio = torch.linspace(0, 2.5, 251)
        found = clipped_objective(ratio, torch.full_like(ratio, advantage), clip)
        fig, ax = plots.axes("", "")
        curves = {"clipped": found.numpy(), "ratio × advantage": (ratio * advantage).numpy()}
        plots.line(curves, ratio.numpy(), marks=False, xlabel="ratio π / π_old", ylabel="objective", ax=ax)
        ax.axvline(1, color="grey", linewidth=0.8)
        if not advantage:
            return fig, "An advantage of 0: nothing to gain, whatever the ratio."
        way, edge = ("up", 1 + clip) if advantage > 0 else ("down", 1 - clip)
        return fig, f"Advantage {advantage:g}: pushed {way} until the ratio is {edge:.2f}; past that the slope is zero."

    return lab(draw, "What the clip takes away", advantage=(-2.0, 2.0, 0.5, 1.0), clip=(0.05, 0.5, 0.05, 0.2))
