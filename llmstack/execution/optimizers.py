"""Optimizers as settings of one another. One step for each weight w with its gradient g:

    g ← g + λ₂ w                        L2: decay goes through everything below
    g ← g · η‖w‖ / (‖g‖ + λ₂‖w‖)        LARS's trust ratio: g before L2 in the norm
    u = direction(g)                    what is remembered of earlier gradients
    u ← u + λ w                         decoupled decay: past the direction
    w ← w − lr · scale(w, u) · u        LAMB's trust ratio ‖w‖/‖u‖, in others 1

                direction                   decay      step of a layer        state, values a weight
    sgd         g                           λ₂         lr ‖g‖                 0
    momentum    m ← μ m + g                 λ₂         lr ‖m‖                 1
    lars        the same                    λ₂         lr η ‖w‖ at first      1
    adam        m̂ / (√v̂ + ε)                λ₂         lr √n                  2
    adamw       the same                    λ          lr √n                  2
    lamb        the same                    λ          lr ‖w‖                 2
    adafactor   RMS(w) · clip(g / √v̂)       λ          lr ‖w‖                 (n + m) / nm of a matrix [n, m]

with m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ), m and v running means of g and g². The last column but one is the size of a
step: only LARS, LAMB and Adafactor look at the weight. They are optimizers, one ratio a layer, beside which a learning
rate schedule (schedules.py) is one factor for all layers.

SGD with momentum as in torch.optim (Polyak 1964; lr outside the memory); LARS: You et al. 2017, arXiv:1708.03888,
algorithm 1; Adam: Kingma and Ba 2014, arXiv:1412.6980; AdamW: Loshchilov and Hutter 2017, arXiv:1711.05101; LAMB: You
et al. 2019, arXiv:1904.00962, algorithm 2; Adafactor: Shazeer and Stern 2018, arXiv:1804.04235, algorithm 5 without
first moment, with the decay of v 1 − t^−0.8 and relative steps min(lr, 1/√t) as torch.optim.Adafactor has them.

Weights are a dictionary of NumPy arrays or torch tensors: the arithmetic is the same. Without names, as in
`adamw(model.parameters())`, they are numbered. `ForTorch` wraps one for what takes PyTorch's own optimizers, such as
its learning rate schedulers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Array = Any  # np.ndarray or torch.Tensor
State = dict[str, Array]


class Optimizer:
    """The step above. `settings` go to the direction; `decays(name, w)` says which weights decay and are scaled."""

    def __init__(
        self, params: Mapping[str, Array] | Iterable[Array], lr: float, direction: Callable[..., Array], l2=0.0,
        decay=0.0, eta: float | None = None, scale: Callable[[Array, Array], float] | None = None,
        decays: Callable[[str, Array], bool] = lambda name, w: True, **settings: Any,
    ):  # fmt: skip
        params = _named(params)
        for name, value in dict(lr=lr, l2=l2, decay=decay).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} = {value!r}, but it must be a finite number, zero or more")
        self.params, self.lr, self.direction, self.settings = params, lr, direction, settings
        self.l2, self.decay, self.eta, self.scale, self.decays = l2, decay, eta, scale, decays
        self.t, self.state = 0, {name: {} for name in self.params}

    @torch.no_grad()
    def step(self, grads: Mapping[str, Array] | None = None, lr: float | None = None) -> None:
        """Change the weights in place. grads by name, or each torch parameter's own; a weight without one stays."""
        lr, self.t = self.lr if lr is None else lr, self.t + 1
        for name, w in self.params.items():
            g = w.grad if grads is None else grads.get(name)
            if g is None:
                continue
            matters = self.decays(name, w)
            l2, decay = (self.l2, self.decay) if matters else (0.0, 0.0)
            trust = 1.0
            if self.eta is not None and matters:
                trust = self.eta * _ratio(norm(w), norm(g) + l2 * norm(w))
            g = g + l2 * w if l2 else g
            u = self.direction(g * trust if trust != 1.0 else g, self.state[name], self.t, w=w, lr=lr, **self.settings)
            if self.scale is None or not matters:
                w *= 1 - lr * decay
                w -= lr * u
            else:
                u = u + decay * w if decay else u
                w -= lr * self.scale(w, u) * u

    def zero_grad(self) -> None:
        for w in self.params.values():
            w.grad = None

    def state_dict(self) -> dict[str, Any]:
        """{"t": steps, "weight/m": array, …}: flat, as a safetensors file wants it."""
        return {"t": self.t} | {f"{n}/{key}": a for n, state in self.state.items() for key, a in state.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take a copy of a state. Raises KeyError when it belongs to other weights."""
        split = {key: key.rpartition("/") for key in saved if key != "t"}
        if unknown := sorted({name for name, _, _ in split.values()} - set(self.params)):
            raise KeyError(f"the state has {', '.join(unknown)}, which this optimizer does not hold: another model's?")
        self.t, self.state = int(saved["t"]), {name: {} for name in self.params}
        for key, (name, _, part) in split.items():
            self.state[name][part] = copy.deepcopy(saved[key])


class ForTorch(torch.optim.Optimizer):
    """One of the optimizers above as PyTorch's schedulers know them: `param_groups`, whose "lr" a step takes."""

    def __init__(self, optimizer: Optimizer):
        super().__init__(list(optimizer.params.values()), {"lr": optimizer.lr})
        self.inner = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure else None
        self.inner.step(lr=self.param_groups[0]["lr"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(saved["inner"])
        self.param_groups[0]["lr"] = saved["lr"]


def _named(params: Mapping[str, Array] | Iterable[Array]) -> dict[str, Array]:
    """Weights by name, or by number. Raises ValueError where there is none, or something else stands among them."""
    if isinstance(params, Mapping):
        named = dict(params)
    else:
        listed = list(params)
        pairs = all(isinstance(p, tuple) and len(p) == 2 for p in listed)  # model.named_parameters()
        named = dict(listed) if pairs else {str(i): p for i, p in enumerate(listed)}
    if not named or not all(hasattr(p, "dtype") for p in named.values()):
        given = ", ".join(sorted({type(p).__name__ for p in named.values()})) or "nothing"
        raise ValueError(f"params are weights, best by name: dict(model.named_parameters()); got {given}")
    return named


def momentum_direction(g: Array, s: State, t: int, w: Array, lr: float, beta: float, nesterov: bool = False) -> Array:
    if not beta:
        return g
    s["m"] = s["m"] * beta + g if s else g + 0
    return g + beta * s["m"] if nesterov else s["m"]


def adam_direction(g: Array, s: State, t: int, w: Array, lr: float, betas: tuple[float, float], eps: float) -> Array:
    if not s:
        s |= {"m": g * 0, "v": g * 0}
    square = g * g
    square *= 1 - betas[1]
    for key, beta, value in (("m", betas[0], (1 - betas[0]) * g), ("v", betas[1], square)):
        s[key] *= beta
        s[key] += value
    u, root = s["m"] / (1 - betas[0] ** t), s["v"] / (1 - betas[1] ** t)
    root **= 0.5  # in place: fresh memory for each intermediate costs more than the arithmetic
    root += eps
    u /= root
    return u


def adafactor_direction(g: Array, s: State, t: int, w: Array, lr: float, power: float, clip: float, eps) -> Array:
    """v is kept as its rows' and columns' means: v ≈ r c / mean(r), exact when v is the product of two vectors."""
    square, new = g * g, t**-power
    means = {"v": square} if g.ndim < 2 else {"r": _mean(square, -1), "c": _mean(square, -2)}
    for key, mean in means.items():
        s[key] = s[key] * (1 - new) + new * mean if key in s else new * mean
    v = s["v"] if g.ndim < 2 else s["r"] @ s["c"] / _mean(s["r"], -2).clip(min=eps[0])
    u = g / v.clip(min=eps[0]) ** 0.5
    relative = max(eps[1], rms(w)) * (min(1.0, t**-0.5 / lr) if lr else 1.0)
    return relative / max(1.0, rms(u) / clip) * u


def sgd(params, lr=1e-3, momentum=0.0, weight_decay=0.0, nesterov=False, **how) -> Optimizer:
    return Optimizer(params, lr, momentum_direction, l2=weight_decay, beta=momentum, nesterov=nesterov, **how)


def lars(params, lr=1.0, momentum=0.9, weight_decay=0.0, eta=1e-3, **how) -> Optimizer:
    return sgd(params, lr, momentum, weight_decay, eta=eta, **how)


def adam(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **how) -> Optimizer:
    return Optimizer(params, lr, adam_direction, l2=weight_decay, betas=betas, eps=eps, **how)


def adamw(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, **how) -> Optimizer:
    return adam(params, lr, betas, eps, decay=weight_decay, **how)


def lamb(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, scale=None, **how) -> Optimizer:
    return adamw(params, lr, betas, eps, weight_decay, scale=scale or trust_ratio, **how)


def adafactor(params, lr=1e-2, beta2_decay=0.8, clip=1.0, eps=(1e-30, 1e-3), weight_decay=0.0, **how) -> Optimizer:
    return Optimizer(params, lr, adafactor_direction, decay=weight_decay, power=beta2_decay, clip=clip, eps=eps, **how)


OPTIMIZERS = {"sgd": sgd, "lars": lars, "adam": adam, "adamw": adamw, "lamb": lamb, "adafactor": adafactor}


def matrices(name: str, w: Array) -> bool:
    """For `decays`: weights with rows and columns; biases and norms neither decay nor have a trust ratio."""
    return w.ndim > 1


def trust_ratio(w: Array, u: Array) -> float:
    """LAMB's ‖w‖ / ‖u‖, 1 where either is zero."""
    return _ratio(norm(w), norm(u))


def norm(x: Array) -> float:
    return _squares(x) ** 0.5


def _squares(x: Array) -> float:
    """Σ x² in at least 32 bits: an fp16 of 300 squared is infinite."""
    if x.dtype.itemsize < 4:
        x = x.float() if isinstance(x, torch.Tensor) else x.astype("float32")
    return float((x * x).sum())


def rms(x: Array) -> float:
    return norm(x) / max(1, x.shape.numel() if isinstance(x, torch.Tensor) else x.size) ** 0.5


def global_norm(grads: Iterable[Array], reduce: Callable[[float], float] = lambda squares: squares) -> float:
    """The norm of all gradients as one vector. Where each rank holds a shard, `reduce` sums the squares over ranks."""
    return reduce(sum(_squares(g) for g in grads)) ** 0.5


@torch.no_grad()
def clip_(grads: Mapping[str, Array] | Iterable[Array], max_norm: float, reduce=lambda squares: squares) -> float:
    """Scale all gradients in place so that their global norm is at most max_norm, as torch's clip_grad_norm_ does.

    Of a model's parameters, as PyTorch's function takes them, it is their gradients that are scaled. Returns the norm
    before (Pascanu et al. 2012, arXiv:1211.5063). Raises ValueError when max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm = {max_norm!r}, but it must be a positive number; infinity leaves gradients as is")
    if isinstance(grads, torch.Tensor):
        grads = [grads]
    given = grads.values() if isinstance(grads, Mapping) else grads
    grads = [g.grad if _is_weight(g) else g for g in given]
    grads = [g for g in grads if g is not None]
    total = global_norm(grads, reduce)
    if not total <= max_norm:
        for g in grads:
            g *= max_norm / (total + 1e-6)
    return total


def _is_weight(x: Array) -> bool:
    return isinstance(x, torch.nn.Parameter) or (isinstance(x, torch.Tensor) and x.requires_grad)


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if top and bottom else 1.0


def _mean(x: Array, axis: int) -> Array:
    return x.mean(axis, keepdims=True)
