"""Reverse-mode differentiation in NumPy (Linnainmaa 1970, Speelpenning 1980): values forward, gradients back, op by op.

A program is a sequence of ops. Each knows its value from its inputs, and the gradients of its inputs from dy, the
gradient of its value (`OPS`). The chain rule is then one loop over the sequence, backwards, that adds up what each
value gets from every reader of it (`reverse`). A gradient has the shape of its value; what forward broadcast, backward
sums.

    eager     ops run as Python meets them, and leave a record       z = (x @ w).gelu().sum(); z.backward(); w.grad
    graph     the record, kept as a program of its own               g = trace(fn, x, w); g(x, w); g.gradients(x, w)

A graph can be changed before it runs: `fuse` makes one op of elementwise ops that only read one another, whose values
between are then not kept for backward but computed again. The price of a graph: what Python decided while it was traced
(a branch, the length of a loop, a value not among the inputs) stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from llmstack.ops.activations import ACTIVATIONS_NP, ACTIVATIONS_NP_BACKWARD
from llmstack.ops.attention import attention_np, attention_np_backward
from llmstack.ops.cross_entropy import cross_entropy_np, cross_entropy_np_backward
from llmstack.ops.embedding import embedding_np, embedding_np_backward
from llmstack.ops.layernorm import layernorm_np, layernorm_np_backward
from llmstack.ops.linear import linear_np, linear_np_backward
from llmstack.ops.rmsnorm import rmsnorm_np, rmsnorm_np_backward
from llmstack.ops.softmax import softmax_np, softmax_np_backward


class Op(NamedTuple):
    forward: Callable[..., np.ndarray]  # (*inputs, **settings) -> y
    backward: Callable[..., tuple]  # (dy, y, *inputs, **settings) -> a gradient for each input; None: it has none
    elementwise: bool = False


def _power_backward(dy, y, a, n):
    """n · aⁿ⁻¹; for n = 0 the value does not depend on a, not even at 0, where 0 · 0⁻¹ would be nan."""
    return (dy * n * a ** (n - 1) if n else np.zeros_like(dy),)


def _sum_backward(dy, y, a, axis=None, keepdims=False):
    return (np.broadcast_to(dy if keepdims or axis is None else np.expand_dims(dy, axis), a.shape),)


OPS: dict[str, Op] = {
    "add": Op(np.add, lambda dy, y, a, b: (dy, dy), True),
    "sub": Op(np.subtract, lambda dy, y, a, b: (dy, -dy), True),
    "mul": Op(np.multiply, lambda dy, y, a, b: (dy * b, dy * a), True),
    "div": Op(np.divide, lambda dy, y, a, b: (dy / b, -dy * y / b), True),
    "power": Op(lambda a, n: a**n, _power_backward, True),
    "exp": Op(np.exp, lambda dy, y, a: (dy * y,), True),
    "log": Op(np.log, lambda dy, y, a: (dy / a,), True),
    "tanh": Op(np.tanh, lambda dy, y, a: (dy * (1 - y * y),), True),
    **{
        name: Op(fn, lambda dy, y, a, back=ACTIVATIONS_NP_BACKWARD[name]: (back(dy, a),), True)
        for name, fn in ACTIVATIONS_NP.items()
    },
    "matmul": Op(np.matmul, lambda dy, y, a, b: (dy @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ dy)),
    "sum": Op(np.sum, _sum_backward),
    "reshape": Op(lambda a, shape: a.reshape(shape), lambda dy, y, a, shape: (dy.reshape(a.shape),)),
    "transpose": Op(np.transpose, lambda dy, y, a, axes: (dy.transpose(np.argsort(axes)),)),
    "linear": Op(linear_np, lambda dy, y, x, w, b=None: linear_np_backward(dy, x, w)),
    "embedding": Op(embedding_np, lambda dy, y, ids, table: (None, embedding_np_backward(dy, ids, len(table)))),
    "layernorm": Op(layernorm_np, lambda dy, y, x, g, b=None: layernorm_np_backward(dy, x, g)),
    "rmsnorm": Op(rmsnorm_np, lambda dy, y, x, g: rmsnorm_np_backward(dy, x, g)),
    "softmax": Op(softmax_np, lambda dy, y, x: (softmax_np_backward(dy, y),)),
    "attention": Op(attention_np, lambda dy, y, q, k, v, mask=None: attention_np_backward(dy, q, k, v, mask)[:3]),
    "cross_entropy": Op(cross_entropy_np, lambda dy, y, z, targets: (cross_entropy_np_backward(dy, z, targets), None)),
    "fused": Op(lambda *a, graph: graph(*a), lambda dy, y, *a, graph: graph.gradients(*a, dy=dy)[1]),
}


class Node(NamedTuple):
    op: str
    inputs: tuple[int, ...]  # the numbers of the values that it reads
    settings: dict[str, Any]


def reverse(nodes: dict[int, Node], values: dict[int, np.ndarray], dy: np.ndarray) -> dict[int, np.ndarray]:
    """The chain rule: from dy, the gradient of the last node, to the gradient of every value that it depends on."""
    grads = {max(nodes): dy}
    for at in sorted(nodes, reverse=True):
        if at not in grads:
            continue  # the result does not depend on it
        inputs = [values[i] for i in nodes[at].inputs]
        parts = OPS[nodes[at].op].backward(grads[at], values[at], *inputs, **nodes[at].settings)
        for i, x, part in zip(nodes[at].inputs, inputs, parts):
            if part is not None:
                grads[i] = grads[i] + _fit(part, x.shape) if i in grads else _fit(part, x.shape)
    return grads


def _fit(grad: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes that forward broadcast."""
    grad = grad.sum(tuple(range(grad.ndim - len(shape))))
    return grad.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True).reshape(shape)


class Tensor:
    """A value that remembers how it was made. Every op of OPS is a method: `x.linear(w, b).gelu()`."""

    __array_ufunc__ = None  # so that array + Tensor comes here
    _numbers = count()  # an op's number is above those of its inputs: sorted by number is an order to run in

    def __init__(self, data: Any, op: str = "", inputs: tuple[Tensor, ...] = (), settings: dict | None = None):
        self.data, self.op, self.inputs, self.settings = np.asarray(data), op, inputs, settings or {}
        self.number, self.grad = next(Tensor._numbers), None

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        if name in OPS:
            return partial(apply, name, self)
        raise AttributeError(f"no op {name!r}; there are {', '.join(OPS)}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def mean(self) -> Tensor:
        return self.sum() / self.data.size

    def backward(self, dy: Any = 1.0) -> None:
        """Add the gradients of this value to `.grad` of everything that it was made from."""
        made_from = _ancestors(self)
        if self.op:
            values = {t.number: t.data for t in made_from}
            grads = reverse(_record(made_from), values, np.broadcast_to(dy, self.shape).astype(self.data.dtype))
            for t in made_from:
                if t.number in grads:
                    t.grad = grads[t.number] if t.grad is None else t.grad + grads[t.number]

    __add__ = __radd__ = lambda self, other: apply("add", self, other)
    __mul__ = __rmul__ = lambda self, other: apply("mul", self, other)
    __sub__ = lambda self, other: apply("sub", self, other)
    __rsub__ = lambda self, other: apply("sub", other, self)
    __truediv__ = lambda self, other: apply("div", self, other)
    __rtruediv__ = lambda self, other: apply("div", other, self)
    __matmul__ = lambda self, other: apply("matmul", self, other)
    __rmatmul__ = lambda self, other: apply("matmul", other, self)
    __pow__ = lambda self, n: apply("power", self, n=n)
    __neg__ = lambda self: self * -1


def apply(op: str, *inputs: Any, **settings: Any) -> Tensor:
    """Run an op now and remember it. A Python number takes the dtype of the first Tensor where that can hold it."""
    dtype = next(t.data.dtype for t in inputs if isinstance(t, Tensor))
    inputs = tuple(x if isinstance(x, Tensor) else _constant(x, dtype) for x in inputs)
    if op == "matmul" and min(t.data.ndim for t in inputs) < 2:
        raise ValueError(f"matmul takes matrices, got shapes {[t.shape for t in inputs]}; reshape a vector to [1, n]")
    return Tensor(OPS[op].forward(*(t.data for t in inputs), **settings), op, inputs, settings)


def _constant(x: Any, dtype: np.dtype) -> Tensor:
    """0.5 beside float32 is a float32; beside whole numbers it stays a fraction."""
    return Tensor(np.asarray(x, np.result_type(x, dtype) if isinstance(x, int | float) else None))


def _ancestors(last: Tensor) -> list[Tensor]:
    found, todo = {}, [last]
    while todo:
        t = todo.pop()
        if t.number not in found:
            found[t.number] = t
            todo += t.inputs
    return [found[n] for n in sorted(found)]


def _record(tensors: list[Tensor]) -> dict[int, Node]:
    return {t.number: Node(t.op, tuple(i.number for i in t.inputs), t.settings) for t in tensors if t.op}


@dataclass(frozen=True)
class Graph:
    """A program without Python: its inputs' numbers, the values that it holds fixed, and its ops in order."""

    inputs: tuple[int, ...]
    constants: dict[int, np.ndarray]
    nodes: dict[int, Node]

    def values(self, *arrays: np.ndarray) -> dict[int, np.ndarray]:
        """Every value by number: inputs, constants, and a value for each op, kept because backward reads it."""
        values = self.constants | dict(zip(self.inputs, arrays, strict=True))
        for at, node in self.nodes.items():
            values[at] = OPS[node.op].forward(*(values[i] for i in node.inputs), **node.settings)
        return values

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        return self.values(*arrays)[max(self.nodes)]

    def gradients(self, *arrays: np.ndarray, dy: Any = 1.0) -> tuple[np.ndarray, list[np.ndarray | None]]:
        """The result, and the gradient of each input (None: the result does not depend on it)."""
        values = self.values(*arrays)
        y = values[max(self.nodes)]
        grads = reverse(self.nodes, values, np.broadcast_to(dy, y.shape).astype(y.dtype))
        return y, [grads.get(i) for i in self.inputs]

    def fuse(self) -> Graph:
        """The same program, where elementwise ops that only one other elementwise op reads are part of that one."""
        readers: dict[int, set[int]] = {}
        for at, node in self.nodes.items():
            for i in node.inputs:
                readers.setdefault(i, set()).add(at)
        groups: dict[int, dict[int, Node]] = {}
        for at, node in self.nodes.items():
            joined = {at: node}
            for i in set(node.inputs) & set(groups):
                if OPS[node.op].elementwise and OPS[self.nodes[i].op].elementwise and readers[i] == {at}:
                    joined |= groups.pop(i)
            groups[at] = dict(sorted(joined.items()))
        return Graph(self.inputs, self.constants, {at: _one(group, self.nodes[at]) for at, group in groups.items()})


def _one(group: dict[int, Node], last: Node) -> Node:
    if len(group) == 1:
        return last
    outside = tuple(dict.fromkeys(i for node in group.values() for i in node.inputs if i not in group))
    return Node("fused", outside, {"graph": Graph(outside, {}, group)})


def trace(fn: Callable[..., Tensor], *arrays: np.ndarray) -> Graph:
    """Run fn once on these arrays and keep the ops that lead to its result. Raises ValueError when there are none."""
    inputs = tuple(Tensor(a) for a in arrays)
    result = fn(*inputs)
    if not getattr(result, "op", ""):
        raise ValueError(f"trace: the function returned {type(result).__name__} ; return a Tensor that ops made")
    made_from, given = _ancestors(result), {t.number for t in inputs}
    constants = {t.number: t.data for t in made_from if not t.op and t.number not in given}
    return Graph(tuple(t.number for t in inputs), constants, _record(made_from))
