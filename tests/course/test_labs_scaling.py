"""The labs of scaling laws say what a search for the lowest point says."""

import re

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from llmstack import facts
from llmstack.course import labs
from llmstack.course.labs.scaling import PIVOT, law_with
from llmstack.intensity.scaling import Law

FITTED_AGAIN, PRINTED = (Law(**facts.table("scaling")[key]["loss"]) for key in ("refitted", "chinchilla"))


def lowest(cost) -> float:
    """N where cost(N) is least, found without the law's formula."""
    return float(np.exp(minimize_scalar(lambda n: cost(np.exp(n)), bounds=(20, 30), method="bounded").x))


def test_turning_keeps_the_pivot():
    law = law_with(FITTED_AGAIN, 0.5, 0.25)
    assert law(*PIVOT) == pytest.approx(FITTED_AGAIN(*PIVOT))
    assert law.exponents == pytest.approx((1 / 3, 2 / 3))


@pytest.mark.parametrize("power", [21, 23.75])
def test_the_best_size_of_a_budget(power):
    panel = labs.isoflop_curve().set(budget_as_power_of_ten=power, alpha=0.3, beta=0.45)
    law, C = law_with(FITTED_AGAIN, 0.3, 0.45), 10**power
    best = lowest(lambda N: law(N, C / 6 / N))
    said = float(re.search(r"tokens are best, ([\d.e+]+) tokens", panel.caption)[1])
    assert said == pytest.approx(C / 6 / best**2, rel=0.01)
    assert "C^0.60" in panel.caption


def test_use_asks_for_a_smaller_model():
    panel = labs.overtraining()
    for served in (10, 13):
        panel.set(as_good_as=70.0, tokens_served_as_power_of_ten=served)
        found = [float(x) for x in re.findall(r": ([\d.]+) G at", panel.caption)]
        for law, size in zip((FITTED_AGAIN, PRINTED), found):
            a, _ = law.exponents
            loss = law(70e9, law.optimum(6 * (70e9 / law.optimum(6)[0]) ** (1 / a))[1])
            best = lowest(lambda N: min(6 * N * law.tokens(loss, N) + 2 * N * 10**served, 1e40))
            assert size == pytest.approx(best / 1e9, rel=0.02)
        assert (served == 10) == (found[0] > 65)


def test_training_and_use_are_drawn_and_add_up():
    figure, _ = labs.overtraining().draw(70.0, 13.0)
    curves = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    N = figure.axes[0].lines[0].get_xdata()
    use = curves["use, 2N a token"]
    np.testing.assert_allclose(use, 2 * N * 1e13)
    np.testing.assert_allclose(
        curves["training, 6ND, law as fitted again"] + use, curves["both, law as fitted again"], rtol=1e-12
    )
