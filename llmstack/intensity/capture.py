"""A program as a graph of calls (torch.fx), each under one name however it is written.

    graph = capture(module or function, *examples)      one node a call, with the shape and dtype that it gave

Operations that the house has a name for (a norm, attention, rotation) stay one call; modules are opened up.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.passes.shape_prop import ShapeProp

from llmstack.ops.attention import attention_torch
from llmstack.ops.cross_entropy import cross_entropy_torch
from llmstack.ops.deepnorm import deepnorm_torch
from llmstack.ops.layernorm import layernorm_torch
from llmstack.ops.rmsnorm import rmsnorm_torch
from llmstack.ops.rope import rope_torch

WHOLE = (rmsnorm_torch, layernorm_torch, deepnorm_torch, attention_torch, rope_torch, cross_entropy_torch)
NAMES = {  # one name for the ways to write a call: operators, functions; methods have the name itself
    fn: name
    for name, fns in dict(
        add=(operator.add, torch.add), sub=(operator.sub, torch.sub), mul=(operator.mul, torch.mul),
        div=(operator.truediv, torch.div), neg=(operator.neg, torch.neg), relu=(F.relu, torch.relu),
        matmul=(operator.matmul, torch.matmul, torch.bmm), softmax=(F.softmax, torch.softmax),
    ).items()
    for fn in fns
}  # fmt: skip
NAMES |= {getattr(torch, n): n for n in ("exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "abs", "transpose")}
NAMES |= {getattr(F, n): n for n in ("linear", "gelu", "silu")}
SILENT = {"inplace": False, "approximate": "none", "alpha": 1, "_stacklevel": 3, "dtype": None, "rounding_mode": None}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """What a node calls, however it is written: a name or a function, and its arguments in order."""

    name: Any
    args: tuple
    options: tuple


def call(node: fx.Node) -> Call:
    options = {k: v for k, v in node.kwargs.items() if k not in SILENT or SILENT[k] != v}
    if node.target in WHOLE:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        return Call(node.target, tuple(bound.arguments.values()), ())
    name = NAMES.get(node.target, node.target) if node.op == "call_function" else node.target
    args = (*node.args, *([options.pop("dim")] if name == "softmax" and "dim" in options else []))
    if name in ("softmax", "transpose") and all(isinstance(axis, int) for axis in args[1:]):
        args = (args[0], *sorted(axis % 4 for axis in args[1:]))  # -1 is 3: patterns with axes want four
    if name == "linear" and args[-1] is None:
        args = args[:-1]
    return Call(name, args, tuple(sorted(options.items())))


class Value(fx.Proxy):
    """What flows through a trace. `x += y` changes a tensor for all who hold it, which the graph would not show."""

    def _refuse(self, other):
        raise ValueError(f"{self.node} is changed in place, which fusing could move: write x = x + y, not x += y")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __iand__ = __ior__ = __imatmul__ = _refuse


class Tracer(fx.Tracer):
    """Into every module, and not into the operations that the house has a name for."""

    def __init__(self):
        super().__init__(autowrap_functions=WHOLE)

    def is_leaf_module(self, module, qualified_name) -> bool:
        return False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def iter(self, value: fx.Proxy):
        """The parts of a split, whose sizes say how many there are."""
        sizes = value.node.args[1:2] if value.node.target == "split" else ()
        return iter([value[i] for i in range(len(sizes[0]))]) if sizes else super().iter(value)


def capture(fn: torch.nn.Module | Callable, *examples: Any) -> fx.GraphModule:
    """The calls that fn makes; each node's `meta` says what it gave for the examples. Raises ValueError when the graph
    changes a tensor in place."""
    tracer = Tracer()
    graph = tracer.trace(fn)
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        inplace = node.op in ("call_function", "call_method") and name.endswith("_") and not name.endswith("__")
        if inplace or node.kwargs.get("inplace") or "out" in node.kwargs:
            raise ValueError(
                f"{node.format_node()} changes a tensor in place, which fusing could move: return a new one"
            )
    module = fx.GraphModule(tracer.root, graph)
    with torch.no_grad():
        ShapeProp(module).propagate(*examples)
    return module


def shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value.meta.get("tensor_meta"), "shape", ())) if isinstance(value, fx.Node) else ()


def dtype(value: Any) -> torch.dtype | None:
    return getattr(value.meta.get("tensor_meta"), "dtype", None) if isinstance(value, fx.Node) else None
