"""The pattern matcher: planted patterns are found, near misses are not, and on random programs it finds exactly what a
reading of their instructions says."""

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack.intensity.capture import capture
from llmstack.intensity.patterns import PATTERNS, find, rewrite
from llmstack.ops._triton import HAVE_TRITON, INTERPRETED
from llmstack.ops.attention import attention_torch
from llmstack.ops.cross_entropy import cross_entropy_torch
from llmstack.ops.layernorm import layernorm_torch
from llmstack.ops.rmsnorm import rmsnorm_torch

IMPLS = ["torch", *(["triton"] if HAVE_TRITON and INTERPRETED else [])]
rows = lambda seed, *shape: torch.randn(shape or (6, 8), generator=torch.Generator().manual_seed(seed))
X, Y, G, B, W = rows(0), rows(1), rows(2, 8), rows(3, 8), rows(4, 10, 8)
Q, K, V = (rows(i, 1, 2, 6, 16) for i in (5, 6, 7))
IDS = torch.tensor([1, 9, -100, 0, 5, 3])


def names(fn, *inputs):
    return [m.name for m in find(capture(fn, *inputs))]


def add_then_layernorm(x, r, g, b):
    s = torch.add(r, x)
    return layernorm_torch(s, g, b, eps=1e-6), s * 2


PLANTED = {  # program, inputs, what is in it; written in other ways than the patterns are
    "add + RMSNorm": (lambda x, r, g: rmsnorm_torch((s := x + r), g) + s, (X, Y, G)),
    "add + LayerNorm": (add_then_layernorm, (X, Y, G, B)),
    "bias + GELU": (lambda x, w, b: F.gelu(b + x @ w.t()).sum(1), (X, W, rows(8, 10))),
    "SwiGLU": (lambda x, y: (y - 1) * F.silu(x.exp()), (X, Y)),
    "attention": (lambda q, k, v: torch.matmul((q.matmul(k.transpose(2, 3)) * 0.3).softmax(dim=-1), v) + 1, (Q, K, V)),
    "attention, divided": (lambda q, k, v: F.softmax(q @ k.transpose(-1, -2) / 4, 3) @ v, (Q, K, V)),
    "attention, whole": (lambda q, k, v: attention_torch(q.exp(), k[:, :1], v[:, :1], causal=True), (Q, K, V)),
    "linear + cross-entropy": (lambda x, w, ids: cross_entropy_torch(F.linear(x.exp(), w, None), ids), (X, W, IDS)),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", PATTERNS)
def test_planted_patterns_are_found_and_rewritten(name, impl):
    program, inputs = PLANTED[name]
    graph, want = capture(program, *inputs), program(*inputs)
    assert [m.name for m in find(graph)] == [name]
    assert rewrite(graph, impl) == [name] and not find(graph)
    called = [n.target.__name__ for n in graph.graph.nodes if callable(n.target)]
    assert sum(c.endswith(f"_{impl}") for c in called) >= 1
    torch.testing.assert_close(graph(*inputs), want)


def circle(x, r, w):
    s = x + r
    return rmsnorm_torch(s, (s @ w).sum(0))


WIDE = [t.double() for t in (X, Y, G)]
MISSES = {
    "what lies between is read elsewhere": (lambda x, y: ((a := F.silu(x)) * y, a + 1), (X, Y)),
    "or is a result": (lambda x, y: ((a := F.silu(x)) * y, a), (X, Y)),
    "scores are read elsewhere": (lambda q, k, v: ((s := q @ k.transpose(2, 3) * 0.3).softmax(-1) @ v, s), (Q, K, V)),
    "silu times itself": (lambda x: (a := F.silu(x)) * a, (X,)),
    "the scale is made from the sum": (circle, (X, Y, rows(9, 8, 8))),
    "another activation": (lambda x, y: torch.sigmoid(x) * y, (X, Y)),
    "scores over nothing": (lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / 0, -1) @ v, (Q, K, V)),
    "one row": (lambda x, w, ids: cross_entropy_torch(F.linear(x, w), ids), (X[0], W, torch.tensor(3))),
    "the other GELU": (lambda x, b: F.gelu(x + b, approximate="tanh"), (X, B)),
    "a bias as large as x": (lambda x, y: F.gelu(x + y), (X, Y)),
    "a bias of columns": (lambda x, b: F.gelu(x + b), (X, rows(10, 6, 1))),
    "a number for a bias": (lambda x: F.gelu(x + 1.0), (X,)),
    "double precision": (lambda x, r, g: rmsnorm_torch(x + r, g), WIDE),
    "two dtypes": (lambda x, r, g: rmsnorm_torch(x + r, g), (X, Y.half(), G)),
    "a broadcast residual": (lambda x, r, g: rmsnorm_torch(x + r, g), (X, Y[:1], G)),
    "twice the residual": (lambda x, r, g: rmsnorm_torch(torch.add(x, r, alpha=2), g), (X, Y, G)),
    "a gate of another shape": (lambda x, y: F.silu(x) * y, (X, Y[:1])),
    "a difference": (lambda x, r, g: rmsnorm_torch(x - r, g), (X, Y, G)),
    "softmax over queries": (lambda q, k, v: (q @ k.transpose(2, 3) * 0.3).softmax(-2) @ v, (Q, K, V)),
    "a wrong transpose": (lambda q, k, v: (q @ k.transpose(1, 2) * 0.3).softmax(-1) @ v, (Q, rows(2, 1, 16, 2, 6), V)),
    "a tensor for a scale": (lambda q, k, v, c: (q @ k.transpose(2, 3) * c).softmax(-1) @ v, (Q, K, V, torch.ones(1))),
    "a mask between": (lambda q, k, v, m: (q @ k.transpose(2, 3) * 0.3 + m).softmax(-1) @ v, (Q, K, V, rows(11, 6, 6))),
    "the scale over scores": (lambda q, k, v: (4 / (q @ k.transpose(2, 3))).softmax(-1) @ v, (Q, K, V)),
    "three axes": (lambda q, k, v: (q @ k.transpose(1, 2) * 0.3).softmax(-1) @ v, (Q[0], K[0], V[0])),
    "attention with a mask": (lambda q, k, v: attention_torch(q, k, v, torch.ones(6, 6).bool()), (Q, K, V)),
    "a head with a bias": (lambda x, w, b, ids: cross_entropy_torch(F.linear(x, w, b), ids), (X, W, rows(8, 10), IDS)),
    "logits are a result": (lambda x, w, ids: (cross_entropy_torch(z := F.linear(x, w), ids), z), (X, W, IDS)),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSES)
def test_near_misses_are_left_alone(case):
    program, inputs = MISSES[case]
    graph, want = capture(program, *inputs), program(*inputs)
    assert rewrite(graph) == []
    torch.testing.assert_close(graph(*inputs), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: x.mul_(y),
        lambda x, y: F.relu(x + y, inplace=True),
        lambda x, y: torch.relu_(x),
        lambda x, y: operator.imul(x, y),
        lambda x, y: torch.exp(y, out=x),
    ],
    ids=["method", "argument", "function", "operator", "result"],
)
def test_a_graph_that_changes_a_tensor_in_place_is_refused(change):
    with pytest.raises(ValueError, match="in place, which fusing could move"):
        capture(change, X.clone(), Y)


def test_an_implementation_that_patterns_do_not_have_is_refused():
    with pytest.raises(ValueError, match="impl = 'numpy', but add \\+ RMSNorm.* have 'torch'"):
        rewrite(capture(lambda x: x + 1, X), "numpy")


def test_a_chain_of_residuals_is_rewritten_from_the_front_and_results_stay_in_order():
    def blocks(x, y, g):
        for _ in range(3):
            x = x + y
            early = x * 2  # reads the sum before the norm is made
            y = rmsnorm_torch(x, g + 1)
        return x, y, early

    graph = capture(blocks, X, Y, G)
    assert rewrite(graph) == ["add + RMSNorm"] * 3
    graph.graph.lint()
    torch.testing.assert_close(graph(X, Y, G), blocks(X, Y, G))


# Random programs: each instruction makes a value from earlier ones.
OPS = {
    "silu": lambda a, b: F.silu(a),
    "gelu": lambda a, b: F.gelu(a),
    "tanh": lambda a, b: torch.tanh(a),
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "rmsnorm": lambda a, b: rmsnorm_torch(a, b),
    "sum": lambda a, b: a.sum(0),
    "double": lambda a, b: a.double(),
}
LIKELY = {  # pairs that often match: the second reads the first, whose value comes last (-1)
    "silu, mul": lambda i, j: [("silu", i, i), ("mul", -1, j)],
    "mul by silu": lambda i, j: [("silu", j, j), ("mul", i, -1)],
    "add, rmsnorm": lambda i, j: [("add", i, j), ("rmsnorm", -1, j)],
    "add, gelu": lambda i, j: [("add", i, j), ("gelu", -1, -1)],
}
INSTRUCTION = st.tuples(st.sampled_from([*OPS, *LIKELY]), st.integers(0, 99), st.integers(0, 99))
INPUTS = [X, Y, G, B]


class Program:
    """Instructions (op, value read, second value read), run once to know every shape and dtype."""

    def __init__(self, instructions, results):
        self.values, self.ops, self.reads = list(INPUTS), [], []
        single = [one for op, *r in instructions for one in (LIKELY[op](*r) if op in LIKELY else [(op, *r)])]
        for op, i, j in single:
            i, j = i % len(self.values), j % len(self.values)
            if op == "sum" and self.values[i].ndim == 1:
                op = "tanh"
            if op == "rmsnorm" and self.values[j].ndim != 1:
                j = 2
            self.ops.append(op)
            self.reads.append((i, j) if op in ("mul", "add", "rmsnorm") else (i,))
            self.values.append(OPS[op](self.values[i], self.values[j]))
        self.results = sorted({4 + r % len(self.ops) for r in results} | {len(self.values) - 1})

    def __call__(self, x, y, g, b):
        values = [x, y, g, b]
        for op, reads in zip(self.ops, self.reads):
            values.append(OPS[op](values[reads[0]], values[reads[-1]]))
        return tuple(values[r] for r in self.results)

    def expected(self):
        """What should match, by the instructions alone: (name, value that it ends in)."""
        op = lambda at: self.ops[at - 4] if at >= 4 else ""
        readers = {}
        for at, reads in enumerate(self.reads, 4):
            for i in reads:
                readers.setdefault(i, set()).add(at)
        alone = lambda i, at: readers[i] == {at} and i not in self.results
        kind = lambda i: (self.values[i].shape, self.values[i].dtype)
        floats = lambda *at: {self.values[i].dtype for i in at} == {torch.float32}

        def made_from(i, source):
            return i == source or i >= 4 and any(made_from(r, source) for r in self.reads[i - 4])

        found = set()
        for at, reads in enumerate(self.reads, 4):
            for i, j in (reads, reads[::-1]) if op(at) == "mul" else ():
                if op(i) == "silu" and alone(i, at) and j != i and floats(*self.reads[i - 4], j):
                    if kind(self.reads[i - 4][0]) == kind(j):
                        found.add(("SwiGLU", at))
            if op(at) == "gelu" and op(reads[0]) == "add" and alone(reads[0], at):
                a, b = (self.values[i] for i in self.reads[reads[0] - 4])
                if {a.ndim, b.ndim} == {1, 2} and floats(*self.reads[reads[0] - 4]):
                    found.add(("bias + GELU", at))
            if op(at) == "rmsnorm" and op(reads[0]) == "add":
                i, j = self.reads[reads[0] - 4]
                if kind(i) == kind(j) and floats(i, j, reads[1]) and not made_from(reads[1], reads[0]):
                    found.add(("add + RMSNorm", at))
        return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(INSTRUCTION, min_size=1, max_size=8), st.lists(st.integers(0, 99), max_size=2))
def test_random_programs_match_exactly_where_their_instructions_say(instructions, results):
    program = Program(instructions, results)
    graph = capture(lambda x, y, g, b: program(x, y, g, b), *INPUTS)
    calls = [n for n in graph.graph.nodes if n.op in ("call_function", "call_method")]
    assert len(calls) == len(program.ops)
    found = {(m.name, 4 + calls.index(m.results[-1])) for m in find(graph)}
    assert found == program.expected()
    done = rewrite(graph)
    assert len(done) <= len(found) and bool(done) == bool(found)
    graph.graph.lint()
    for got, want in zip(graph(*INPUTS), program(*INPUTS), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max().clamp(1)))
