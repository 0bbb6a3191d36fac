"""Kernels compiled for GPUs that are not here, files without Triton, and kernels on a GPU where there is one."""

import os
import subprocess
import sys

import pytest
import torch
from op_checks import NATIVE, randn

from llmstack.ops import aot, cross_entropy, glu, layernorm, rmsnorm, rope, softmax
from llmstack.ops._triton import HAVE_TRITON, row_tile

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")


def check(records):
    for r in records:
        assert r.registers > 0 and r.spill_bytes == 0, r
        assert 0 <= r.shared_bytes <= r.shared_limit_bytes, r


@needs_triton
def test_a_kernel_compiles_for_other_machines():
    records = aot.compile_all(["sm_90", "gfx942"], ["llmstack.ops.softmax"], first=1)
    assert [r.target for r in records] == ["sm_90", "gfx942"]
    assert all(r.kernel.startswith("softmax._softmax_kernel[") for r in records)
    check(records)


@needs_triton
@pytest.mark.slow
def test_every_kernel_compiles_for_every_target_without_spills():
    records = aot.compile_all()
    kernels = {r.kernel for r in records}
    assert {k.partition(".")[0] for k in kernels} >= {"softmax", "layernorm", "rmsnorm", "glu", "rope", "cross_entropy"}
    assert len(records) == len(kernels) * len(aot.TARGETS)
    check(records)


@needs_triton
def test_every_kernel_has_an_entry_and_every_module_with_kernels_is_found():
    from importlib import import_module
    from pathlib import Path

    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    found = aot.modules_with_kernels()
    for path in Path(aot.__file__).parent.rglob("*.py"):
        if "@triton.jit" in path.read_text("utf-8"):
            name = ".".join(("llmstack", "ops", *path.relative_to(Path(aot.__file__).parent).with_suffix("").parts))
            assert name in found, f"{name} has kernels but no AOT list"
            module = import_module(name)
            entries = {id(b.kernel) for b in module.AOT}
            kernels = {n: k for n, k in vars(module).items() if isinstance(k, JITFunction | InterpretedFunction)}
            assert not [n for n, k in kernels.items() if n.endswith("_kernel") and id(k) not in entries]


@needs_triton
def test_an_entry_gives_each_argument_a_type_or_a_constant(monkeypatch):
    """What the compiler would refuse, said without compiling; and the tiles are those of a launch on a GPU."""
    monkeypatch.setattr("llmstack.ops._triton.TILE", 4096)
    from importlib import import_module

    for name in aot.modules_with_kernels():
        module = import_module(name)
        for build in module.AOT:
            names = build.kernel.arg_names
            assert set(build.constants) <= set(names), (name, build)
            assert len(build.types.split()) + len(build.constants) == len(names), (name, build)
            if hasattr(module, "row_tile") and set(build.constants) == {"ROWS", "COLS"}:
                tile = build.constants["ROWS"], build.constants["COLS"], build.num_warps
                assert tile == row_tile(build.constants["COLS"]), (name, build)


def test_what_cannot_be_compiled_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="sm_75.*choose from.*gfx942"):
        aot.compile_all(["sm_75"])
    with pytest.raises(RuntimeError, match="(?s)compilation failed.*llmstack.ops.no_such_module"):
        aot.compile_all(["sm_90"], ["llmstack.ops.no_such_module"])


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it now fails as if it were not installed
from importlib import import_module
from pkgutil import iter_modules
import torch, llmstack.ops
modules = {m.name: import_module("llmstack.ops." + m.name) for m in iter_modules(llmstack.ops.__path__)}
x, ids = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, dtype=torch.long)
table = torch.ones(3, 2)
calls = dict(softmax=[x], rmsnorm=[x, x[0, 0, 0]], layernorm=[x, x[0, 0, 0]], glu=[x, x], rope=[x, table, table])
calls |= {"cross_entropy": [x, ids], "banded": [x, x, x, 1]}
with_kernels = {name for name, m in modules.items() if any(n.endswith("_triton") for n in vars(m))}
assert with_kernels >= set(calls), with_kernels
assert not [n for n in with_kernels if "triton" in getattr(modules[n], "IMPLS", {})]
for name, args in calls.items():
    impls = modules[name].IMPLS
    assert list(impls) == ["numpy", "torch"], (name, list(impls))
    impls["torch"](*args), impls["numpy"](*(a.numpy() if torch.is_tensor(a) else a for a in args))
    launcher = next(f for n, f in vars(modules[name]).items() if n.endswith("_triton"))
    try:
        launcher(*args)
    except RuntimeError as e:
        assert "Triton is not installed" in str(e) and "torch version" in str(e), e
    else:
        raise AssertionError(f"{name} ran without Triton")
print("ran", len(modules))
"""


def test_everything_but_kernels_works_without_triton():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("ran"), done.stderr


@needs_triton
@pytest.mark.skipif(NATIVE == "cuda", reason="kernels are not interpreted here")
def test_triton_imported_too_early_is_told():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "import triton, llmstack.ops._triton"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert "set TRITON_INTERPRET=1" in done.stderr, done.stderr


ROPE = rope.rope_tables(torch.arange(33), rope.rope_frequencies(64))
CASES = {
    "softmax": (softmax, [randn(70, 1000)], []),
    "rmsnorm": (rmsnorm, [randn(70, 1000), randn(1000, seed=1)], []),
    "layernorm": (layernorm, [randn(70, 1000), randn(1000, seed=1)], []),
    "swiglu": (glu, [randn(70, 1000), randn(70, 1000, seed=1)], []),
    "rope": (rope, [randn(2, 3, 33, 80)], [*ROPE]),
    "rope interleaved": (rope, [randn(2, 3, 33, 80)], [*ROPE, True]),
    "cross-entropy": (
        cross_entropy,
        [randn(70, 10_000)],
        [(torch.arange(70) * 100 % 101).index_fill(0, torch.arange(0, 70, 7), -1)],
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernels_run_natively(case, dtype):
    """On the GPU, forward and backward against the torch version in double precision and its autograd."""
    if NATIVE != "cuda":
        pytest.skip("torch finds no GPU, or TRITON_INTERPRET=1 is set")
    module, inputs, rest = CASES[case]
    option = {"ignore_index": -1} if case == "cross-entropy" else {}
    move = lambda t: t.cuda() if torch.is_tensor(t) else t
    narrow, rest = [t.to("cuda", dtype) for t in inputs], [move(t) for t in rest]
    got = module.IMPLS["triton"](*narrow, *rest, **option)
    leaves = [t.double().requires_grad_() for t in narrow]
    want = module.IMPLS["torch"](*leaves, *rest, **option)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    near = lambda a, b: torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)
    near(got, want)
    dy = randn(*want.shape, seed=5).to("cuda", got.dtype)
    gradients = torch.autograd.grad(want, leaves, dy.double())
    saved = [got] if case == "softmax" else [*narrow, *rest]
    back = module.BACKWARDS["triton"](dy, *saved, **option)
    for a, b in zip(back if isinstance(back, tuple) else (back,), gradients):
        assert (a.double() - b).norm() <= 2 * tolerance * b.norm().clamp(min=1e-3)


@pytest.mark.gpu
def test_a_query_that_may_see_no_key_gets_zeros_on_the_gpu():
    from llmstack.ops.attention import attention_torch

    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (randn(2, 4, 65, 64, seed=s).to("cuda", dtype) for s in range(3))
        mask = torch.ones(65, 65, dtype=torch.bool, device="cuda")
        mask[3] = False
        out = attention_torch(q, k, v, mask)
        assert (out[:, :, 3] == 0).all() and torch.isfinite(out).all()
