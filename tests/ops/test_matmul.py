"""Tiled products against BLAS in double precision, their bytes and work counted, and the choice among kernels."""

import os
import subprocess
import sys
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from op_checks import NATIVE, check, check_backward, check_forward, randn, strided
from torch.nn import functional as F

from llmstack.ops import matmul, traffic
from llmstack.ops._triton import HAVE_TRITON, INTERPRETED, tl, triton
from llmstack.ops.glu import swiglu_triton
from llmstack.ops.matmul import BACKWARDS, FFN_IMPLS, GEMV_IMPLS, IMPLS, matmul_bytes, matmul_triton, tiled_np

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
counted = pytest.mark.skipif(not (HAVE_TRITON and INTERPRETED), reason="counted in Triton's interpreter")
SIZES = [(1, 1, 1), (7, 63, 100), (100, 7, 1), (63, 1, 1000), (150, 300, 130)]


@pytest.mark.parametrize("M, N, K", SIZES)
@pytest.mark.parametrize("impl", IMPLS)
def test_is_the_product_of_blas(impl, M, N, K):
    check_forward(IMPLS[impl], impl, torch.mm, randn(M, K), randn(K, N, seed=1), terms=K)


@pytest.mark.parametrize("impl", IMPLS)
def test_any_strides_and_nothing_to_multiply(impl):
    check_forward(IMPLS[impl], impl, torch.mm, strided(randn(40, 30)), randn(50, 30, seed=1).T)
    check_forward(IMPLS[impl], impl, torch.mm, randn(0, 3), randn(3, 5))
    check_forward(IMPLS[impl], impl, torch.mm, randn(4, 0), randn(0, 5))


@pytest.mark.parametrize("impl", BACKWARDS)
def test_backward(impl):
    a, b, dc = randn(33, 20), randn(20, 40, seed=1), randn(33, 40, seed=2)
    check_backward(BACKWARDS[impl], impl, torch.mm, [a, b], dc, a, b)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_are_kept_in_fp32(dtype):
    """4,096 products, all positive, as a sum in 16 bits would lose their ends: the result is rounded once."""
    a, b = randn(3, 4096).abs().to(dtype), randn(4096, 5, seed=1).abs().to(dtype)
    got = matmul_triton(a.to(NATIVE), b.to(NATIVE)).cpu()
    assert got.dtype == dtype
    exact = a.double() @ b.double()
    assert ((got.double() - exact).abs() <= torch.finfo(dtype).eps * exact).all()


@pytest.mark.parametrize("tile", [(16, 16, 16), (64, 32, 16), (128, 128, 128)], ids=str)
@pytest.mark.parametrize("M, N, K", [(100, 63, 70), (1, 130, 7)])
def test_tiles_move_what_the_formula_says(M, N, K, tile):
    a, b = randn(M, K).numpy(), randn(K, N, seed=1).numpy()
    c, read, written = tiled_np(a, b, tile)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-5)
    assert (read, written) == matmul_bytes(M, N, K, tile, 4)


def test_a_naive_product_reads_both_operands_for_every_value():
    ones = np.ones((5, 6)), np.ones((6, 7))
    c, read, written = tiled_np(*ones, (1, 1, 1))
    assert (c == 6).all() and (read, written) == (8 * 2 * 5 * 6 * 7, 8 * 5 * 7)


@counted
@pytest.mark.parametrize("tile", [(16, 32, 32), (64, 64, 32)], ids=str)
def test_the_kernel_moves_what_the_formula_says(tile):
    a, b = randn(100, 70).half(), randn(70, 63).half()
    with traffic.counting() as moved:
        c = matmul_triton(a, b, tile)
    torch.testing.assert_close(c, a @ b, rtol=2e-3, atol=2e-3)
    assert (moved.loaded, moved.stored) == matmul_bytes(100, 63, 70, tile)


def test_groups_share_strips():
    """Nine programs of a 9 × 9 grid: a row of tiles needs 1 + 9 strips of nine tiles, a 3 × 3 square 3 + 3 (Triton's
    matrix multiplication tutorial has the same 90 and 54 tiles)."""
    assert [9 * matmul.wave_strips(9, 9, group, 9) for group in (1, 3)] == [90, 54]
    order = matmul.grouped_np(7, 5, 3)
    assert len(set(order)) == len(order) == 35 and order[:4] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert matmul.grouped_np(2, 2, 1) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@triton.jit
def _order_kernel(out_ptr, tiles_m, tiles_n, GROUP: tl.constexpr):
    m, n = matmul._grouped(tl.program_id(0), tiles_m, tiles_n, GROUP)
    tl.store(out_ptr + 2 * tl.program_id(0), m)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, n)


@needs_triton
@pytest.mark.parametrize("group", [1, 3, 8])
def test_programs_run_in_that_order(group):
    out = torch.full((35, 2), -1, dtype=torch.int32, device=NATIVE)
    _order_kernel[(35,)](out, 7, 5, group)
    assert list(map(tuple, out.tolist())) == matmul.grouped_np(7, 5, group)


@pytest.mark.parametrize("N, K", [(1, 1), (7, 63), (300, 1100)])
@pytest.mark.parametrize("impl", GEMV_IMPLS)
def test_gemv(impl, N, K):
    check_forward(GEMV_IMPLS[impl], impl, torch.mv, randn(N, K), randn(K, seed=1), terms=K)
    check_forward(GEMV_IMPLS[impl], impl, torch.mv, strided(randn(N, K)), randn(2, K, seed=1).T[:, 0], terms=K)
    check_forward(GEMV_IMPLS[impl], impl, torch.mv, randn(N, 2 * K)[:, :K], randn(K, seed=1), terms=K)


@counted
def test_gemv_reads_the_weights_once():
    w, x = randn(512, 300).half(), randn(300).half()
    with traffic.counting() as moved:
        matmul.gemv_triton(w, x)
    by = moved.by("argument")
    assert by == {"w_ptr": 2 * 512 * 300, "x_ptr": 2 * 300 * 512 // 256, "y_ptr": 2 * 512}


@needs_triton
@pytest.mark.parametrize("M", [1, 3, 8, 9, 63, 100])
def test_flat_gemm(M):
    x, w = randn(M, 70), randn(150, 70, seed=1)
    got = matmul.flat_gemm_triton(x.to(NATIVE), strided(w).to(NATIVE)).cpu()
    check([got], [F.linear(x.double(), w.double())], [F.linear(x, w)], terms=x.shape[-1])
    assert got.is_contiguous()


def test_padding_to_8_and_to_64():
    assert [matmul.padded(M) for M in (1, 8, 9, 17, 64, 65)] == [8, 8, 16, 32, 64, 128]
    assert [matmul.padded(M, 64) for M in (1, 8, 64, 65)] == [64, 64, 64, 128]
    waste = lambda M, to: 1 - M / matmul.padded(M, to)
    assert (waste(1, 8), waste(1, 64), waste(8, 8), waste(8, 64)) == (7 / 8, 63 / 64, 0, 7 / 8)


@contextmanager
def multiplied():
    """Counts multiply-adds of every tl.dot."""
    from triton.runtime.interpreter import interpreter_builder as builder

    dot, count = builder.create_dot, [0]

    def counting(a, b, *rest):
        count[0] += a.data.size * b.data.shape[-1]
        return dot(a, b, *rest)

    with patch.object(builder, "create_dot", counting):
        yield count


@counted
@pytest.mark.parametrize("M", [1, 3, 8, 20])
def test_the_kernel_multiplies_as_many_rows_as_padded_says(M):
    """128 × 256 is whole tiles, so all waste is the padding of M; and weights are read once either way."""
    x, w = randn(M, 256), randn(128, 256)
    for pad in (8, 64):
        with multiplied() as count, traffic.counting() as moved:
            matmul.flat_gemm_triton(x, w, pad)
        assert count[0] == matmul.padded(M, pad) * 128 * 256
        assert moved.by("argument")["a_ptr"] == 4 * 128 * 256


PTX = """
import re
from dataclasses import replace
from llmstack.ops import aot, matmul
flat = next(b for b in matmul.AOT if b.constants.get("BN") == 8)
as_given = replace(flat, constants=flat.constants | dict(BM=8, BN=64))
for target in ("sm_80", "sm_90"):
    for name, build, stages in [("flat", flat, 1), ("flat", flat, 2), ("flat", flat, 3), ("rows first", as_given, 3)]:
        ptx = aot.compile_kernel(replace(build, num_stages=stages), target).asm["ptx"]
        shapes = re.findall(r"mma(?:_async)?\\.sync\\.aligned\\.(m\\d+n\\d+k\\d+)", ptx)
        copies = re.findall(r"cp\\.async\\.c[ag]", ptx)
        print(target, name, stages, sorted(set(shapes)), len(shapes), len(copies), sep="|")
"""


@needs_triton
@pytest.mark.slow
def test_compiled_it_pads_to_8_and_loads_while_it_multiplies():
    """Stages: copies to shared memory that nobody waits for (cp.async) from 2 on, none with 1. Shapes: n = 8 holds M;
    with M on the first side the same work takes twice the instructions, and wgmma, whose first side is 64, is out."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", PTX], env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = {tuple(line.split("|")[:3]): line.split("|")[3:] for line in done.stdout.splitlines() if "|" in line}
    for target, shape in (("sm_80", "['m16n8k16']"), ("sm_90", "['m64n8k16']")):
        copies = [int(found[target, "flat", s][2]) for s in "123"]
        assert copies[0] == 0 < copies[1] < copies[2]
        assert all(found[target, "flat", s][:2] == [shape, "8"] for s in "123")
        assert found[target, "rows first", "3"][:2] == ["['m16n8k16']", "16"]


PROFILE = {  # seconds by M; gemv grows with M, flat in steps, gemm is flat until it is full
    "gemv": {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 32: 32.0, 128: 128.0},
    "flat": {1: 1.5, 2: 1.5, 4: 1.6, 8: 1.7, 32: 2.5, 128: 9.0},
    "gemm": {1: 3.0, 2: 3.0, 4: 3.0, 8: 3.0, 32: 3.0, 128: 4.0},
}


def test_the_choice_is_the_best_of_the_profile():
    cuts = matmul.inflections(PROFILE)
    assert cuts == (2, 128)
    for M in PROFILE["gemv"]:
        best = min(PROFILE, key=lambda kind: PROFILE[kind][M])
        assert matmul.choose(M, 4096, 4096, {(4096, 4096): cuts}) == best
    assert matmul.choose(64, 4096, 4096, {(4096, 4096): cuts}) == "flat"
    never = {kind: dict.fromkeys(PROFILE["gemv"], cost) for kind, cost in (("gemv", 2), ("flat", 3), ("gemm", 1))}
    assert matmul.inflections(never) == (1, 1)
    with pytest.raises(ValueError, match="at the same M each"):
        matmul.inflections(PROFILE | {"gemm": {1: 1.0}})


def test_without_a_profile_each_weight_is_read_once():
    assert [matmul.choose(M, 4096, 4096) for M in (1, 2, 64, 65)] == ["gemv", "flat", "flat", "gemm"]
    assert matmul.choose(1, 4096, 4096, {(1, 1): (1, 1)}) == "gemv"


@needs_triton
@pytest.mark.parametrize("cuts", [(99, 99), (1, 99), (1, 1)], ids=["gemv", "flat", "gemm"])
def test_whatever_is_chosen_is_the_same_product(cuts):
    x, w = randn(3, 40), randn(50, 40, seed=1)
    for rows in (3, 0):
        got = matmul.linear_triton(x[:rows].to(NATIVE), w.to(NATIVE), {(50, 40): cuts}).cpu()
        torch.testing.assert_close(got, F.linear(x[:rows], w), rtol=1e-5, atol=1e-5)


def _ffn(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


@pytest.mark.parametrize("impl", FFN_IMPLS)
def test_fused_ffn(impl):
    x, gate, up, down = randn(63, 40), randn(40, 150, seed=1), randn(40, 150, seed=2), randn(150, 40, seed=3) / 12
    check_forward(FFN_IMPLS[impl], impl, _ffn, x, gate, up, down, terms=max(down.shape))
    check_forward(FFN_IMPLS[impl], impl, _ffn, x, gate, strided(up), down, terms=max(down.shape))


@counted
def test_the_fused_ffn_moves_fewer_bytes():
    """One tile of rows: fused it writes and reads M·F values once; unfused gate and up are each written and read
    again, and x is read twice: 4MF + MK ⌈F/BN⌉ values more."""
    M, K, Fw, n = 100, 100, 384, 4
    x, gate, up, down = randn(M, K), randn(K, Fw, seed=1), randn(K, Fw, seed=2), randn(Fw, K, seed=3)
    with traffic.counting() as fused:
        got = matmul.ffn_triton(x, gate, up, down)
    with traffic.counting() as unfused:
        want = matmul_triton(swiglu_triton(matmul_triton(x, gate), matmul_triton(x, up)), down)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert fused.bytes == n * (3 * M * K + 2 * K * Fw + M * Fw + M * Fw + Fw * K + M * K)  # x by 3 column tiles of F
    assert unfused.bytes - fused.bytes == n * (4 * M * Fw + 3 * M * K)


@pytest.mark.parametrize("impl", IMPLS)
def test_bad_input(impl):
    with pytest.raises(ValueError, match=r"a \[M, K\] meets b \[K, N\], got \[2, 3\] and \[4, 5\]"):
        IMPLS[impl](torch.ones(2, 3), torch.ones(4, 5))


@needs_triton
def test_the_kernels_say_what_they_take():
    x = torch.ones(16, 16)
    with pytest.raises(TypeError, match="fp32, fp16 or bf16, all of one dtype, got .torch.float32, torch.float16"):
        matmul_triton(x, x.half(), (16, 16, 16))
    with pytest.raises(TypeError, match="torch.float64"):
        matmul.gemv_triton(x.double(), x[0].double())
    with pytest.raises(ValueError, match=r"got \[16, 16\] and \[16, 2, 1\]"):
        matmul.gemv_triton(x, x[:, :2])
    with pytest.raises(ValueError, match=r"gate and up have one shape.*\[16, 16\] and \[16, 8\]"):
        matmul.gated_triton(x, x, x[:, :8])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_run_natively(dtype):
    if NATIVE != "cuda":
        pytest.skip("torch finds no GPU, or TRITON_INTERPRET=1 is set")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    make = lambda *shape, seed: randn(*shape, seed=seed).to("cuda", dtype)
    x, w, gate, up = make(300, 520, seed=0), make(1000, 520, seed=1), make(520, 700, seed=2), make(520, 700, seed=3)
    near = lambda got, want: ((got.double() - want).norm() / want.norm()).item() <= tolerance
    wide = lambda *ts: [t.double() for t in ts]
    assert near(matmul_triton(x, w.T), F.linear(*wide(x, w)))
    assert near(matmul_triton(x, gate), torch.mm(*wide(x, gate)))
    for M in (1, 7, 8, 30, 63, 100):
        assert near(matmul.flat_gemm_triton(x[:M], w), F.linear(*wide(x[:M], w)))
    assert near(matmul.gemv_triton(w, x[0]), torch.mv(*wide(w, x[0])))
    x, gate, up, down = (t / 23 for t in (x * 23, gate, up, up.T.contiguous()))
    assert near(matmul.ffn_triton(x, gate, up, down), _ffn(*wide(x, gate, up, down)))


@pytest.mark.slow  # four gigabytes of address space, of which a few pages are touched
def test_rows_that_lie_far_apart():
    """A row's number times its stride passes 2³¹: offsets are of 64 bits."""
    far = torch.zeros(2**31 + 64, dtype=torch.float16).as_strided((3, 4), (2**30, 1))
    far.copy_(torch.arange(12.0).view(3, 4))
    eye = torch.eye(3, dtype=torch.float16)
    assert torch.equal(matmul_triton(eye, far), far)
    assert torch.equal(matmul_triton(far.T, eye), far.T)
