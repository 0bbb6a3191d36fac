"""Labs by name, one file a chapter; each is a function that shows a panel (course.lab) and returns it.

labs.parameters()                         chapter 0: where a model's parameters are
labs.attention_reach(tokens=None)         chapter 1: who sees whom in the three families
labs.positions()                          chapter 1: how an attention score or a table knows the distance
labs.norms_at_depth()                     chapter 1: the residual stream and its gradient, layer by layer
labs.activations()                        chapter 1: the functions and their slopes
labs.ffn_width()                          chapter 1: 4h, 8h/3 and 2.7h in parameters
"""

from importlib import import_module

_FRONT = {"parameters": "start"}
_FRONT |= dict.fromkeys(("attention_reach", "positions", "norms_at_depth", "activations", "ffn_width"), "blocks")

__all__ = list(_FRONT)


def __getattr__(name: str):
    if name in _FRONT:
        return getattr(import_module(f"llmstack.course.labs.{_FRONT[name]}"), name)
    raise AttributeError(f"no lab {name!r}; there are {', '.join(_FRONT)}")
