"""Labs of chapter 2: how an optimizer walks down a surface, and what a schedule does to its rate."""

import numpy as np

from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.execution.optimizers import OPTIMIZERS, sgd
from llmstack.execution.schedules import SCHEDULES

MAKERS = {"sgd": sgd, "momentum": lambda w, lr: sgd(w, lr, momentum=0.9)} | OPTIMIZERS
MAKERS["lars"] = lambda w, lr: OPTIMIZERS["lars"](w, lr, momentum=0.0, eta=1.0)


def walk(name: str, rate: float, curvature: float, steps: int = 60) -> np.ndarray:
    """[steps + 1, 2]: the way of two weights, each a layer, on (x² + curvature · y²) / 2 from (−4, 1.5)."""
    w = {"x": np.array([[-4.0]]), "y": np.array([[1.5]])}
    optimizer, path = MAKERS[name](w, lr=rate), [[-4.0, 1.5]]
    for _ in range(steps):
        optimizer.step({"x": w["x"] + 0, "y": curvature * w["y"]})
        path.append([min(max(a.item(), -1e6), 1e6) for a in w.values()])
    return np.array(path)


def optimizer_surface() -> Lab:
    """A valley: flat along x, steep along y."""

    def draw(optimizer: str, rate_as_power_of_ten: float, curvature: int):
        path = walk(optimizer, 10**rate_as_power_of_ten, curvature)
        losses = (path[:, 0] ** 2 + curvature * path[:, 1] ** 2) / 2
        fig, (left, right) = plots.axes("", "", size=(9.8, 3.6), panels=2)
        x, y = np.meshgrid(np.linspace(-5, 2, 80), np.linspace(-2, 2, 80))
        left.contour(x, y, (x**2 + curvature * y**2) / 2, losses[0] * 0.5 ** np.arange(9)[::-1], cmap="Greys")
        plots.line({optimizer: tuple(path.T)}, marks=True, xlabel="weight x", ylabel="weight y", ax=left)
        left.set(xlim=(-5, 2), ylim=(-2, 2))
        series = {optimizer: np.maximum(losses, 1e-12)}
        plots.line(series, xlabel="step", ylabel="loss", logy=True, title=optimizer, marks=False, ax=right)
        verdict = "grows" if losses[-1] > losses[0] else "goes"
        name = f"{optimizer} at rate {10**rate_as_power_of_ten:.2g}"
        return fig, f"{name}: in 60 steps the loss {verdict} from {losses[0]:.3g} to {losses[-1]:.2g}."

    controls = dict(optimizer=list(MAKERS), rate_as_power_of_ten=(-3.0, 0.5, 0.05, -1.05), curvature=(1, 50, 1, 20))
    return lab(draw, "Seven optimizers in a valley", **controls)


def schedules() -> Lab:
    """The five schedules on the same 1000 steps, one of them drawn bold."""

    def draw(schedule: str, warm_up: int, floor: float):
        takes_floor = ("linear", "cosine", "wsd")
        made = {n: f(1000, warm_up, **({"floor": floor} if n in takes_floor else {})) for n, f in SCHEDULES.items()}
        curves = {n: [f(t) for t in range(1000)] for n, f in made.items()}
        fig, ax = plots.axes("", "")
        plots.line(curves, xlabel="step", ylabel="factor of the peak rate", marks=False, ax=ax)
        ax.lines[list(curves).index(schedule)].set_linewidth(4)
        mean = np.mean(curves[schedule])
        return fig, f"{schedule}, {warm_up} steps of warm-up: on average {mean:.3f} of the peak rate over 1000 steps."

    names = ["cosine", *(n for n in SCHEDULES if n != "cosine")]
    return lab(draw, "Five schedules", schedule=names, warm_up=(0, 400, 10, 100), floor=(0.0, 0.5, 0.05, 0.0))
