"""How loss falls with parameters N, tokens D and operations C = 6 N D, fitted from points.

    power_law(x, y)               y = k x^p, a straight line in logarithms                      Kaplan et al. 2020
    isoflop(N, C, loss)           at each budget the N of a parabola's bottom, then N* ∝ C^a    Hoffmann's approach 2
    envelope(N, C, loss)          at each budget the N of the lowest curve, then N* ∝ C^a       Hoffmann's approach 1
    parametric(N, D, loss)        L = E + A/N^α + B/D^β                                         Hoffmann's approach 3
    resampled(fit, N, C, loss)    the same fit on 100 choices of four points in five: its error bar
    routed(N, E, loss)            log L = a log N + b log Ê + c log N log Ê + d, base 10        Clark et al. 2022

From the third law follows what a budget is best spent on: minimising E + A/N^α + B/D^β under 6 N D = C gives

    N* = G (C/6)^a      D* = (C/6)^b / G      a = β/(α+β),  b = α/(α+β),  G = (α A / β B)^(1/(α+β))

Kaplan et al., arXiv:2001.08361; Hoffmann et al. ("Chinchilla"), arXiv:2203.15556, sections 3.1 to 3.3; Clark et al.,
arXiv:2202.01169, sections 4 and 5. Losses are nats a token (or a byte).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import curve_fit, minimize
from scipy.special import logsumexp

Points = Sequence[float] | np.ndarray
Optima = list[tuple[float, float, float]]  # (budget, parameters, loss)


@dataclass(frozen=True)
class Power:
    """y = factor · x^exponent, with the exponent's standard error and R² of the line through the logarithms."""

    factor: float
    exponent: float
    error: float
    r2: float

    def __call__(self, x):
        return self.factor * np.asarray(x, float) ** self.exponent


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A/N^alpha + B/D^beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __call__(self, N, D):
        return self.E + self.A / np.asarray(N, float) ** self.alpha + self.B / np.asarray(D, float) ** self.beta

    @property
    def exponents(self) -> tuple[float, float]:
        """a and b of N* ∝ C^a and D* ∝ C^b."""
        both = self.alpha + self.beta
        return self.beta / both, self.alpha / both

    def optimum(self, C: float) -> tuple[float, float]:
        """N* and D*, the parameters and tokens that a budget of C operations is best spent on."""
        a, b = self.exponents
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return G * (C / 6) ** a, (C / 6) ** b / G

    def tokens(self, loss: float, N):
        """The D that brings N parameters down to `loss`; infinite where N is too small for it whatever it reads."""
        left = loss - self.E - self.A / np.asarray(N, float) ** self.alpha
        return np.where(left > 0, (self.B / np.where(left > 0, left, 1.0)) ** (1 / self.beta), np.inf)


def power_law(x: Points, y: Points) -> Power:
    """The line through (log x, log y). Raises ValueError on fewer than three points or values that are not positive."""
    x, y = _positive(x=x, y=y)
    X = np.stack([np.ones_like(x), np.log(x)], 1)
    (k, p), *_ = np.linalg.lstsq(X, np.log(y), rcond=None)
    rest = np.log(y) - X @ (k, p)
    spread = ((np.log(x) - np.log(x).mean()) ** 2).sum()
    total = ((np.log(y) - np.log(y).mean()) ** 2).sum()
    error = (rest @ rest / (len(x) - 2) / spread) ** 0.5
    return Power(float(np.exp(k)), float(p), float(error), float(1 - rest @ rest / total) if total else 1.0)


def isoflop(N: Points, C: Points, loss: Points) -> tuple[Optima, Power]:
    """Approach 2. The bottoms (budget, N*, loss) and N* over C. Runs of one budget have the same C; each budget takes
    three sizes at least, and one whose parabola has no bottom between its sizes is left out.

    Raises ValueError when fewer than three budgets have a bottom.
    """
    N, C, loss = _positive(N=N, C=C, loss=loss)
    bottoms = []
    for budget in np.unique(C):
        here = C == budget
        if len(np.unique(N[here])) < 3:
            continue
        curve, slope, level = np.polyfit(np.log(N[here]), loss[here], 2)
        at = -slope / (2 * curve) if curve > 0 else np.inf
        if np.log(N[here]).min() < at < np.log(N[here]).max():
            bottoms.append((float(budget), float(np.exp(at)), float(level - slope**2 / (4 * curve))))
    if len(bottoms) < 3:
        raise ValueError(f"{len(bottoms)} budgets have a lowest loss between their sizes; a line needs 3: add sizes")
    return bottoms, power_law(*zip(*[(budget, best) for budget, best, _ in bottoms]))


def envelope(N: Points, C: Points, loss: Points, run: Sequence | None = None) -> tuple[Optima, Power]:
    """Approach 1. N, C and loss are of points along training curves; `run` says to which curve a point belongs (by
    default each size is one curve). At each of 24 budgets the lowest curve, interpolated in log C, says which size was
    best. As with `isoflop` a budget counts only if a smaller and a larger size were worse: a best that is the smallest
    there is says that the optimum lies beyond. Returns (budget, N, loss) and the line N over C.

    Raises ValueError when fewer than three budgets are left.
    """
    N, C, loss = _positive(N=N, C=C, loss=loss)
    run = N if run is None else np.asarray(run)
    each = [np.flatnonzero(run == r) for r in np.unique(run)]
    curves = [(N[i[0]], *(v[i[np.argsort(C[i])]] for v in (C, loss))) for i in each]
    found = []
    for budget in np.geomspace(C.min(), C.max(), 26)[1:-1]:
        at = lambda c, y: float(np.interp(np.log(budget), np.log(c), y))
        here = [(at(c, y), float(n)) for n, c, y in curves if c[0] <= budget <= c[-1]]
        best, n = min(here, default=(0.0, 0.0))
        if min((m for _, m in here), default=n) < n < max(m for _, m in here):
            found.append((float(budget), n, best))
    if len(found) < 3:
        raise ValueError(f"{len(found)} budgets have a best size between smaller and larger ones; a line needs 3")
    return found, power_law([b for b, *_ in found], [n for _, n, _ in found])


def parametric(N: Points, D: Points, loss: Points, delta: float = 1e-3, near: Law | None = None) -> Law:
    """Approach 3: least Huber loss of the logarithms, by L-BFGS from a grid of starts, as the paper does (its grid is
    finer), or from the one start `near`, to fit again what was changed a little.

    Raises ValueError on fewer than five points, as many as there are unknowns.
    """
    N, D, loss = _positive(N=N, D=D, loss=loss, least=5)
    logs = np.log(N), np.log(D), np.log(loss)

    def huber(v):
        a, b, e, alpha, beta = v
        terms = np.stack([a - alpha * logs[0], b - beta * logs[1], np.full_like(logs[0], e)])
        share = np.exp(terms - (log := logsumexp(terms, 0)))
        miss = log - logs[2]
        pull = np.clip(miss, -delta, delta)
        slopes = [share[0], share[1], share[2], -share[0] * logs[0], -share[1] * logs[1]]
        return float((pull * (miss - pull / 2)).sum()), np.array([(pull * s).sum() for s in slopes])

    grid = product((0, 5, 10), (0, 5, 10), (-1, 1), (0.3, 0.8), (0.3, 0.8))
    grid = [(*np.log([near.A, near.B, near.E]), near.alpha, near.beta)] if near else grid
    how = dict(jac=True, method="L-BFGS-B", options=dict(maxiter=500, ftol=1e-13, gtol=1e-9))
    a, b, e, alpha, beta = min((minimize(huber, start, **how) for start in grid), key=lambda fit: fit.fun).x
    return Law(float(np.exp(e)), float(np.exp(a)), float(np.exp(b)), float(alpha), float(beta))


def resampled(fit: Callable, *columns: Points, share: float = 0.8, times: int = 100, seed: int = 0) -> list:
    """What `fit(*columns)` gives on `times` random choices of a share of the points: how far a result hangs on a few of
    them (Hoffmann et al., Table 2, take the 10th and the 90th percentile). Choices that `fit` refuses are left out."""
    columns, rng, found = [np.asarray(c) for c in columns], np.random.default_rng(seed), []
    for _ in range(times):
        chosen = rng.choice(len(columns[0]), round(share * len(columns[0])), replace=False)
        with suppress(ValueError):
            found.append(fit(*(c[chosen] for c in columns)))
    return found


def kaplan(N: float = np.inf, D: float = np.inf) -> float:
    """Kaplan et al. 2020, equation 1.5: nats a token of WebText2 with N parameters (no embedding) and D tokens."""
    return ((8.8e13 / N) ** (0.076 / 0.095) + 5.4e13 / D) ** 0.095


@dataclass(frozen=True)
class Routed:
    """Clark et al.: log L = a log N + b log Ê + c log N log Ê + d, of base 10; Ê lies between `start` and `most`."""

    a: float
    b: float
    c: float
    d: float
    start: float
    most: float

    def effective(self, E):
        """Ê of E experts: `start` at E = 1, near E in between, never over `most` (equation 8)."""
        return 1 / (1 / (np.asarray(E, float) - 1 + 1 / (1 / self.start - 1 / self.most)) + 1 / self.most)

    def __call__(self, N, E):
        n, e = np.log10(np.asarray(N, float)), np.log10(self.effective(E))
        return 10 ** (self.a * n + self.b * e + self.c * n * e + self.d)

    def parameters(self, N, E):
        """Effective parameter count: the size of a dense model of the same loss (equation 11). E = 1 gives N."""
        slope = lambda log: self.a + self.c * log
        one, e = np.log10(self.start), np.log10(self.effective(E))
        return np.asarray(N, float) ** (slope(e) / slope(one)) * 10 ** (self.b * (e - one) / slope(one))


def routed(N: Points, E: Points, loss: Points, start: float | None = None, most: float | None = None) -> Routed:
    """The bilinear law of models of N parameters (without the experts' copies) and E experts. `start` and `most` are
    fitted too unless given. Raises ValueError on fewer than six points."""
    N, E, loss = _positive(N=N, E=E, loss=loss, least=6)

    def law(a, b, c, d, *free):
        free = list(free)
        s = 1 + np.exp(free.pop(0)) if start is None else start
        m = s + E.max() * np.exp(free.pop(0)) if most is None else most
        return Routed(*map(float, (a, b, c, d, s, m)))

    guess = [-0.08, -0.1, 0.005, 1.0] + [0.0] * (start, most).count(None)
    found, _ = curve_fit(lambda _, *v: np.log10(law(*v)(N, E)), N, np.log10(loss), guess, maxfev=5000)
    return law(*found)


def _positive(least: int = 3, **columns: Points) -> list[np.ndarray]:
    """Columns as arrays of one length, at least `least` long, all finite and above 0."""
    arrays = {name: np.asarray(column, float).ravel() for name, column in columns.items()}
    lengths = {name: len(a) for name, a in arrays.items()}
    if len(set(lengths.values())) > 1 or min(lengths.values()) < least:
        raise ValueError(f"columns of one length, {least} points or more, are needed; given {lengths}")
    for name, a in arrays.items():
        if not (np.isfinite(a).all() and (a > 0).all()):
            raise ValueError(f"{name} has values that are not positive and finite; logarithms need them")
        if name not in ("y", "loss") and (a == a[0]).all():
            raise ValueError(f"{name} is {a[0]:g} at every point, so nothing can be fitted to it: vary it")
    return list(arrays.values())
