"""Training in 16 and 8 bits, emulated on fp32 storage: what is rounded, what stays wide, and why it still learns.

    fp32    nothing is rounded
    bf16    operands, results and their gradients of matrix products are; fp32's range, 8 bits of significand
    fp16    the same; 11 bits, but nothing above 65,504 nor below 2^-24, so that the loss is scaled
    fp8     operands of linears in E4M3, gradients that come to them in E5M2, each tensor with a scale of its own; the
            rest in bf16. This is Transformer Engine (the recipes are docs.nvidia.com's, "delayed scaling")

Weights are kept in fp32, the masters, and rounded anew in each pass: a step smaller than half of a weight's last place
would be lost on a rounded one (Micikevicius et al. 2017, arXiv:1710.03740, sections 3.1 and 3.2). A value is rounded by
a cast there and back, and the product of two rounded values summed in fp32, as tensor cores do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FORMATS = dict(fp16=torch.float16, bf16=torch.bfloat16, e4m3=torch.float8_e4m3fn, e5m2=torch.float8_e5m2)
KINDS = ("fp32", "bf16", "fp16", "fp8")
PRODUCTS = {F.linear, F.conv1d, F.scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__}
OPERANDS = {"x": "e4m3", "w": "e4m3", "dy": "e5m2"}  # of an FP8 linear: Transformer Engine's HYBRID


def rounded(x: Tensor, format: str) -> Tensor:
    """The nearest value of a format to each of x, ties to even; beyond its largest finite value, what torch makes."""
    return x.to(FORMATS[format]).to(x.dtype)


def fp8_scale(history: Sequence[float], format: str, margin: int = 0) -> float:
    """What brings the largest |x| of a tensor's last passes to 2^-margin of the format's; 1 before the first."""
    amax = max(history, default=0.0)
    return torch.finfo(FORMATS[format]).max / amax / 2**margin if 0 < amax < float("inf") else 1.0


def delayed_scaling(x: Tensor, format: str, history: list[float], length: int = 16, margin: int = 0) -> Tensor:
    """round(clamp(s x)) / s, where s is known before x is; then max |x| joins the last `length` in `history`."""
    s, most = fp8_scale(history, format, margin), torch.finfo(FORMATS[format]).max
    history[:] = [*history, float(x.abs().max())][-length:]
    return rounded((x * s).clamp(-most, most), format) / s


class _Round(torch.autograd.Function):
    """Round a value on its way forward and its gradient on its way back."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy), None, None


class Precision:
    """The numerics of a training step. `scale`: the loss's; dynamic (fp16's default) halves it when a gradient is not
    finite, and doubles it after `every` steps without. Raises ValueError on another kind.

        with precision.forward(model): loss = …
        (loss * precision.scale).backward()
        if precision.unscale_(grads): optimizer.step()          otherwise the step is skipped
    """

    def __init__(self, kind: str = "fp16", scale: float | None = None, dynamic: bool | None = None, every: int = 2000):
        if kind not in KINDS:
            raise ValueError(f"kind = {kind!r}, but it must be one of {', '.join(KINDS)}")
        self.kind, self.every, self.clean = kind, every, 0
        self.dynamic = kind == "fp16" and scale is None if dynamic is None else dynamic
        self.scale = float((2.0**16 if self.dynamic else 1.0) if scale is None else scale)
        if not 0 < self.scale < float("inf") or every < 1:
            raise ValueError(f"scale = {scale}, every = {every}: a finite scale above 0, and every 1 or more")
        self.amax: dict[str, list[float]] = defaultdict(list)  # "0 x": of the first linear's input, FP8

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Rounds the matrix products of what runs inside. Raises TypeError on weights that are not fp32 masters."""
        for name, p in model.named_parameters():
            if p.requires_grad and p.dtype != torch.float32:
                raise TypeError(f"{name} is {p.dtype}, but masters are float32; model.float() makes them")
        with nullcontext() if self.kind == "fp32" else _Products(self):
            yield

    def unscale_(self, grads: Mapping[str, Tensor] | Iterable[Tensor]) -> bool:
        """Divide the gradients by the scale in place; whether all are finite. Moves a dynamic scale."""
        grads = list(grads.values() if isinstance(grads, Mapping) else grads)
        for g in grads:
            g *= 1 / self.scale
        finite = all(bool(g.isfinite().all()) for g in grads)
        if self.dynamic:
            self.clean = self.clean + 1 if finite else 0
            self.scale *= 0.5 if not finite else 2.0 if self.clean == self.every else 1.0
            self.clean %= self.every
        return finite

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, ready for JSON."""
        return {"scale": self.scale, "clean": self.clean, "amax": {key: list(a) for key, a in self.amax.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        self.scale, self.clean = state["scale"], state["clean"]
        self.amax.update({key: list(a) for key, a in state["amax"].items()})


class _Products(TorchFunctionMode):
    """Every matrix product that runs meanwhile takes rounded operands and gives a rounded result."""

    def __init__(self, precision: Precision):
        super().__init__()
        self.precision, self.linears = precision, 0

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        kind, kwargs = self.precision.kind, kwargs or {}
        if fn not in PRODUCTS:
            return fn(*args, **kwargs)
        plain = partial(rounded, format="bf16" if kind == "fp8" else kind)
        both = lambda x: _Round.apply(x, plain, plain) if isinstance(x, Tensor) and x.is_floating_point() else x
        if fn is not F.linear or kind != "fp8":
            return both(fn(*map(both, args), **{name: both(x) for name, x in kwargs.items()}))
        past = lambda name: self.precision.amax[f"{self.linears} {name}"]
        eight = {n: partial(delayed_scaling, format=f, history=past(n)) for n, f in OPERANDS.items()}
        self.linears += 1
        x, w, *bias = args
        y = fn(_Round.apply(x, eight["x"], plain), _Round.apply(w, eight["w"], plain), *map(both, bias), **kwargs)
        return _Round.apply(y, plain, eight["dy"])
