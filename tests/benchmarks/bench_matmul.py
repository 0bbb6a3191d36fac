"""Products of matrices beside each other: loops, tiles in NumPy, BLAS; and few rows times a weight, padded or not.

First part: GFLOP/s of C = A B in fp32 for a loop over every value, a loop over rows, blocks, and BLAS through NumPy and
torch. Blocks of NumPy are BLAS inside, so what they show is what the order of work costs; plain Python is the naive
loop. All equal BLAS.

Second part: x [M, K] wᵀ in fp32 by a matrix-vector product a row, and by one product with M filled to 8 or to 64: the
measured profile {kind: {M: seconds}} that `inflections` turns into M1 and M2 for this machine, and by what ratio the
choice beats each kernel alone.
CPU seconds, contestants take turns. Writes results/bench_matmul.json.
"""

import os

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from side_by_side import median_s, write  # noqa: E402

from llmstack.ops.matmul import choose, inflections, matmul_torch, padded, tiled_np  # noqa: E402

ROWS = [1, 2, 4, 8, 16, 32, 64, 128]
N, K = 4096, 1024


def loop(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    """Every product by itself."""
    return [[sum(row[k] * b[k][j] for k in range(len(b))) for j in range(len(b[0]))] for row in a]


def rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row k of B, scaled and added, for every k: one row of C at a time."""
    c = np.zeros((len(a), b.shape[1]), a.dtype)
    for i, row in enumerate(a):
        for k, value in enumerate(row):
            c[i] += value * b[k]
    return c


def rates(runs: int) -> dict:
    """GFLOP/s: the loop on 96³, all others on 512³."""
    results = {}
    for side, names in ((96, ("loop", "blas")), (512, ("rows", "tiles of 32", "tiles of 128", "blas", "torch"))):
        a, b = np.random.default_rng(0).standard_normal((2, side, side)).astype(np.float32)
        lists, tensors = (a.tolist(), b.tolist()), (torch.from_numpy(a), torch.from_numpy(b))
        calls = {
            "loop": lambda: loop(*lists),
            "rows": lambda: rows(a, b),
            "tiles of 32": lambda: tiled_np(a, b, (32, 32, 32))[0],
            "tiles of 128": lambda: tiled_np(a, b, (128, 128, 128))[0],
            "blas": lambda: a @ b,
            "torch": lambda: matmul_torch(*tensors),
        }
        calls = {name: calls[name] for name in names}
        for name, call in calls.items():
            assert np.allclose(call(), a @ b, rtol=1e-4, atol=1e-3), f"{name} computes something else"
        s = median_s(calls, runs)
        results[side] = {name: 2 * side**3 / t / 1e9 for name, t in s.items()}
        shown = ", ".join(f"{name} {rate:.3g}" for name, rate in results[side].items())
        print(f"{side}^3, GFLOP/s: {shown}", flush=True)
    return results


def profile(runs: int) -> dict:
    w = torch.randn(N, K)
    measured: dict[str, dict[int, float]] = {kind: {} for kind in ("gemv", "flat", "gemm")}
    for M in ROWS:
        x = torch.randn(M, K)
        filled = {to: torch.nn.functional.pad(x, (0, 0, 0, padded(M, to) - M)) for to in (8, 64)}
        calls = {
            "gemv": lambda: torch.stack([torch.mv(w, row) for row in x]),
            "flat": lambda: filled[8] @ w.T,
            "gemm": lambda: filled[64] @ w.T,
        }
        for kind, s in median_s(calls, runs).items():
            measured[kind][M] = s
        shown = ", ".join(f"{kind} {measured[kind][M] * 1e3:.2f} ms" for kind in measured)
        print(f"{M:>4} rows of {N} x {K}: {shown}", flush=True)
    cuts = inflections(measured)
    named = {M: choose(M, N, K, {(N, K): cuts}) for M in ROWS}
    print(f"M1, M2 = {cuts}: {named}")
    chosen = sum(measured[kind][M] for M, kind in named.items())
    best = sum(min(times[M] for times in measured.values()) for M in ROWS)
    over = {kind: sum(times.values()) / chosen for kind, times in measured.items()}
    shown = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in over.items())
    print(f"one kernel for every M, over what is chosen: {shown}; chosen over the best for each M: {chosen / best:.2f}")
    return {"seconds": measured, "inflections": cuts, "chosen": named, "over": over, "chosen_over_best": chosen / best}


def main(runs: int) -> None:
    torch.set_num_threads(int(THREADS))
    with torch.inference_mode():
        results = {"threads": int(THREADS), "gflops": rates(runs), "thin": profile(runs)}
    write("bench_matmul", results)
    small, large = results["gflops"][96], results["gflops"][512]
    if small["blas"] < 100 * small["loop"] or large["tiles of 128"] < large["tiles of 32"]:
        sys.exit(f"BLAS should be far above a loop, and large tiles above small ones: {results['gflops']}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
