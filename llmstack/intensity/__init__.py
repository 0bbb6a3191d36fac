"""How much a model computes, stores and moves, in closed form."""

from llmstack.intensity.params import Params, params

__all__ = ["Params", "params"]
