"""LQ-LoRA: a matrix is a quantised one and a low-rank one, W ≈ Q + B A (Guo et al. 2023, arXiv:2311.12023).

    B A ← the best of rank r for W − Q          Q ← quantise(W − B A)          until the error grows

LoRA's A and B begin where they repair what quantisation broke, in place of at zero. With `fisher` F (mean squared
gradients) the error is ‖√F ⊙ (W − Q − B A)‖; the low-rank step takes rows and columns of F by their means, for which
the singular value decomposition is exact (section 3.3).

Matrices need not be equal. An integer programme (section 3.2) chooses bits and block of each, so that the sum of errors
is least and the average of stored bits is within the budget:

    min Σ e[m, c] x[m, c]      Σ bits[m, c] x[m, c] ≤ budget · weights      Σ over c of x[m, c] = 1      x ∈ {0, 1}

The e[m, c] are squared errors after the first round of the alternation. Bits are those of Q; A and B come on top.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

from llmstack.execution.finetune.base import Tuned, linears
from llmstack.execution.finetune.lora import LoRA, attach
from llmstack.ops.packed import NFLinear

CHOICES = tuple(product((2, 3, 4, 8), (16, 32, 64)))  # bits, block


def low_rank(w: Tensor, r: int, fisher: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """B [out, r] and A [r, in], whose product is nearest to w [out, in], in the metric of a fisher [out, in]."""
    rows, columns = ((torch.ones_like(w) if fisher is None else fisher + 1e-12).mean(i).sqrt() for i in (1, 0))
    u, s, v = torch.linalg.svd((rows[:, None] * w * columns).float(), full_matrices=False)
    root = s[:r].sqrt()
    return u[:, :r] * root / rows[:, None], root[:, None] * v[:r] / columns


@torch.no_grad()
def decompose(
    w: Tensor, r: int, quantise: Callable[[Tensor], Tensor], rounds: int = 10, fisher: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """(W − B A that is to be quantised, B [out, r], A [r, in], the error of each round that was an improvement).

    `quantise` gives the values that a matrix has once it is stored.
    """
    q, errors, best = 0.0, [], ()
    for _ in range(rounds):
        b, a = low_rank(w - q, r, fisher)
        rest = w - b @ a
        q = quantise(rest)
        error = _error(rest - q, fisher)
        if errors and error >= errors[-1]:
            break
        errors, best = [*errors, error], (rest, b, a)
    return *best, errors


def _error(e: Tensor, fisher: Tensor | None) -> float:
    return float((e if fisher is None else fisher.sqrt() * e).norm())


def stored_bits(weights: int, bits: int, block: int) -> int:
    """Bits of a matrix as NFLinear stores it: codes, FP8 constants of blocks, fp32 ones of 256 of those, a mean."""
    blocks = -(-weights // block)
    return bits * 8 * -(-weights // 8) + 8 * blocks + 32 * (-(-blocks // 256) + 1)


def allocate(errors: np.ndarray, bits: np.ndarray, budget: float) -> np.ndarray:
    """Each matrix's choice [M]: least Σ errors [M, C] with Σ bits [M, C] ≤ budget. Raises ValueError if none is."""
    M, C = errors.shape
    rules = [LinearConstraint(np.kron(np.eye(M), np.ones(C)), 1, 1), LinearConstraint(bits.reshape(1, -1), ub=budget)]
    found = milp(errors.ravel() / (errors.max() or 1), integrality=1, bounds=Bounds(0, 1), constraints=rules)
    if found.x is None:
        raise ValueError(f"a budget of {budget:.0f} bits is below the least that is possible, {bits.min(1).sum()}")
    return found.x.reshape(M, C).argmax(1)


def lq_lora(model: nn.Module, r=8, budget=2.75, targets="all", rounds=10, fisher=None, choices=CHOICES) -> Tuned:
    """LQ-LoRA within `budget` bits a weight. `fisher` has F by the linears' names, `choices` what a matrix may have:
    (bits, block) pairs, only one for a uniform base. `merge()` as in QLoRA."""
    if rounds < 1 or not choices:
        raise ValueError(f"rounds = {rounds}, choices = {choices}: one round and one choice at least")
    found = {module: (fisher or {}).get(name) for name, _, _, module in linears(model, targets)}
    sizes = [m.weight.numel() for m in found]
    stored = lambda m, choice: lambda w: NFLinear(m, *choice, weight=w).dequantise()

    @torch.no_grad()
    def price(m: nn.Linear) -> list[float]:
        b, a = low_rank(m.weight, r, found[m])
        rest = m.weight - b @ a
        return [_error(rest - stored(m, c)(rest), found[m]) ** 2 for c in choices]

    errors = np.array([price(m) for m in found])
    bits = np.array([[stored_bits(n, *c) for c in choices] for n in sizes])
    chosen = dict(zip(found, (choices[c] for c in allocate(errors, bits, budget * sum(sizes)))))
    parts = {m: decompose(m.weight, r, stored(m, c), rounds, found[m]) for m, c in chosen.items()}
    tuned = attach(model, r, r, targets, 0, lambda m: NFLinear(m, *chosen[m], weight=parts[m][0]))
    for module, (_, b, a, _) in zip((m for m in model.modules() if isinstance(m, LoRA)), parts.values()):
        module.a.data.copy_(a)
        module.b.data.copy_(b)
    return tuned
