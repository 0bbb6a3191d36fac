"""The labs of section 3.5: what a budget is best spent on, and what changes when the model is also used."""

from __future__ import annotations

import numpy as np

from llmstack import facts
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.intensity.scaling import Law

PIVOT = 70e9, 1.4e12  # Chinchilla: where the law is held while its exponents turn
NEAR = 0.01  # nats


def law_with(law: Law, alpha: float, beta: float) -> Law:
    """The law with other exponents, and A and B such that it is as before at the pivot."""
    N, D = PIVOT
    return Law(law.E, law.A * N ** (alpha - law.alpha), law.B * D ** (beta - law.beta), alpha, beta)


def isoflop_curve() -> Lab:
    """Loss over N at one budget, its lowest point, and the sizes that come within a hundredth of a nat of it."""
    law = Law(**facts.table("scaling")["refitted"]["loss"])

    def draw(budget_as_power_of_ten: float, alpha: float, beta: float):
        C, now = 10**budget_as_power_of_ten, law_with(law, alpha, beta)
        (best, tokens), (a, _) = now.optimum(C), now.exponents
        N = best * np.geomspace(1e-2, 1e2, 401)
        loss, least = now(N, C / 6 / N), float(now(best, tokens))
        close = N[loss < least + NEAR]
        fig, ax = plots.axes("parameters N (tokens D = C / 6N)", "loss (nats a token)")
        ax.axvspan(close[0], close[-1], color="#e8e8e8", zorder=0, label=f"within {NEAR} nats of the lowest")
        ax.plot(N, loss, color=plots.COLOURS[0], label=f"C = 10^{budget_as_power_of_ten:g} operations")
        ax.plot([best], [least], "o", color=plots.COLOURS[3], label="the lowest")
        ax.set_xscale("log")
        ax.set_ylim(least - 0.02, least + 0.4)
        ax.legend(framealpha=1, edgecolor="white")
        return fig, (
            f"At 10^{budget_as_power_of_ten:g} operations {plots.si(best)} parameters and {plots.si(tokens)} tokens "
            f"are best, {tokens / best:.3g} tokens a parameter, loss {least:.3f}; N* grows as C^{a:.2f}. From "
            f"{plots.si(close[0])} to {plots.si(close[-1])} parameters the loss is at most {NEAR} nats higher."
        )

    exponents = dict(alpha=(0.2, 0.6, 0.01, 0.35), beta=(0.2, 0.6, 0.01, 0.37))
    return lab(draw, "One budget, every size", budget_as_power_of_ten=(17, 27, 0.25, 23.75), **exponents)


def overtraining() -> Lab:
    """Operations for training to one loss and for reading or writing tokens afterwards, over N, under both fits."""
    named = {"law as fitted again": "refitted", "law as printed": "chinchilla"}
    laws = {name: Law(**facts.table("scaling")[key]["loss"]) for name, key in named.items()}

    def draw(as_good_as: float, tokens_served_as_power_of_ten: float):
        served, size = 10**tokens_served_as_power_of_ten, as_good_as * 1e9
        fig, ax = plots.axes("parameters N, trained until the loss is the same", "operations")
        says, low = [], np.inf
        for (name, law), dash in zip(laws.items(), ("-", "--")):
            a, _ = law.exponents
            C = 6 * (size / law.optimum(6)[0]) ** (1 / a)  # the budget whose best size is `size`
            N = size * np.geomspace(0.1, 3, 400)
            D = law.tokens(float(law(*law.optimum(C))), N)
            total = 6 * N * D + 2 * N * served
            best, low = int(total.argmin()), min(low, total.min())
            if dash == "-":
                ax.plot(N, 6 * N * D, color=plots.COLOURS[4], linestyle=":", label="training, 6ND, law as fitted again")
                ax.plot(N, 2 * N * served, color=plots.COLOURS[1], linestyle="-.", label="use, 2N a token")
            ax.plot(N, total, color=plots.COLOURS[2], linestyle=dash, label=f"both, {name}")
            ax.plot(N[best], total[best], "o", color=plots.COLOURS[3])
            ratio, without = D[best] / N[best], C + 2 * size * served
            saved = f"{1 - total[best] / without:.0%} cheaper than {plots.si(size)}"
            says.append(f"{name}: {plots.si(N[best])} at {ratio:.0f} tokens a parameter, {saved}")
        ax.set(xscale="log", yscale="log", ylim=(0.1 * low, 30 * low))
        ax.legend(frameon=False)
        return fig, f"10^{tokens_served_as_power_of_ten:g} tokens served. " + "; ".join(says) + "."

    return lab(
        draw, "Train for use", as_good_as=(1.0, 400.0, 1.0, 70.0), tokens_served_as_power_of_ten=(10, 15, 0.25, 13)
    )
