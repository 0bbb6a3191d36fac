"""Learning-rate schedules: functions of the step that give a factor of the peak rate, the same for all weights.

    warm-up          (t + 1) / warmup while t < warmup                          Goyal et al. 2017, arXiv:1706.02677
    linear           1 → floor in a straight line
    cosine           floor + (1 − floor) (1 + cos π x) / 2, x from 0 to 1       Loshchilov and Hutter 2016, 1608.03983
    inverse_sqrt     √(warmup / (t + 1)), the 2017 Transformer's                Vaswani et al., 1706.03762, eq. 3
    wsd              1, and only at the end down to floor                       Hu et al. 2024, arXiv:2404.06395

`steps` counts all steps, the warm-up's among them; x = (t − warmup) / (steps − warmup), and stays 1 after the end.
Warm-up starts at 1 / warmup rather than 0, so the first step is not lost. A schedule is `lr_lambda` for torch's
LambdaLR as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sqrt

Schedule = Callable[[int], float]


def constant(steps: int = 0, warmup: int = 0) -> Schedule:
    return _after(warmup, steps, lambda x, t: 1.0)


def linear(steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    return _after(warmup, steps, lambda x, t: 1 - (1 - floor) * x)


def cosine(steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    return _after(warmup, steps, lambda x, t: floor + (1 - floor) * (1 + cos(pi * x)) / 2)


def inverse_sqrt(steps: int = 0, warmup: int = 1) -> Schedule:
    return _after(warmup, steps, lambda x, t: sqrt(max(warmup, 1) / (t + 1)))


def wsd(steps: int, warmup: int = 0, floor: float = 0.0, decay: int | None = None) -> Schedule:
    """Warm up, stay, decay in a line over the last `decay` steps (a tenth of all): the middle can be prolonged."""
    decay = max(1, steps // 10) if decay is None else decay
    if not 0 < decay <= steps - warmup:
        raise ValueError(f"decay = {decay}, but warmup = {warmup} leaves {steps - warmup} of {steps} steps")
    return _after(warmup, steps, lambda x, t: 1 - (1 - floor) * min(max(0.0, (t - steps + decay) / decay), 1.0))


SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine, "inverse_sqrt": inverse_sqrt, "wsd": wsd}


def _after(warmup: int, steps: int, shape: Callable[[float, int], float]) -> Schedule:
    if warmup < 0 or (steps and warmup >= steps):
        raise ValueError(f"warmup = {warmup}, but it must be zero or more and less than steps = {steps}")

    def factor(t: int) -> float:
        if t < warmup:
            return (t + 1) / warmup
        return shape(min(1.0, (t - warmup) / (steps - warmup)) if steps else 0.0, t)

    return factor
