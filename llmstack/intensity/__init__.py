"""Chapter 3: how much a model computes, stores and moves, and what a machine makes of it.

params(config) -> .total .active .by_part          flops(config, batch, tokens, phase, convention) -> operations
traffic(…) -> .bytes .intensity                    terms(…) -> every operation of a pass with its price
utilisation(…) -> .mfu .hfu                        traced(config, …) -> the same counted from the running model
roofline(accelerator, points) -> .ridge .bound     this_machine(), timed(config, …) -> ceilings, times of this machine
"""

from importlib import import_module

from llmstack.intensity.counts import FUSED, KIM, USUAL, Convention, Term, by_part, flops, terms, total, traffic
from llmstack.intensity.params import Params, params
from llmstack.intensity.roof import Point, Roofline, roofline
from llmstack.intensity.utilisation import utilisation

_FRONT = {"Trace": "trace", "traced": "trace", "Timing": "timing", "timed": "timing", "predict": "timing"}
_FRONT |= {"measure": "machine", "this_machine": "machine"}

__all__ = ["FUSED", "KIM", "USUAL", "Convention", "Params", "Point", "Roofline", "Term", "by_part", "flops", "params"]
__all__ += ["roofline", "terms", "total", "traffic", "utilisation", *_FRONT]


def __getattr__(name: str):
    if name in _FRONT:
        return getattr(import_module(f"llmstack.intensity.{_FRONT[name]}"), name)
    raise AttributeError(f"module 'llmstack.intensity' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FRONT])
