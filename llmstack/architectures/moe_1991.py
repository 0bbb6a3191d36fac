"""The mixture of experts of 1991: linear experts, a gate that is linear too, and a tree of gates fitted by EM.

    p(y | x) = Σ_i g_i(x) Σ_j g_{j|i}(x) N(y | w_ij · x, σ²_ij)

Jacobs, Jordan, Nowlan, Hinton 1991, "Adaptive mixtures of local experts" (Neural Computation 3): one level. Jordan and
Jacobs 1994, "Hierarchical mixtures of experts and the EM algorithm" (Neural Computation 6): the tree and its EM. Which
expert made a point is what EM does not see: the E step gives each expert its share h of a point, the M step fits it to
its share. Every step raises the likelihood, or leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEAST = 1e-4  # a variance; at 0 one point would have all the likelihood


@dataclass
class Tree:
    """I branches of J experts on inputs [N, d], whose last column is 1. I = 1 is the flat mixture."""

    top: Array  # [I, d]
    inner: Array  # [I, J, d]
    weights: Array  # [I, J, d]
    variance: Array  # [I, J]

    def gates(self, x: Array) -> tuple[Array, Array]:
        """g_i [N, I] and g_{j|i} [N, I, J]."""
        return _softmax(x @ self.top.T), _softmax(np.einsum("nd,ijd->nij", x, self.inner))

    def predict(self, x: Array) -> Array:
        """E[y | x], [N]."""
        top, inner = self.gates(x)
        return np.einsum("ni,nij,ijd,nd->n", top, inner, self.weights, x)

    def expect(self, x: Array, y: Array) -> tuple[Array, float]:
        """The experts' shares h_ij of every point [N, I, J], and the log-likelihood of all points."""
        top, inner = self.gates(x)
        miss = y[:, None, None] - np.einsum("ijd,nd->nij", self.weights, x)
        log_p = (
            np.log(top)[..., None] + np.log(inner) - 0.5 * (miss**2 / self.variance + np.log(2 * np.pi * self.variance))
        )
        total = np.logaddexp.reduce(log_p.reshape(len(x), -1), axis=1)  # [N]
        return np.exp(log_p - total[:, None, None]), float(total.sum())

    def maximise(self, x: Array, y: Array, h: Array, steps: int = 4, least: float = LEAST) -> None:
        """Experts: weighted least squares, variances not under `least`. Gates: steps of Newton's method with twice the
        largest curvature that a softmax has, which cannot overshoot (Böhning 1992)."""
        for i, j in np.ndindex(self.variance.shape):
            share = h[:, i, j]
            self.weights[i, j] = _solve(x, share, x.T @ (share * y))
            miss = y - x @ self.weights[i, j]
            self.variance[i, j] = max(share @ miss**2 / max(share.sum(), 1e-300), least)
        for _ in range(steps):
            top, inner = self.gates(x)
            branch = h.sum(2)  # [N, I]
            self.top += 2 * _solve(x, np.ones(len(x)), x.T @ (branch - top)).T
            for i in range(len(self.top)):
                self.inner[i] += 2 * _solve(x, branch[:, i], x.T @ (h[:, i] - branch[:, i, None] * inner[:, i])).T


def fit(x: Array, y: Array, branches: int, experts: int, steps: int = 40, seed: int = 0) -> tuple[Tree, list[float]]:
    """A tree fitted to x [N, d], y [N] by EM from random weights, and the log-likelihood before each step."""
    if x.ndim != 2 or not len(x) or y.shape != x.shape[:1] or not np.isfinite(np.c_[x, y]).all():
        raise ValueError(f"x {x.shape} is [N, d] and y {y.shape} [N], with N of 1 or more, and without NaN or infinity")
    rng, d = np.random.default_rng(seed), x.shape[1]
    draw = lambda *shape: rng.normal(size=(*shape, d))
    spread = np.full((branches, experts), max(y.var(), LEAST))
    tree = Tree(draw(branches), draw(branches, experts), draw(branches, experts), spread)
    history = []
    for _ in range(steps):
        h, likelihood = tree.expect(x, y)
        history.append(likelihood)
        tree.maximise(x, y, h)
    return tree, history


def _softmax(z: Array) -> Array:
    e = np.exp(z - z.max(-1, keepdims=True))
    return np.maximum(e / e.sum(-1, keepdims=True), 1e-300)


def _solve(x: Array, share: Array, right: Array) -> Array:
    """(Xᵀ diag(share) X)⁻¹ right; an expert that has no points stays where it is."""
    return np.linalg.solve((x * share[:, None]).T @ x + 1e-9 * np.eye(x.shape[1]), right)
