"""Fits recover laws that were planted, and the published constants give the published numbers."""

import json

import numpy as np
import pytest
from scipy import stats

from llmstack import facts
from llmstack.intensity.scaling import Law, Routed, envelope, isoflop, kaplan, parametric, power_law, routed

CHINCHILLA = Law(**facts.table("scaling")["chinchilla"]["loss"])
CLARK = Routed(**facts.table("scaling")["clark"]["law"])


def grid(*axes):
    return [a.ravel() for a in np.meshgrid(*axes)]


def test_power_law_is_least_squares_of_logarithms():
    rng = np.random.default_rng(0)
    x = np.geomspace(1, 1e6, 20)
    y = 3 * x**-0.076 * np.exp(0.01 * rng.standard_normal(20))
    ours, theirs = power_law(x, y), stats.linregress(np.log(x), np.log(y))
    assert ours.exponent == pytest.approx(theirs.slope)
    assert ours.error == pytest.approx(theirs.stderr)
    assert ours.r2 == pytest.approx(theirs.rvalue**2)
    assert ours(x) == pytest.approx(np.exp(theirs.intercept + theirs.slope * np.log(x)))


def test_chinchilla_exponents():
    """Approach 3's law has exponents 0.45 and 0.55 (printed 0.46, 0.54), and Gopher's budget is best spent on less than
    Gopher's 280e9 parameters."""
    a, b = CHINCHILLA.exponents
    assert (a, b) == pytest.approx((0.46, 0.54), abs=0.012)
    assert a + b == 1
    N, D = CHINCHILLA.optimum(5.76e23)
    assert 6 * N * D == pytest.approx(5.76e23)
    assert N < 70e9
    around = [CHINCHILLA(n, 5.76e23 / 6 / n) for n in N * np.array([0.8, 1, 1.25])]
    assert min(around) == around[1]


@pytest.mark.parametrize("approach", ["approach_1", "approach_2"])
def test_six_n_d_is_the_papers_budget(approach):
    """A053: the published optima satisfy C = 6 N D within their rounding, at about 20 tokens a parameter."""
    for N, C, D in facts.table("scaling")["chinchilla"][approach]:
        assert 6 * N * D == pytest.approx(C, rel=0.05)
        assert 18 < D / N < 26
    N, D = 70e9, 1.4e12
    assert 6 * N * D == pytest.approx(5.88e23)


def test_published_optima_scale_alike():
    """Fitted again from the published table, parameters and tokens grow with half of the budget's logarithm each."""
    for approach in ("approach_1", "approach_2"):
        N, C, D = zip(*facts.table("scaling")["chinchilla"][approach])
        assert power_law(C, N).exponent == pytest.approx(0.5, abs=0.012)
        assert power_law(C, D).exponent == pytest.approx(0.5, abs=0.012)


def test_parametric_recovers_a_planted_law():
    N, D = grid(np.geomspace(5e7, 1e10, 6), np.geomspace(1e9, 5e11, 6))
    found = parametric(N, D, CHINCHILLA(N, D))
    assert found.alpha == pytest.approx(CHINCHILLA.alpha, rel=0.02)
    assert found.beta == pytest.approx(CHINCHILLA.beta, rel=0.02)
    assert pytest.approx(CHINCHILLA.E, rel=0.02) == found.E
    noise = np.random.default_rng(0).standard_normal(N.size)
    again = parametric(N, D, CHINCHILLA(N, D) * np.exp(2e-3 * noise))
    assert again.exponents == pytest.approx(CHINCHILLA.exponents, abs=0.03)


def test_isoflop_finds_the_laws_optimum():
    C = np.repeat(np.geomspace(1e18, 1e21, 4), 7)
    best = np.array([CHINCHILLA.optimum(c)[0] for c in C])
    N = best * np.tile(np.geomspace(0.5, 2, 7), 4)
    bottoms, line = isoflop(N, C, CHINCHILLA(N, C / 6 / N))
    assert [n for _, n, _ in bottoms] == pytest.approx(np.unique(best), rel=0.03)
    assert line.exponent == pytest.approx(CHINCHILLA.exponents[0], abs=0.005)
    with pytest.raises(ValueError, match="bottom|lowest"):
        isoflop(10 * N, C, CHINCHILLA(10 * N, C / 60 / N))  # sizes all to one side


def test_envelope_follows_the_best_curve():
    sizes, shares = np.geomspace(1e7, 1e10, 40), np.geomspace(0.01, 100, 60)
    N, share = grid(sizes, shares)
    C = 6 * N * 20 * N * share
    found, line = envelope(N, C, CHINCHILLA(N, C / 6 / N))
    inside = [(c, n) for c, n, _ in found if 1e18 < c < 1e21]
    assert power_law(*zip(*inside)).exponent == pytest.approx(CHINCHILLA.exponents[0], abs=0.03)
    assert 0.3 < line.exponent < 0.6


def test_clark_recovers_planted_coefficients():
    """B113: the bilinear law, and EPC(E = 1) = N."""
    N, E = grid(np.geomspace(1.5e7, 1.3e9, 6), 2.0 ** np.arange(10))
    found = routed(N, E, CLARK(N, E), start=CLARK.start, most=CLARK.most)
    for name in "abcd":
        assert getattr(found, name) == pytest.approx(getattr(CLARK, name), rel=1e-4)
    free = routed(N, E, CLARK(N, E))
    assert free(N, E) == pytest.approx(CLARK(N, E), rel=1e-3)
    assert CLARK.parameters(N, 1) == pytest.approx(N)
    assert CLARK.effective(1) == pytest.approx(CLARK.start)
    dense = CLARK.parameters(1e8, 64)
    assert CLARK(dense, 1) == pytest.approx(CLARK(1e8, 64))
    assert dense > 1e8


def test_kaplan():
    """The joint law's limits are the two single ones."""
    assert kaplan(N=8.8e13) == pytest.approx(1)
    assert kaplan(N=1e9) == pytest.approx((8.8e13 / 1e9) ** 0.076)
    assert kaplan(D=1e10) == pytest.approx((5.4e13 / 1e10) ** 0.095)
    assert kaplan(1e9, 1e10) > max(kaplan(N=1e9), kaplan(D=1e10))


def test_stored_runs_follow_a_power_law():
    """B106: the lowest loss at each budget of the stored sweep (data/scaling) is a straight line in logarithms."""
    kept = json.loads((facts.data_path() / "scaling/runs.json").read_text())["runs"]
    N, C, loss = (np.array([r[key] for r in kept]) for key in ("parameters", "budget", "loss"))
    best = {c: loss[c == C].min() for c in np.unique(C)}
    line = power_law(list(best), list(best.values()))
    assert line.r2 > 0.95
    assert line.exponent < 0
    sizes = [N[C == c][loss[c == C].argmin()] for c in best]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("bad", [[1, 2, 0], [1, 2, np.nan], [1, 2]], ids=["zero", "nan", "short"])
def test_refused(bad):
    with pytest.raises(ValueError, match="positive|one length"):
        power_law([1, 2, 3], bad)
