"""Finding sub-graphs that a fused operation can stand for, as TensorRT-LLM rewrites networks (and most compilers do).

    graph = capture(module or function, *examples)        intensity/capture.py
    find(graph, PATTERNS) -> [Match, …]                   rewrite(graph, impl="triton") -> names of what was rewritten

A pattern is the unfused code itself, traced like any function. It is matched backwards from its last result: a call
matches the same call, a sum or product in either order; an argument of the pattern matches any value, and the same one
wherever it stands. Four things have to hold besides, or a match would change results:

    kept        what lies between is read by nobody else, unless the fused operation returns it too
    no circle   no argument of the match is made from one of its results
    fits        shapes, dtypes and constants are those that the kernel is written for
    pure        nothing in the graph changes a tensor in place (`capture` refuses it)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from llmstack.intensity.capture import DTYPES, Tracer, call, dtype, shape
from llmstack.ops import fused
from llmstack.ops.attention import attention_torch
from llmstack.ops.cross_entropy import cross_entropy_torch
from llmstack.ops.flash import IMPLS as FLASH
from llmstack.ops.glu import IMPLS as SWIGLU
from llmstack.ops.layernorm import layernorm_torch
from llmstack.ops.rmsnorm import rmsnorm_torch


class Pattern:
    """Unfused code, the fused operation by implementation (same arguments, same results) and when it may stand in."""

    def __init__(self, code: Callable, impls: dict[str, Callable], fits: Callable[..., bool]):
        graph = Tracer().trace(code)
        self.code, self.impls, self.fits = code, impls, fits
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        results = next(node for node in graph.nodes if node.op == "output").args[0]
        self.several = isinstance(results, tuple)
        self.results = results if self.several else (results,)


class Match(NamedTuple):
    name: str
    pattern: Pattern
    args: tuple  # of the fused operation
    results: tuple[fx.Node, ...]
    inside: frozenset[fx.Node]  # all nodes that it replaces


def find(graph: fx.GraphModule, patterns: dict[str, Pattern] | None = None) -> list[Match]:
    """Every match, in the order of the graph; matches may overlap."""
    patterns = PATTERNS if patterns is None else patterns
    found = (match(graph, node, name, p) for node in graph.graph.nodes for name, p in patterns.items())
    return [m for m in found if m]


def match(graph: fx.GraphModule, node: fx.Node, name: str, pattern: Pattern) -> Match | None:
    """A match whose last result is this node."""
    if node.op not in ("call_function", "call_method"):
        return None
    for bound in _bind(pattern.results[-1], node, {}):
        args = tuple(bound[p] for p in pattern.inputs)
        inside = frozenset(n for p, n in bound.items() if p.op != "placeholder")
        results = tuple(bound[p] for p in pattern.results)
        kept = all(n in results or set(n.users) <= inside for n in inside)
        if kept and pattern.fits(*args) and not _reaches(args, inside):
            return Match(name, pattern, args, results, inside)
    return None


def _bind(p: Any, n: Any, bound: dict) -> Iterator[dict]:
    """The ways in which pattern value p can be graph value n, given what is bound."""
    if not isinstance(p, fx.Node):
        if type(p) is type(n) and p == n:
            yield bound
    elif p in bound:
        if bound[p] is n or not isinstance(n, fx.Node) and type(n) is type(bound[p]) and n == bound[p]:
            yield bound
    elif p.op == "placeholder":
        yield bound | {p: n}
    elif isinstance(n, fx.Node) and n.op in ("call_function", "call_method"):
        ours, theirs = call(p), call(n)
        if (ours.name, ours.options, len(ours.args)) == (theirs.name, theirs.options, len(theirs.args)):
            for args in permutations(theirs.args) if ours.name in ("add", "mul") else [theirs.args]:
                yield from _bind_all(list(zip(ours.args, args)), bound | {p: n})


def _bind_all(pairs: list, bound: dict) -> Iterator[dict]:
    if not pairs:
        yield bound
    else:
        for more in _bind(*pairs[0], bound):
            yield from _bind_all(pairs[1:], more)


def _reaches(args: tuple, inside: frozenset[fx.Node]) -> bool:
    """Whether an argument is made from something inside."""
    stack, seen = [a for a in args if isinstance(a, fx.Node)], set()
    while stack:
        node = stack.pop()
        if node in inside:
            return True
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return False


def rewrite(graph: fx.GraphModule, impl: str = "torch", patterns: dict[str, Pattern] | None = None) -> list[str]:
    """Replaces matches in place, the earliest first, until there are none; returns their names."""
    done = []
    while found := find(graph, patterns):
        m = found[0]
        done.append(m.name)
        replace(graph, m.pattern.impls[impl], m.args, m.results, m.inside, m.pattern.several)
    return done


def replace(graph: fx.GraphModule, target: Callable | str, args, results, inside, several: bool = False) -> None:
    """One call in place of the nodes inside: of a function, or of the graph's own module with this name."""
    nodes = graph.graph
    ordered = [node for node in nodes.nodes if node in inside]
    with nodes.inserting_after(ordered[-1]):
        new = nodes.call_module(target, args) if isinstance(target, str) else nodes.call_function(target, args)
    for i, old in enumerate(results):
        out = new
        if several:
            with nodes.inserting_after(new):
                out = nodes.call_function(operator.getitem, (new, i))
        out.meta = dict(old.meta)
        old.replace_all_uses_with(out, delete_user_cb=lambda user: user not in inside)
    for old in reversed(ordered):
        nodes.erase_node(old)
    _sort(nodes)
    graph.recompile()


def _sort(graph: fx.Graph) -> None:
    """Every node after what it reads, otherwise in the order that they had."""
    placed: dict[fx.Node, None] = {}

    def place(node: fx.Node) -> None:
        if node not in placed:
            for i in node.all_input_nodes:
                place(i)
            placed[node] = None

    for node in list(graph.nodes):
        place(node)
    last, *rest = placed
    for node in rest:
        last.append(node)
        last = node


def _floats(*values: Any) -> bool:
    """Whether these are tensors of one dtype that kernels compute in."""
    kinds = {dtype(v) for v in values}
    return len(kinds) == 1 and kinds <= set(DTYPES)


def _norm_fits(x, r, g, b, eps) -> bool:
    parameters = [g] if b is None else [g, b]
    widths = all(shape(p) == shape(x)[-1:] for p in parameters) and 0 < shape(x)[-1] <= 1 << 14
    return _floats(x, r, *parameters) and shape(x) == shape(r) and widths and isinstance(eps, float)


def _bias_fits(x, b) -> bool:
    return _floats(x, b) and len(shape(x)) > 1 and shape(b) == shape(x)[-1:]


def _attention_fits(q, k, v, scale) -> bool:
    return _whole_fits(q, k, v, scale, False) and shape(q)[1] == shape(k)[1] and isinstance(scale, float | int)


def _whole_fits(q, k, v, scale, causal) -> bool:
    if not (_floats(q, k, v) and len(shape(q)) == len(shape(k)) == 4 and shape(k) == shape(v)):
        return False
    (B, H, _, Dh), (batch, K, _, width) = shape(q), shape(k)
    return (B, Dh) == (batch, width) and H % K == 0 and Dh <= 256 and isinstance(causal, bool)


def _loss_fits(x, w, targets, ignore_index, reduction) -> bool:
    return _floats(x, w) and shape(targets) == shape(x)[:-1] and isinstance(ignore_index, int)


def _each(impls: dict[str, Callable], name: str, wrap: Callable) -> dict[str, Callable]:
    """The torch and Triton versions of a fused operation behind the arguments of a pattern."""
    wrapped = {impl: wrap(fn) for impl, fn in impls.items() if impl != "numpy"}
    for impl, fn in wrapped.items():
        fn.__name__ = f"{name}_{impl}"  # what the graph's code calls it
    return wrapped


def _add_layernorm(x, r, g, b, eps):
    s = x + r
    return s, layernorm_torch(s, g, b, eps)


def _add_rmsnorm(x, r, g, eps):
    s = x + r
    return s, rmsnorm_torch(s, g, eps)


def _attention(prepare: Callable) -> Callable:
    return lambda q, k, v, scale: torch.softmax(prepare(q @ k.transpose(-2, -1), scale), -1) @ v


PATTERNS = {
    "add + RMSNorm": Pattern(
        _add_rmsnorm,
        _each(fused.ADD_NORM, "add_rmsnorm", lambda f: lambda x, r, g, eps: f(x, r, g, None, eps, "rmsnorm")),
        lambda x, r, g, eps: _norm_fits(x, r, g, None, eps),
    ),
    "add + LayerNorm": Pattern(
        _add_layernorm,
        _each(fused.ADD_NORM, "add_layernorm", lambda f: lambda x, r, g, b, eps: f(x, r, g, b, eps, "layernorm")),
        _norm_fits,
    ),
    "bias + GELU": Pattern(
        lambda x, b: F.gelu(x + b), _each(fused.BIAS_GELU, "bias_gelu", lambda f: lambda x, b: f(x, b)), _bias_fits
    ),
    "SwiGLU": Pattern(
        lambda gate, up: F.silu(gate) * up,
        _each(SWIGLU, "swiglu", lambda f: lambda gate, up: f(gate, up)),
        lambda gate, up: _floats(gate, up) and shape(gate) == shape(up),
    ),
    "attention": Pattern(
        _attention(operator.mul),
        _each(FLASH, "attention", lambda f: lambda q, k, v, scale: f(q, k, v, scale=scale)),
        _attention_fits,
    ),
    "attention, divided": Pattern(
        _attention(operator.truediv),
        _each(FLASH, "attention_divided", lambda f: lambda q, k, v, scale: f(q, k, v, scale=1 / scale)),
        _attention_fits,
    ),
    "attention, whole": Pattern(
        lambda q, k, v, scale, causal: attention_torch(q, k, v, None, None, scale, causal),
        _each(FLASH, "attention_whole", lambda f: lambda q, k, v, scale, causal: f(q, k, v, causal, scale=scale)),
        _whole_fits,
    ),
    "linear + cross-entropy": Pattern(
        lambda x, w, targets, ignore_index, reduction: cross_entropy_torch(
            F.linear(x, w), targets, ignore_index, reduction
        ),
        _each(fused.LINEAR_CROSS_ENTROPY, "linear_cross_entropy", lambda f: lambda *args: f(*args)),
        _loss_fits,
    ),
}
