"""Sparse tuning: W + δ where δ has k values that are not zero, and W never moves.

    pafi    the k weights of smallest |w|            known before any task: the same mask for all of them
    fish    the k of largest empirical Fisher        F̂ᵢ = 1/N Σₙ (∂ log p(xₙ) / ∂wᵢ)², on a few samples of the task
    diff    learnt: W + z ⊙ δ with z drawn from a gate for each weight, P(z ≠ 0) pushed down to k / n by a penalty;
            then `project` keeps the k largest |z δ| and training goes on with these alone

    hard-concrete gate   s = σ((log u − log(1 − u) + α) / β), u ~ U(0, 1);   z = clip(s (r − l) + l, 0, 1)
    P(z ≠ 0)             σ(α − β log(−l / r))

Stored for a task: k values and k places. Nothing is added to inference: δ merges into W. But backward still forms the
whole dW, of which the mask keeps k: what is saved is storage and optimizer state, not operations.

Diff pruning: Guo et al. 2020, arXiv:2012.07463 (0.5 % of the weights; here l = −1.5, r = 1.5, first α = 5 and β = 1 as
in the authors' code); gates: Louizos et al. 2017, arXiv:1712.01312, equations 10 to 12. PaFi: Liao et al. 2023,
arXiv:2305.16742. FISH mask: Sung et al. 2021, arXiv:2111.09839, equation 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from math import log

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from llmstack.execution.finetune.base import Tuned, freeze, linears
from llmstack.execution.objectives import next_token

LOW, HIGH, BETA = -1.5, 1.5, 1.0


class Values(nn.Module):
    """W with δ added at k fixed places: the values train, the places are known."""

    def __init__(self, at: Tensor, values: Tensor | None = None):
        super().__init__()
        self.register_buffer("at", at)  # [k], places in W laid out flat
        self.values = nn.Parameter(torch.zeros(len(at)) if values is None else values)  # [k]

    def forward(self, w: Tensor) -> Tensor:
        return w.flatten().index_add(0, self.at, self.values.to(w)).view_as(w)


class Gates(nn.Module):
    """W + z ⊙ δ. While training z is drawn; in eval mode it is the gate at u = 1/2. α moves `speed` times as fast."""

    def __init__(self, w: Tensor, alpha: float, speed: float):
        super().__init__()
        self.start, self.speed = alpha, speed
        self.delta, self.move = nn.Parameter(torch.zeros_like(w)), nn.Parameter(torch.zeros_like(w))

    def gates(self) -> Tensor:
        noise = torch.rand_like(self.delta).clamp(1e-6, 1 - 1e-6).logit() if self.training else 0.0
        return (torch.sigmoid((self.start + self.speed * self.move + noise) / BETA) * (HIGH - LOW) + LOW).clamp(0, 1)

    def open(self) -> Tensor:
        """P(z ≠ 0) of each weight."""
        return torch.sigmoid(self.start + self.speed * self.move - BETA * log(-LOW / HIGH))

    def forward(self, w: Tensor) -> Tensor:
        return w + self.gates() * self.delta


def attach(model: nn.Module, modules: Mapping[str, nn.Module]) -> Tuned:
    """The model with W + δ in the place of each named linear's W, and all else frozen."""
    freeze(model)
    for name, module in modules.items():
        parametrize.register_parametrization(model.get_submodule(name), "weight", module)
    places = lambda: {f"{name}.at": at for name, module in added(model).items() for at in module.buffers()}
    return Tuned(model, merge=lambda: detach(model), fixed=places)


def added(model: nn.Module) -> dict[str, nn.Module]:
    """What makes δ, by the linear's name."""
    return {n: m.parametrizations.weight[0] for n, m in model.named_modules() if parametrize.is_parametrized(m)}


def detach(model: nn.Module, keep: bool = True) -> nn.Module:
    """Plain weights again: W + δ as in eval mode, or W as it was without `keep`."""
    for name, module in added(model).items():
        module.eval()
        parametrize.remove_parametrizations(model.get_submodule(name), "weight", leave_parametrized=keep)
    return model


def weights(model: nn.Module, targets: str | Sequence[str]) -> dict[str, Tensor]:
    return {name: linear.weight for name, _, _, linear in linears(model, targets)}


def pick(scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Flat places of the round(share · n) largest of all n scores, weight by weight. Raises ValueError on none."""
    flat = torch.cat([s.detach().flatten() for s in scores.values()])
    if not 0 < share <= 1 or not (k := round(share * len(flat))):
        raise ValueError(f"share = {share!r} of {len(flat)} weights, but it must choose at least one, and at most all")
    chosen = torch.zeros_like(flat, dtype=torch.bool).index_fill(0, flat.topk(k).indices, True)
    return {n: p.nonzero()[:, 0] for n, p in zip(scores, chosen.split([s.numel() for s in scores.values()])) if p.any()}


def pafi(model: nn.Module, share: float = 0.005, targets: str | Sequence[str] = "all") -> Tuned:
    """Trains the `share` of the targets' weights that are nearest to zero."""
    at = pick({name: -w.abs() for name, w in weights(model, targets).items()}, share)
    return attach(model, {name: Values(places) for name, places in at.items()})


def fisher(model: nn.Module, data: Callable, samples: int = 64, targets="all", loss=next_token) -> dict[str, Tensor]:
    """Mean over `samples` rows of data(0), data(1), … of the squared gradient of the row's log-probability."""
    if samples < 1:
        raise ValueError(f"samples = {samples}, but a mean is over one row at least")
    chosen = weights(model, targets)
    mean = {name: torch.zeros_like(w.requires_grad_()) for name, w in chosen.items()}
    rows = ({k: v[i : i + 1] for k, v in b.items()} for b in map(data, count()) for i in range(len(b["ids"])))
    for row in islice(rows, samples):
        for total, g in zip(mean.values(), torch.autograd.grad(loss(model, row)[0], list(chosen.values()))):
            total += g * g / samples
    return mean


def fish(model: nn.Module, data: Callable, share=0.005, samples=64, targets="all", loss=next_token) -> Tuned:
    """Trains the `share` of weights with most Fisher information on the data; the mask is found once and then fixed."""
    at = pick(fisher(model, data, samples, targets, loss), share)
    return attach(model, {name: Values(places) for name, places in at.items()})


def diff(model: nn.Module, share=0.005, penalty=1.25e-7, alpha=5.0, speed=100.0, targets="all") -> Tuned:
    """Learns which weights to change: the penalty (for each open gate) acts until expected_share is down at `share`."""
    tuned = attach(model, {name: Gates(w, alpha, speed) for name, w in weights(model, targets).items()})

    def after_backward() -> None:
        if expected_share(tuned) > share:
            (penalty * sum(gates.open().sum() for gates in added(model).values())).backward()

    tuned.after_backward = after_backward
    return tuned


def expected_share(tuned: Tuned) -> float:
    """E‖z‖₀ / n of diff's gates."""
    return float(torch.cat([gates.open().detach().flatten() for gates in added(tuned.model).values()]).mean())


def project(tuned: Tuned, share: float = 0.005) -> None:
    """diff's last phase: the `share` of largest |z δ| stays and trains on, all other weights are as they were."""
    moved = {n: (gates.eval().gates() * gates.delta).detach() for n, gates in added(tuned.model).items()}
    at = pick({n: m.abs() for n, m in moved.items()}, share)
    detach(tuned.model, keep=False)
    values = {n: Values(places, moved[n].flatten()[places]) for n, places in at.items()}
    tuned.trainable, tuned.after_backward = attach(tuned.model, values).trainable, None
