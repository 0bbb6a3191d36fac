"""Fusion as a pass over a program: fewer kernels, fewer bytes, the same results.

    graph = capture(module or function, *examples)     intensity/capture.py
    rewrite(graph, impl)                               known sub-graphs become fused operations: intensity/patterns.py
    fuse(graph, impl) -> [Pointwise, …]                whatever pointwise is left: one generated kernel for each chain
    cost(graph) -> Cost(kernels, bytes)                by formula, before and after
    stack(model, ids) -> graph, x                      the blocks of a decoder, to do all this to

A chain is a pointwise operation and every pointwise operation before it whose readers are all in the chain. It has one
result, so it can have no circle, and what lies between is read by nobody else. Its kernel reads each value from outside
once and writes the result once: of n operations on N values in a row, 2nN values moved become 2N.

The kernel is source text (`.source`), compiled by Triton, or without Triton run by NumPy from the same expressions. It
computes in fp32 and rounds once, where the unfused program rounds at every step.
"""

from __future__ import annotations

import linecache
from copy import deepcopy
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import erf, expit
from torch import Tensor, fx, nn

from llmstack.architectures.decoder import Decoder
from llmstack.architectures.ends import prepare
from llmstack.architectures.layers import Pass
from llmstack.intensity.capture import DTYPES, call, capture, dtype, shape
from llmstack.intensity.patterns import replace, rewrite
from llmstack.ops._triton import HAVE_TRITON, TILE, tl, triton

__all__ = ["Cost", "Pointwise", "Stack", "capture", "chains", "cost", "fuse", "rewrite", "stack"]

EXPRESSIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "sqrt": "tl.sqrt({})",
    "rsqrt": "1 / tl.sqrt({})",
    "abs": "tl.abs({})",
    "sigmoid": "tl.sigmoid({0})",
    "tanh": "2 * tl.sigmoid(2 * {0}) - 1",
    "relu": "tl.where({0} < 0, 0.0, {0})",  # a maximum would drop NaN
    "silu": "{0} * tl.sigmoid({0})",
    "gelu": "0.5 * {0} * (1 + tl.erf({0} * 0.7071067811865476))",
}
NUMPY = SimpleNamespace(exp=np.exp, log=np.log, sqrt=np.sqrt, abs=np.abs, sigmoid=expit, where=np.where, erf=erf)
VIEWS = {"view", "reshape", "transpose", "unflatten", "flatten", "split", "chunk", "permute", "unsqueeze", "squeeze"}
VIEWS |= {"expand", "getitem", "getattr", "t", "size", "detach"}

DEFAULT = "triton" if HAVE_TRITON else "numpy"

HEAD = """\
@triton.jit
def {name}({inputs}, y_ptr, R, D, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < R) & (col < D)
"""
LOADS = {  # an input has the result's shape, or one row, one column or one value of it
    "all": "tl.load({0}_ptr + row * D + col, mask=inside, other=1.0)",
    "row": "tl.load({0}_ptr + col, mask=col < D, other=1.0)",
    "column": "tl.load({0}_ptr + row, mask=row < R, other=1.0)",
    "one": "tl.load({0}_ptr)",
}
STORE = "    tl.store(y_ptr + row * D + col, {}, mask=inside)\n"


class Cost(NamedTuple):
    kernels: int
    bytes: int


def cost(graph: fx.GraphModule) -> Cost:
    """Every call is a kernel that reads each tensor once and writes its results once, but views, which are free."""
    kernels = total = 0
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", node.target)
        if node.op in ("call_function", "call_method", "call_module") and name not in VIEWS:
            parts = [user for user in node.users if user.op == "call_function" and user.target.__name__ == "getitem"]
            kernels += 1
            total += sum(map(nbytes, {*node.all_input_nodes, *(parts or [node])}))
    return Cost(kernels, total)


def nbytes(node: fx.Node) -> int:
    kind = dtype(node)
    return kind.itemsize * int(np.prod(shape(node))) if kind else 0


def lies(how: str, given: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Whether an input of this shape lies so in the result's rows [R, D]; `how` is a key of LOADS."""
    given = (1,) * (len(out) - len(given)) + tuple(given)
    if how == "all":
        return given == out
    rows = given[:-1] == out[:-1] if how == "column" else all(n == 1 for n in given[:-1])
    return rows and given[-1:] == (out[-1:] if how == "row" else (1,))


def role(given: tuple[int, ...], out: tuple[int, ...]) -> str | None:
    return next((how for how in LOADS if out and lies(how, given, out)), None)


def pointwise(node: fx.Node) -> bool:
    """Whether a generated kernel can compute this node: a known operation, values and shapes that it can lay out."""
    if node.op not in ("call_function", "call_method") or dtype(node) not in DTYPES:
        return False
    name, args, options = call(node)
    if name not in EXPRESSIONS or options or EXPRESSIONS[name].count("{}") not in (0, len(args)):
        return False
    tensors = [a for a in args if isinstance(a, fx.Node)]
    numbers = [a for a in args if not isinstance(a, fx.Node)]
    fit = all(dtype(a) in DTYPES and role(shape(a), shape(node)) for a in tensors)
    plain = all(isinstance(a, float | int) and not isinstance(a, bool) and np.isfinite(a) for a in numbers)
    return fit and plain and any(shape(a) == shape(node) for a in tensors)


def chains(graph: fx.GraphModule, apart: bool = False) -> list[list[fx.Node]]:
    """Groups of pointwise nodes, each with its result last; apart: every node alone, the unfused program."""
    group: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.graph.nodes):
        if pointwise(node):
            homes = {id(home): home for home in (group.get(user) for user in node.users)}
            home = next(iter(homes.values())) if len(homes) == 1 else None
            group[node] = [] if home is None or apart else home
            group[node].append(node)
    unique = {id(nodes): nodes[::-1] for nodes in group.values()}
    return list(reversed(unique.values()))


class Pointwise(nn.Module):
    """One kernel for a chain of nodes that reads these inputs. `source` is its text, `roles` how its inputs lie."""

    numbers = count()

    def __init__(self, nodes: list[fx.Node], inputs: list[fx.Node], impl: str):
        super().__init__()
        result, self.impl, self.dtype = nodes[-1], impl, dtype(nodes[-1])
        self.roles = [role(shape(a), shape(result)) for a in inputs]
        names = {a: f"x{i}" for i, a in enumerate(inputs)}
        lines = []
        for i, node in enumerate(nodes):
            args = [names[a] if isinstance(a, fx.Node) else f"({float(a)!r})" for a in call(node).args]
            names[node] = f"v{i}"
            lines.append(f"    v{i} = {EXPRESSIONS[call(node).name].format(*args)}\n")
        self.name = "_".join(["fused", *dict.fromkeys(call(node).name for node in nodes)])
        xs = [names[a] for a in inputs]
        if impl == "triton":
            loads = [f"    {x} = {LOADS[r].format(x)}.to(tl.float32)\n" for x, r in zip(xs, self.roles)]
            head = HEAD.format(name=self.name, inputs=", ".join(f"{x}_ptr" for x in xs))
            self.source = head + "".join([*loads, *lines]) + STORE.format(names[result])
        else:
            self.source = f"def {self.name}({', '.join(xs)}):\n{''.join(lines)}    return {names[result]}\n"
        self.kernel = self._compile()

    def _compile(self):
        """Triton reads a kernel's text again through linecache, which is given it under a name of its own."""
        file = f"<{self.name} {next(self.numbers)}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        space = {"__name__": __name__, "triton": triton, "tl": tl if self.impl == "triton" else NUMPY}
        exec(compile(self.source, file, "exec"), space)
        return space[self.name]

    def forward(self, *tensors: Tensor) -> Tensor:
        """The chain's result, without gradients. Raises ValueError where inputs do not lie as in the examples, and
        RuntimeError where a gradient is wanted."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise RuntimeError(f"{self.name} has no backward: call it under torch.no_grad()")
        out = torch.broadcast_shapes(*(x.shape for x in tensors))
        if not all(lies(how, x.shape, tuple(out)) for how, x in zip(self.roles, tensors)):
            shapes = ", ".join(f"{list(x.shape)} ({how})" for how, x in zip(self.roles, tensors))
            raise ValueError(f"{self.name} was made for other shapes, got {shapes}: capture it again with these")
        if self.impl != "triton":
            arrays = [x.detach().to("cpu", torch.float32).numpy() for x in tensors]
            return torch.as_tensor(self.kernel(*arrays)).to(tensors[0].device, self.dtype)
        y = torch.empty(out, dtype=self.dtype, device=tensors[0].device)
        D = out[-1]
        R, COLS = out.numel() // max(D, 1), min(triton.next_power_of_2(max(D, 1)), 1024)
        ROWS = TILE // COLS
        if y.numel():
            grid = (triton.cdiv(R, ROWS), triton.cdiv(D, COLS))
            self.kernel[grid](*(x.contiguous() for x in tensors), y, R, D, ROWS, COLS, num_warps=8)
        return y


def fuse(graph: fx.GraphModule, impl: str = DEFAULT, apart: bool = False) -> list[Pointwise]:
    """Replaces each chain of the graph, in place, by one kernel; apart: each operation by a kernel of its own, to
    compare with. Raises ValueError on another impl than "triton" and "numpy"."""
    if impl not in ("triton", "numpy"):
        raise ValueError(f"impl = {impl!r}, but chains are generated for 'triton' or 'numpy'")
    made = []
    for nodes in chains(graph, apart):
        read = dict.fromkeys(a for node in nodes for a in call(node).args if isinstance(a, fx.Node))
        inputs = [a for a in read if a not in nodes]
        made.append(kernel := Pointwise(nodes, inputs, impl))
        name = f"{kernel.name}_{len(made)}"
        graph.add_submodule(name, kernel)
        replace(graph, name, tuple(inputs), nodes[-1:], frozenset(nodes))
    return made


class Stack(nn.Module):
    """Blocks of a model one after the other over hidden states [B, T, D]; `now` is what they share in a pass."""

    def __init__(self, blocks: nn.ModuleList, now: Pass):
        super().__init__()
        self.blocks, self.now = blocks, now

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.now)
        return x


@torch.no_grad()
def stack(model: Decoder, ids: Tensor, joined: bool = True) -> tuple[fx.GraphModule, Tensor]:
    """The blocks of a decoder, captured, and the hidden states [B, T, D] of ids that go in; joined: with one product
    for q, k and v. Rewritten and fused this is DeepSpeed Inference's block (Aminabadi et al. 2022, arXiv:2207.00032,
    section III.B): fused regions around the matmuls, for inference alone."""
    now, positions = prepare(model.config, ids, None, None)
    blocks = deepcopy(model.blocks)
    for block in blocks if joined else ():
        block.attention.fuse()
    x = model.embed(ids, positions)
    return capture(Stack(blocks, now), x), x
