"""Every kernel on this machine's GPU: is it right, how near to the card's own ceilings, and how it stands to PyTorch.

    make bench-gpu                            all kernels in fp16, bf16 and fp32
    python tests/benchmarks/gpu.py --tiny     the same cases, small, in the interpreter: whether they are right

A case is a kernel, PyTorch's own answer to the same question (SDPA, cuBLAS, torch.compile of the formula), and the
operations and bytes that the question needs. `right` compares with the formula in double precision: the kernel's error
is at most twice PyTorch's in the same format, plus one rounding. `roof` is the share of the time that the measured copy
bandwidth or matmul rate would allow, whichever is more; `ratio` is PyTorch's time over ours. Times are medians of runs
between CUDA events, after a warm-up, with the second-level cache flushed. Writes results/bench_gpu.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from llmstack.ops import _triton
from llmstack.ops.dequant_matmul import int_linear_triton, nf4_linear_triton
from llmstack.ops.flash import flash_triton, flash_varlen_triton
from llmstack.ops.flash_decoding import flash_decoding_triton
from llmstack.ops.fused import add_norm_triton, bias_gelu_triton, linear_cross_entropy_triton
from llmstack.ops.glu import swiglu_triton
from llmstack.ops.layernorm import layernorm_triton
from llmstack.ops.matmul import ffn_triton, flat_gemm_triton, gemv_triton, matmul_triton
from llmstack.ops.nf4 import nf4_pack_torch, nf4_weight_torch
from llmstack.ops.paged_attention import paged_attention_triton
from llmstack.ops.quantise import dequantise_torch, pack_torch, quantise_torch
from llmstack.ops.rmsnorm import rmsnorm_triton
from llmstack.ops.softmax import softmax_triton

RESULTS = Path("results")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TABLE = ("kernel", "dtype", "right", "ms", "roof", "ratio")


@dataclass
class Case:
    """ours(*inputs) is what theirs(*inputs) is; operations and bytes as the formula counts them."""

    name: str
    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    flops: float = 0.0
    bytes: float = 0.0


def cases(device: str, dtype: torch.dtype, tiny: bool) -> list[Case]:
    """All kernels on Llama-like shapes: a row of 4,096, 32 heads of 128 over 8 shared ones, 4,096 tokens."""
    rng = torch.Generator(device).manual_seed(0)
    b = torch.finfo(dtype).bits // 8
    T, D, F_, V, H, K, Dh, S = (33, 64, 96, 300, 4, 2, 16, 70) if tiny else (4096, 4096, 14336, 32000, 32, 8, 128, 4096)
    B = 2 if tiny else 16
    rand = lambda *shape, by=1.0: torch.randn(*shape, generator=rng, device=device).mul_(by).to(dtype)
    x, r, g, up, gate = rand(T, D), rand(T, D), rand(D), rand(T, F_), rand(T, F_)
    w, w_up, w_gate, w_down = (rand(*s, by=D**-0.5) for s in ((F_, D), (D, F_), (D, F_), (F_, D)))
    rows, matmul, words = b * T * D, 2 * T * D * F_, torch.randint(V, (T,), generator=rng, device=device)
    table = rand(V, D, by=D**-0.5)
    q, k, v = rand(1, H, S, Dh), rand(1, K, S, Dh), rand(1, K, S, Dh)
    pairs, cache = H * S * S * Dh, 2 * B * K * S * Dh * b
    one, keys, values = rand(B, H, Dh), rand(B, K, S, Dh), rand(B, K, S, Dh)
    cu = torch.tensor([0, S // 4, S // 2, S], device=device, dtype=torch.int32)
    seen = sum(int(n) ** 2 for n in cu.diff())
    lines = [y.transpose(0, 1).contiguous() for y in (q[0], k[0], v[0])]  # [N, H, Dh]
    page = 16 if not tiny else 5
    pages = -(-S // page)
    tables = torch.arange(B * pages, device=device, dtype=torch.int32).view(B, pages)
    paged = [F.pad(y, (0, 0, 0, pages * page - S)).unflatten(2, (pages, page)) for y in (keys, values)]
    paged = [y.permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous() for y in paged]  # [pages, page, K, Dh]
    lengths = torch.full((B,), S, device=device, dtype=torch.int32)
    sdpa = lambda q, k, v, **how: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
    step = lambda q, k, v: sdpa(q[:, :, None], k, v)[:, :, 0]
    levels, scale, zero = quantise_torch(w.float(), 4, 32)
    codes = pack_torch(levels, 4)
    nf_codes, absmax = nf4_pack_torch(w.float())
    int_w = dequantise_torch(levels, scale, zero).to(dtype)
    nf_w = nf4_weight_torch(nf_codes, absmax, tuple(w.shape)).to(dtype)
    few = x[:8].contiguous()
    return [
        Case("softmax", softmax_triton, lambda x: x.softmax(-1), (x,), 0, 2 * rows),
        Case("rmsnorm", rmsnorm_triton, lambda x, g: F.rms_norm(x, g.shape, g, 1e-6), (x, g), 0, 2 * rows),
        Case("layernorm", layernorm_triton, lambda x, g, r: F.layer_norm(x, g.shape, g, r), (x, g, g), 0, 2 * rows),
        Case("add + rmsnorm", lambda *a: add_norm_triton(*a)[1], compiled(add_norm), (x, r, g), 0, 4 * rows),
        Case("bias + gelu", bias_gelu_triton, compiled(lambda x, b: F.gelu(x + b)), (x, g), 0, 2 * rows),
        Case("swiglu", swiglu_triton, compiled(lambda g, u: F.silu(g) * u), (gate, up), 0, 3 * b * T * F_),
        Case("matmul", matmul_triton, torch.matmul, (x, w_up), matmul, rows + b * (D * F_ + T * F_)),
        Case("swiglu ffn", ffn_triton, ffn, (x, w_gate, w_up, w_down), 3 * matmul, 3 * b * D * F_ + 2 * rows),
        Case("gemv", gemv_triton, torch.mv, (w, x[0].contiguous()), 2 * D * F_, b * D * F_),
        Case("flat gemm, 8 rows", flat_gemm_triton, F.linear, (few, w), 16 * D * F_, b * D * F_),
        Case(
            "int4 linear, 8 rows", lambda x, _: int_linear_triton(x, codes, scale, zero), F.linear, (few, int_w),
            16 * D * F_, codes.numel() + 8 * scale.numel(),
        ),
        Case(
            "nf4 linear, 8 rows", lambda x, _: nf4_linear_triton(x, nf_codes, absmax, tuple(w.shape)), F.linear,
            (few, nf_w), 16 * D * F_, nf_codes.numel() + 4 * absmax.numel(),
        ),
        Case(
            "linear + cross-entropy", linear_cross_entropy_triton, entropy,
            (x, table, words), 2 * T * D * V, rows + b * V * D,
        ),
        Case("flash", flash_triton, sdpa, (q, k, v), 4 * pairs, b * 2 * S * Dh * (H + K)),
        Case(
            "flash, causal", lambda *a: flash_triton(*a, causal=True), lambda *a: sdpa(*a, is_causal=True), (q, k, v),
            2 * pairs, b * 2 * S * Dh * (H + K),
        ),
        Case(
            "flash, forward + backward", lambda *a: gradient(flash_triton, *a), lambda *a: gradient(sdpa, *a),
            (q, k, v), 14 * pairs, b * 6 * S * Dh * (H + K),
        ),
        Case(
            "flash, packed", lambda q, k, v: flash_varlen_triton(q, k, v, cu), lambda *a: one_by_one(sdpa, cu, *a),
            tuple(lines), 4 * H * Dh * seen, b * 2 * S * Dh * (H + K),
        ),
        Case("flash decoding", lambda *a: flash_decoding_triton(*a, splits=8), step, (one, keys, values), 0, cache),
        Case(
            "paged attention", lambda q, *_: paged_attention_triton(q, *paged, tables, lengths, splits=8), step,
            (one, keys, values), 0, cache,
        ),
    ]  # fmt: skip


def add_norm(x, r, g):
    return F.rms_norm(x + r, g.shape, g, 1e-6)


def ffn(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


def entropy(x, w, targets):
    logits = x @ w.T
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def compiled(fn):
    """torch.compile where there is a GPU to compile for."""
    return torch.compile(fn) if torch.cuda.is_available() else fn


def gradient(attention, *inputs: Tensor) -> Tensor:
    leaves = [y.detach().requires_grad_() for y in inputs]
    with torch.enable_grad():
        out = attention(*leaves)
        return torch.cat([y.flatten() for y in torch.autograd.grad(out, leaves, torch.ones_like(out))])


def one_by_one(attention, cu: Tensor, q, k, v) -> Tensor:
    ends = cu.tolist()
    heads = lambda y, a, b: y[a:b].transpose(0, 1)[None]
    parts = [attention(*(heads(y, a, b) for y in (q, k, v)))[0].transpose(0, 1) for a, b in zip(ends, ends[1:])]
    return torch.cat(parts)


def is_right(case: Case) -> bool:
    """At most twice PyTorch's error to double precision, and one rounding of the largest value."""
    double = lambda y: y.double() if y.is_floating_point() else y
    exact = case.theirs.__wrapped__ if hasattr(case.theirs, "__wrapped__") else case.theirs
    exact = exact(*(double(y) for y in case.inputs))
    ours, theirs = ((f(*case.inputs).double() - exact).abs().max() for f in (case.ours, case.theirs))
    rounding = torch.finfo(case.inputs[0].dtype).eps * exact.abs().max()
    return bool(ours <= 2 * theirs + rounding)  # NaN is not right


def seconds(run: Callable[[], object], flush: Tensor, repeats: int = 20) -> float:
    """The median between two events, each run with the second-level cache overwritten before it."""
    times = []
    for i in range(repeats + 3):
        flush.zero_()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(began.elapsed_time(ended) / 1000)
    return statistics.median(times)


def ceilings(flush: Tensor) -> tuple[float, dict[str, float]]:
    """Bytes a second of a copy of 512 MB, and operations a second of an 8,192³ matmul in each format."""
    a, b = (torch.empty(128 * 2**20, device="cuda") for _ in range(2))
    bandwidth = 2 * a.nbytes / seconds(lambda: a.copy_(b), flush)
    rates = {}
    for name, dtype in DTYPES.items():
        n = 8192 if dtype != torch.float32 else 4096
        x, y = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        rates[name] = 2 * n**3 / seconds(lambda: x @ y, flush)
    return bandwidth, rates


def measure() -> tuple[list[dict], dict]:
    flush = torch.empty(64 * 2**20, device="cuda")
    bandwidth, rates = ceilings(flush)
    rows = []
    for name, dtype in DTYPES.items():
        for case in cases("cuda", dtype, tiny=False):
            try:
                right = is_right(case)
                ours, theirs = (seconds(lambda: f(*case.inputs), flush) for f in (case.ours, case.theirs))
            except Exception as error:  # one kernel that does not launch must not hide the others
                told = f"{type(error).__name__}: {error}"[:300]
                rows.append(dict(kernel=case.name, dtype=name, right=False, error=told))
                continue
            least = max(case.flops / rates[name], case.bytes / bandwidth)
            rows.append(
                dict(kernel=case.name, dtype=name, right=right, ms=1000 * ours, roof=least / ours, ratio=theirs / ours)
            )
            print(line(rows[-1]), flush=True)
    machine = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, copy_bytes_s=bandwidth)
    return rows, machine | dict(matmul_flops_s=rates)


def line(row: dict) -> str:
    cells = (row.get(key, row.get("error", "")) for key in TABLE)
    return "| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells) + " |"


def check_tiny() -> int:
    """The cases, small, where they run without a GPU: in the interpreter, fp32 and fp16. How many are wrong."""
    wrong = 0
    for name in ("fp32", "fp16"):
        for case in cases("cpu", DTYPES[name], tiny=True):
            right = is_right(case)
            wrong += not right
            print(f"{name} {case.name}: {'right' if right else 'WRONG'}", flush=True)
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="only whether small cases are right, in the interpreter")
    args = parser.parse_args(argv)
    if not _triton.HAVE_TRITON:
        print("Triton is not installed, so there is no kernel to run: install it on Linux (pip install triton)")
        return 1
    with torch.no_grad():
        if args.tiny:
            return min(check_tiny(), 1)
        if not torch.cuda.is_available():
            print("no GPU here: this benchmark times kernels on one; --tiny checks them in the interpreter")
            return 1
        rows, machine = measure()
    RESULTS.mkdir(exist_ok=True)
    head = [f"{machine['gpu']}, torch {machine['torch']}", "", line(dict(zip(TABLE, TABLE))), "|---" * len(TABLE) + "|"]
    (RESULTS / "bench_gpu.md").write_text("\n".join([*head, *map(line, rows)]) + "\n", encoding="utf-8")
    (RESULTS / "bench_gpu.json").write_text(json.dumps(dict(machine=machine, rows=rows), indent=1), encoding="utf-8")
    return min(sum(not row["right"] for row in rows), 1)


if __name__ == "__main__":
    sys.exit(main())
