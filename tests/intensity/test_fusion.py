"""Generated kernels against PyTorch in double precision; kernels and bytes before and after, by formula and counted."""

from dataclasses import replace
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack.architectures import build
from llmstack.config import preset
from llmstack.intensity.fusion import EXPRESSIONS, capture, chains, cost, fuse, rewrite, stack
from llmstack.ops import traffic
from llmstack.ops._triton import HAVE_TRITON, INTERPRETED
from llmstack.ops.rmsnorm import rmsnorm_torch

COUNTED = HAVE_TRITON and INTERPRETED
IMPLS = ["numpy", *(["triton"] if COUNTED else [])]
needs_counts = pytest.mark.skipif(not COUNTED, reason="bytes are counted in Triton's interpreter")
randn = lambda *shape, seed=0: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
TORCH = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "gelu": F.gelu, "silu": F.silu}


def near(got, exact, plain):
    """At most twice the error of the plain program to the one in double precision."""
    error = lambda t: (t.double() - exact).norm().item()
    assert got.shape == exact.shape and got.dtype == plain.dtype
    assert error(got) <= 2 * error(plain) + 1e-7 * (1 + exact.norm().item()), (error(got), error(plain))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_each_operation_is_torchs(name, impl):
    fn, two = TORCH.get(name, getattr(torch, name, None)), name in ("add", "sub", "mul", "div")
    x, y = (randn(3, 65, seed=i) for i in (1, 2))
    x = x.abs() + 0.1 if name in ("log", "sqrt", "rsqrt") else 3 * x
    program = (
        (lambda x, y: fn(x, y) + fn(2.5, x) if name == "mul" else fn(x, y) + fn(x, 2.5))
        if two
        else (lambda x, y: fn(x) + y)
    )
    graph = capture(program, x, y)
    assert len(fuse(graph, impl)) == 1
    near(graph(x, y), program(x.double(), y.double()), program(x, y))


def several(x, b, c, one):
    h = (x + b) * c
    return torch.tanh(h) / 2 + torch.exp(-h.abs()) * torch.sigmoid(one + 1) - torch.relu(c) * 3


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 63), (3, 5, 100), (2, 1030), (0, 16), (8,)], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_inputs_of_the_whole_shape_of_a_row_of_columns_and_of_one_value(impl, shape):
    inputs = [randn(*shape), randn(shape[-1], seed=1), randn(*shape[:-1], 1, seed=2), randn(1, seed=3)]
    graph = capture(several, *inputs)
    assert len(fuse(graph, impl)) == 1
    near(graph(*inputs), several(*(x.double() for x in inputs)), several(*inputs))


@pytest.mark.parametrize("impl", IMPLS)
def test_strides_narrow_dtypes_and_other_sizes_than_the_examples(impl):
    program = lambda x, b: F.silu(x + b) * 3
    graph = capture(program, randn(4, 10), randn(10))
    (kernel,) = fuse(graph, impl)
    x, b = randn(20, 33).t(), randn(20, seed=1)
    torch.testing.assert_close(graph(x, b), program(x, b))
    with pytest.raises(ValueError, match=r"fused_add_silu_mul was made for other shapes.*\[33, 1\] \(row\)"):
        graph(x, randn(33, 1))
    half = capture(program, x.half(), b.half())
    fuse(half, impl)
    exact = program(x.half().double(), b.half().double())
    near(half(x.half(), b.half()), exact, program(x.half(), b.half()))
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        kernel(x, b)


def test_a_chain_ends_where_another_reads_it_and_at_what_is_not_pointwise():
    def program(x, w):
        a = torch.exp(x)
        b = torch.relu(a) + 1  # read twice, by one chain
        c = b * torch.sigmoid(b)
        d = c - 2  # c is read here and below
        return (c @ w).sqrt() * 2, d.abs(), x.double() + 1

    graph = capture(program, randn(6, 6), randn(6, 6))
    found = [[node.name for node in nodes] for nodes in chains(graph)]
    assert sorted(found) == [["exp", "relu", "add", "sigmoid", "mul"], ["sqrt", "mul_1"], ["sub", "abs_1"]]
    x, w = randn(6, 6).abs(), randn(6, 6).abs()
    want = program(x, w)
    assert len(fuse(graph, "numpy")) == 3
    torch.testing.assert_close(graph(x, w), want)
    with pytest.raises(ValueError, match="'triton' or 'numpy'"):
        fuse(graph, "cuda")


CHAIN = [F.silu, torch.exp, lambda x: x * 0.1, torch.sigmoid, torch.relu]


@needs_counts
@pytest.mark.parametrize("n", range(1, 6))
def test_a_chain_of_n_moves_two_values_in_place_of_two_n(n):
    R, D, w = 6, 100, 4
    x, program = randn(R, D), lambda x: reduce(lambda y, f: f(y), CHAIN[:n], x)
    counts = {}
    for apart in (True, False):
        graph = capture(program, x)
        fuse(graph, apart=apart)
        with traffic.counting() as moved:
            torch.testing.assert_close(graph(x), program(x))
        assert (moved.launches, moved.bytes) == cost(graph)
        counts[apart] = moved.launches, moved.bytes
    assert counts == {True: (n, 2 * n * w * R * D), False: (1, 2 * w * R * D)}


@needs_counts
def test_bias_gelu_and_swiglu_save_their_intermediates():
    R, D, w = 6, 100, 4
    x, y, b = randn(R, D), randn(R, D, seed=1), randn(D, seed=2)
    program = lambda x, y, b: (F.gelu(x + b), F.silu(y) * x)
    runs = {"apart": lambda g: fuse(g, apart=True), "fused": fuse, "rewritten": lambda g: rewrite(g, "triton")}
    counts = {}
    for name, transform in runs.items():
        graph = capture(program, x, y, b)
        unfused = cost(graph)
        transform(graph)
        with traffic.counting() as moved:
            torch.testing.assert_close(graph(x, y, b), program(x, y, b))
        assert (moved.launches, moved.bytes) == cost(graph)
        counts[name] = cost(graph)
    assert counts["apart"] == unfused and counts["fused"] == counts["rewritten"]
    assert counts["apart"].bytes - counts["fused"].bytes == 2 * w * (R * D + R * D)  # x + b and silu(y), each twice
    assert (counts["apart"].kernels, counts["fused"].kernels) == (4, 2)


@needs_counts
def test_residual_and_norm_in_a_graph_save_the_reading_of_the_sum():
    R, D, w = 6, 100, 4
    graph = capture(lambda x, r, g: (s := x + r, rmsnorm_torch(s, g)), x := randn(R, D), x, randn(D))
    before = cost(graph)
    assert rewrite(graph, "triton") == ["add + RMSNorm"]
    with traffic.counting() as moved:
        graph(x, x, randn(D))
    assert (moved.launches, moved.bytes) == cost(graph) == (1, w * (4 * R * D + D))
    assert (before.kernels, before.bytes - moved.bytes) == (2, w * R * D)


UNARY = [torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.relu, torch.abs, lambda x: x * 0.5, lambda x: 1 - x]
STEP = st.tuples(st.sampled_from(["unary", "add", "mul", "sum"]), *[st.integers(0, 99)] * 3)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(STEP, min_size=1, max_size=14), st.lists(st.integers(0, 99), max_size=3))
def test_random_programs_keep_their_results_and_move_less(steps, results):
    inputs = [randn(6, 8), randn(6, 8, seed=1), randn(8, seed=2), randn(6, 1, seed=3)]

    def program(a, b, c, d):
        values = [a, b, c, d]
        for kind, i, j, k in steps:
            x, y = values[i % len(values)], values[j % len(values)]
            made = {"unary": lambda: UNARY[k % len(UNARY)](x), "add": lambda: x + y, "mul": lambda: torch.tanh(x) * y}
            values.append(made[kind]() if kind in made else x.sum(-1, keepdim=True))
        return tuple(values[4 + r % len(steps)] for r in results) + (values[-1],)

    graph, want = capture(program, *inputs), program(*inputs)
    before, alone = cost(graph), len(chains(graph, apart=True))
    groups = chains(graph)
    assert sum(map(len, groups)) == alone
    for nodes in groups:  # nothing inside is read outside
        assert all(set(node.users) <= set(nodes) for node in nodes[:-1])
    made = fuse(graph, "numpy")
    after = cost(graph)
    graph.graph.lint()
    assert before.kernels - after.kernels == alone - len(made)
    assert after.bytes <= before.bytes and (after.bytes < before.bytes) == (len(made) < alone)
    assert len(chains(graph)) == 0
    for x, y in zip(graph(*inputs), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


SIZES = dict(d_model=32, n_layers=2, n_heads=4, d_head=8, d_ff=48, vocab_size=50, max_seq_len=32)
BLOCKS = {
    "llama3.1-8b": ({"n_kv_heads": 2}, ["attention, whole", "add + RMSNorm", "SwiGLU"]),
    "gpt2": ({"n_kv_heads": 4}, ["attention, whole", "add + LayerNorm"]),
}


@pytest.mark.parametrize("impl", ["torch", *(["triton"] if COUNTED else [])])
@pytest.mark.parametrize("name", BLOCKS)
def test_fused_blocks_are_the_blocks(name, impl):
    changes, patterns = BLOCKS[name]
    model = build(replace(preset(name), **SIZES, **changes))
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        plain = model.hidden_states(ids)[-1]
        exact = build(model.config).double()
        exact.load_state_dict(model.state_dict())
        exact = exact.hidden_states(ids)[-1]
        graph, x = stack(model, ids)
        before = cost(stack(model, ids, joined=False)[0])
        names = rewrite(graph, impl)
        assert names[: len(patterns)] == patterns and names.count(patterns[1]) == 3  # norm2 of both, norm1 of the next
        fuse(graph, "numpy" if impl == "torch" else impl)
        with_norm = model.norm(graph(x))
    near(with_norm, exact, plain)
    after = cost(graph)
    assert after.kernels < before.kernels and after.bytes < before.bytes
    if impl == "triton":
        with torch.no_grad(), traffic.counting() as moved:
            graph(x)
        assert moved.by("kernel").keys() >= {"_flash_kernel", "_add_norm_kernel"}


GENERATED = """
import torch
from llmstack.intensity.fusion import capture, fuse
from llmstack.ops._triton import Build
from llmstack.ops.aot import TARGETS, compile_one
examples = torch.ones(8, 4096), torch.ones(4096), torch.ones(8, 1), torch.ones(1)
program = lambda x, b, c, d: torch.nn.functional.gelu(torch.tanh(x + b) * torch.exp(-x) * c) - d
(kernel,) = fuse(capture(program, *examples), "triton")
for kind in ("bf16", "fp32"):
    build = Build(kernel.kernel, f"*{kind} " * 5 + "i32 i32", {"ROWS": 4, "COLS": 1024}, 8)
    for target in TARGETS:
        record = compile_one(build, target)
        assert record.registers > 0 and record.spill_bytes == 0, record
        print(record.kernel)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_generated_kernels_compile_for_other_machines_without_spills():
    import os
    import subprocess
    import sys

    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", GENERATED], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.count("fused_") == 6, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_generated_kernels_run_natively(dtype):
    if not torch.cuda.is_available() or INTERPRETED:
        pytest.skip("torch finds no GPU, or TRITON_INTERPRET=1 is set")
    shapes = [(70, 1000), (1000,), (70, 1), (1,)]
    inputs = [randn(*shape, seed=i).to("cuda", dtype) for i, shape in enumerate(shapes)]
    graph = capture(several, *inputs)
    fuse(graph, "triton")
    near(graph(*inputs), several(*(x.double() for x in inputs)), several(*inputs))


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_not_a_number_stays_so(impl):
    fn = lambda x, y: F.relu(x) * y
    x = torch.tensor([[torch.nan, -1.0, torch.inf, -torch.inf]])
    graph = capture(fn, x, torch.ones_like(x))
    assert len(fuse(graph, impl)) == 1
    torch.testing.assert_close(graph(x, torch.ones_like(x)), fn(x, torch.ones_like(x)), equal_nan=True)
