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
from functools import partial
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
    """Unfused code, the fused operation by implementation (`to` gives it the arguments of the code) and what fits."""

    def __init__(
        self, code: Callable, impls: dict[str, Callable], fits: Callable[..., bool], to: Callable | None = None
    ):
        graph = Tracer().trace(code)
        self.code, self.fits = code, fits
        self.impls = {impl: to(fn) if to else partial(fn) for impl, fn in impls.items() if impl != "numpy"}
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
    known = bound.get(p) if isinstance(p, fx.Node) else p
    if p in bound or not isinstance(p, fx.Node):
        if known is n or type(known) is type(n) is not fx.Node and known == n:
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
    """Replaces matches in place, the earliest first, until there are none; returns their names. The norms, bias + GELU
    and SwiGLU have no gradient in Triton. Raises ValueError on an impl that a pattern does not have."""
    done, patterns = [], PATTERNS if patterns is None else patterns
    if lacking := [name for name, pattern in patterns.items() if impl not in pattern.impls]:
        raise ValueError(f"impl = {impl!r}, but {', '.join(lacking)} have 'torch', and 'triton' where it is installed")
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


def _gate_fits(gate, up) -> bool:
    return _floats(gate, up) and shape(gate) == shape(up)


def _scores_fit(q, k, v, scale) -> bool:
    plain = isinstance(scale, float | int) and scale != 0
    return plain and _heads_fit(q, k, v, scale, False) and shape(q)[1] == shape(k)[1]


def _heads_fit(q, k, v, scale, causal) -> bool:
    if not (_floats(q, k, v) and len(shape(q)) == len(shape(k)) == 4 and shape(k) == shape(v)):
        return False
    (B, H, _, Dh), (batch, K, _, width) = shape(q), shape(k)
    return (B, Dh) == (batch, width) and H % K == 0 and Dh <= 256 and isinstance(causal, bool)


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
        fused.ADD_NORM,
        lambda x, r, g, eps: _norm_fits(x, r, g, None, eps),
        lambda f: lambda x, r, g, eps: f(x, r, g, None, eps),
    ),
    "add + LayerNorm": Pattern(
        _add_layernorm,
        fused.ADD_NORM,
        _norm_fits,
        lambda f: lambda x, r, g, b, eps: f(x, r, g, b, eps, "layernorm"),
    ),
    "bias + GELU": Pattern(lambda x, b: F.gelu(x + b), fused.BIAS_GELU, _bias_fits),
    "SwiGLU": Pattern(lambda gate, up: F.silu(gate) * up, SWIGLU, _gate_fits),
    "attention": Pattern(
        _attention(operator.mul), FLASH, _scores_fit, lambda f: lambda q, k, v, c: f(q, k, v, scale=c)
    ),
    "attention, divided": Pattern(
        _attention(operator.truediv), FLASH, _scores_fit, lambda f: lambda q, k, v, c: f(q, k, v, scale=1 / c)
    ),
    "attention, whole": Pattern(
        lambda q, k, v, scale, causal: attention_torch(q, k, v, None, None, scale, causal),
        FLASH,
        _heads_fit,
        lambda f: lambda q, k, v, scale, causal: f(q, k, v, causal, scale=scale),
    ),
    "linear + cross-entropy": Pattern(
        lambda x, w, ids, ignore, mean: cross_entropy_torch(F.linear(x, w), ids, ignore, mean),
        fused.LINEAR_CROSS_ENTROPY,
        lambda x, w, ids, ignore, mean: _floats(x, w) and shape(ids) == shape(x)[:-1] != (),
    ),
}
for _name, _pattern in PATTERNS.items():
    for _impl, _fn in _pattern.impls.items():
        _fn.__name__ = f"{_name.replace(' + ', '_').replace(', ', '_').replace('-', '_').lower()}_{_impl}"
