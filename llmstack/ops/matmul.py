"""Matrix product in tiles, and its thin relatives: vector times matrix, few rows times matrix, a gated FFN.

    C = A B        A [M, K]    B [K, N]    C [M, N]        2MNK operations, forward;    dA = dC Bᵀ    dB = Aᵀ dC

A program makes one tile of C, BM × BN, out of strips of A and B that it takes BK at a time and adds up in fp32. So
every column of tiles reads A again, and every row of tiles reads B again. With values of n bytes:

    read      n (MK ⌈N/BN⌉ + KN ⌈M/BM⌉)        written   nMN        intensity  ≈ 2 / n / (1/BM + 1/BN)

Naive, 1 × 1 tiles, that is 2nMNK. Programs that run at the same time share what they read in the L2 cache, so they are
ordered in groups: GROUP tiles down, then one to the right (`grouped_np`; `wave_strips` counts what one wave needs).

    gemv    y = w x          w [N, K], x [K]: nNK read once, one pass; 2NK operations, intensity 2/n: bandwidth-bound
    flat    Y = X wᵀ         X [M, K], M small: the same kernel as Yᵀ = w Xᵀ, so that M is the *narrow* side of a tile
    FFN     (silu(X G) ⊙ X U) D: gate and up in one kernel, X read once for both, silu · in the epilogue

Padding (Hong et al. 2023, FlashDecoding++, arXiv:2311.01282, sections 4 and 5). Tensor cores multiply 16 × 8 × 16
(mma.sync) or 64 × 8 × 16 and wider (wgmma): the first side has at least 16 or 64 rows, the second may have 8. `tl.dot`
accepts less and fills up to that: an 8 × 64 tile of Y takes twice the mma.sync of a 64 × 8 tile of Yᵀ, and no wgmma.
Tiles are powers of two: M ≤ 8 becomes 8, 9 … 16 becomes 16, up to 64, then in passes of 64; 1 − M / padded is waste.
num_stages > 1 loads the next strips while these are multiplied (cp.async; hardware/buffers.py has the time).
`choose` is the paper's heuristic: for each (N, K) two numbers M1, M2; gemv below M1, flat below M2, the tiled product
from M2 on. They come from a profile (`inflections`), measured or modelled (hardware/buffers.py).
"""

import numpy as np
import torch

from llmstack.ops._triton import INTERPRETED, Build, available, operands, tl, triton
from llmstack.ops.glu import swiglu_np, swiglu_torch

GROUP = 8
KINDS = ("gemv", "flat", "gemm")
SIDE = {2: 128, 4: 64}  # of a tile on a GPU, by bytes of a value: three stages 32 deep fit 64 KiB of shared memory
ONE_PASS = (2, 65)  # M1, M2 where each kernel reads w once: gemv for a row, flat for 64


def matmul_np(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    _check(a, b)
    return a @ b  # [M, N]


def matmul_np_backward(dc: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return dc @ b.T, a.T @ dc


def tiled_np(a: np.ndarray, b: np.ndarray, tile: tuple[int, int, int] = (64, 64, 64)) -> tuple[np.ndarray, int, int]:
    """The kernel's twin: C in a's dtype, bytes read, bytes written. tile is (BM, BN, BK)."""
    _check(a, b)
    (M, K), N, (BM, BN, BK) = a.shape, b.shape[1], tile
    c, read = np.full((M, N), np.nan, a.dtype), 0
    for m, n in grouped_np(-(-M // BM), -(-N // BN)):
        rows, cols = slice(m * BM, (m + 1) * BM), slice(n * BN, (n + 1) * BN)
        acc = np.zeros(c[rows, cols].shape, np.promote_types(a.dtype, np.float32))
        for k in range(0, K, BK):
            left, right = a[rows, k : k + BK], b[k : k + BK, cols]
            read += left.nbytes + right.nbytes
            acc += left.astype(acc.dtype) @ right
        c[rows, cols] = acc
    return c, read, c.nbytes


def grouped_np(tiles_m: int, tiles_n: int, group: int = GROUP) -> list[tuple[int, int]]:
    """Tiles (m, n) in the order of the programs; group = 1 is row by row."""
    bands = [range(first, min(first + group, tiles_m)) for first in range(0, tiles_m, group)]
    return [(m, n) for band in bands for n in range(tiles_n) for m in band]


def wave_strips(tiles_m: int, tiles_n: int, group: int, wave: int) -> int:
    """Strips of A and B that the first `wave` programs need between them."""
    return sum(len(set(sides)) for sides in zip(*grouped_np(tiles_m, tiles_n, group)[:wave]))


def matmul_bytes(M: int, N: int, K: int, tile: tuple[int, ...], value_bytes: int = 2) -> tuple[int, int]:
    """Bytes read and written, by the formula above."""
    return value_bytes * (M * K * -(-N // tile[1]) + K * N * -(-M // tile[0])), value_bytes * M * N


def ffn_np(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return swiglu_np(x @ gate, x @ up) @ down


def matmul_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    return a @ b


def ffn_torch(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return swiglu_torch(x @ gate, x @ up) @ down


gemv_np, gemv_torch = np.matmul, torch.mv  # (w [N, K], x [K]) -> y [N]


@triton.jit
def _grouped(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    first = pid // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    within = pid % (GROUP * tiles_n)
    return first + within % rows, within // rows


@triton.jit
def _matmul_kernel(
    a_ptr, b_ptr, up_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One tile of C. GATED: B is the gate's weight, up has its shape and strides, and C is silu(A B) · A up."""
    m, n = _grouped(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    row = (m * BM + tl.arange(0, BM)).to(tl.int64)[:, None]  # [BM, 1]
    col = (n * BN + tl.arange(0, BN)).to(tl.int64)[None, :]  # [1, BN]
    acc = tl.zeros([BM, BN], tl.float32)
    ups = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = (start + tl.arange(0, BK)).to(tl.int64)  # [BK]
        a = tl.load(a_ptr + row * stride_am + k[None, :] * stride_ak, mask=(row < M) & (k[None, :] < K), other=0.0)
        inside = (k[:, None] < K) & (col < N)
        b = tl.load(b_ptr + k[:, None] * stride_bk + col * stride_bn, mask=inside, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if GATED:
            up = tl.load(up_ptr + k[:, None] * stride_bk + col * stride_bn, mask=inside, other=0.0)
            ups = tl.dot(a, up, ups, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * ups
    tl.store(c_ptr + row * stride_cm + col * stride_cn, acc, mask=(row < M) & (col < N))


@triton.jit
def _gemv_kernel(w_ptr, x_ptr, y_ptr, N, K, stride_w, ROWS: tl.constexpr, COLS: tl.constexpr):
    """ROWS values of y. Reads w once, nNK bytes, and x ⌈N / ROWS⌉ times, from the cache after the first."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, K, COLS):
        col = start + tl.arange(0, COLS)  # [COLS]
        x = tl.load(x_ptr + col, mask=col < K, other=0.0).to(tl.float32)
        inside = (row[:, None] < N) & (col[None, :] < K)
        w = tl.load(w_ptr + row[:, None] * stride_w + col[None, :], mask=inside, other=0.0)
        acc += w.to(tl.float32) * x[None, :]
    tl.store(y_ptr + row, tl.sum(acc, axis=1), mask=row < N)


def matmul_triton(a: torch.Tensor, b: torch.Tensor, tile: tuple[int, int, int] = ()) -> torch.Tensor:
    """Any strides (pass w.T for a weight [out, in]); fp32, fp16 or bf16. tile: powers of two, 16 or more."""
    side = 128 if INTERPRETED else SIDE.get(a.element_size(), 64)
    return _launch(a, b, None, tile or (side, side, 128 if INTERPRETED else 32))


def matmul_triton_backward(dc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return matmul_triton(dc, b.T), matmul_triton(a.T, dc)


def gated_triton(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x gate) ⊙ x up [M, F], x [M, K], gate and up [K, F], in one kernel: nMF written, x read once for both."""
    if gate.shape != up.shape:
        raise ValueError(f"gate and up have one shape [K, F], got {list(gate.shape)} and {list(up.shape)}")
    return _launch(x, gate, up, (128, 128, 128) if INTERPRETED else (SIDE.get(x.element_size(), 64), 64, 32))


def ffn_triton(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return matmul_triton(gated_triton(x, gate, up), down)  # [M, D]


def flat_gemm_triton(x: torch.Tensor, w: torch.Tensor, pad: int = 8) -> torch.Tensor:
    """x [M, K] wᵀ, w [N, K], M filled to pad (a power of two) or the next power of two, at most 64 a pass."""
    BN = padded(len(x), pad) if len(x) <= 64 else 64
    tile = (128, BN, 128) if INTERPRETED else (64, BN, 128 if x.element_size() == 2 else 32)
    return _launch(w, x.T, None, tile, flip=True).T


def gemv_triton(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """w [N, K] x [K]; rows of w may be apart, values in a row are neighbours (else w is copied)."""
    _check(w, x[..., None])
    w, x = operands(w if w.stride(1) == 1 else w.contiguous(), x.contiguous())
    y = torch.empty(len(w), dtype=x.dtype, device=x.device)
    ROWS, COLS = (256, 1024) if INTERPRETED else (16, 256)
    if y.numel():
        _gemv_kernel[(triton.cdiv(len(w), ROWS),)](w, x, y, *w.shape, w.stride(0), ROWS, COLS)
    return y


def linear_triton(x: torch.Tensor, w: torch.Tensor, table: dict | None = None) -> torch.Tensor:
    """x [M, K] wᵀ, w [N, K], by the kernel that `choose` names."""
    kind = choose(len(x), *w.shape, table)
    if kind == "gemv" and len(x):
        return torch.stack([gemv_triton(w, row) for row in x])
    return flat_gemm_triton(x, w) if kind == "flat" else matmul_triton(x, w.T)


def padded(M: int, to: int = 8) -> int:
    """Rows that a tile computes for M: a power of two, at least `to`, up to 64; then whole 64s."""
    return max(to, 1 << (M - 1).bit_length()) if M <= 64 else -(-M // 64) * 64


def inflections(profile: dict[str, dict[int, float]]) -> tuple[int, int]:
    """M1, M2 with the least total time over a profile {kind: {M: seconds}}; the simpler kernel wins a tie.

    Where the curves cross once, as they do when measured without noise, every M gets its fastest kernel.
    """
    if set(profile) != set(KINDS) or len({tuple(sorted(p)) for p in profile.values()}) != 1:
        raise ValueError(f"a profile has seconds for {', '.join(KINDS)} at the same M each; got {list(profile)}")
    Ms = sorted(profile["gemv"])
    cuts = [*Ms, Ms[-1] + 1]
    total = lambda m1, m2: sum(profile[_kind(M, m1, m2)][M] for M in Ms)
    return min(((i, j) for i in cuts for j in cuts if i <= j), key=lambda c: (total(*c), -c[0], -c[1]))


def choose(M: int, N: int, K: int, table: dict[tuple[int, int], tuple[int, int]] | None = None) -> str:
    """gemv, flat or gemm for x [M, K] wᵀ, w [N, K]: looked up in {(N, K): (M1, M2)}, else as bytes of w alone say."""
    return _kind(M, *(table or {}).get((N, K), ONE_PASS))


def _kind(M: int, m1: int, m2: int) -> str:
    return KINDS[(M >= m1) + (M >= m2)]


def _launch(a, b, up, tile: tuple[int, int, int], flip: bool = False) -> torch.Tensor:
    """C, as it is or (flip) the transpose of a contiguous matrix."""
    _check(a, b)
    dtype, (M, K), N = a.dtype, a.shape, b.shape[1]
    if up is not None and up.stride() != b.stride():
        b, up = b.contiguous(), up.contiguous()
    gated = up is not None
    a, b, up = operands(a, b, up if gated else b)
    c = a.new_empty(N, M).T if flip else a.new_empty(M, N)
    if c.numel():
        grid = (triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1]),)
        strides = (*a.stride(), *b.stride(), *c.stride())
        warps = 8 if tile[2] <= 32 else 4  # thin tiles are deep
        _matmul_kernel[grid](a, b, up, c, M, N, K, *strides, *tile, GROUP, gated, num_warps=warps, num_stages=3)
    return c.to(dtype)


def _check(a, b):
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a [M, K] meets b [K, N], got {list(a.shape)} and {list(b.shape)}: transpose or flatten one")


IMPLS = available({"numpy": matmul_np, "torch": matmul_torch, "triton": matmul_triton})
GEMV_IMPLS = available({"numpy": gemv_np, "torch": gemv_torch, "triton": gemv_triton})
FFN_IMPLS = available({"numpy": ffn_np, "torch": ffn_torch, "triton": ffn_triton})
BACKWARDS = available({"numpy": matmul_np_backward, "triton": matmul_triton_backward})
ROWS_AND_COLUMNS = {"stride_ak": 1, "stride_bn": 1, "stride_cn": 1, "GROUP": GROUP}  # a, b and c contiguous
WEIGHT_FIRST = {"stride_ak": 1, "stride_bk": 1, "stride_cm": 1, "GROUP": GROUP, "GATED": False}  # w [N, K], x.T, y.T
_types = lambda dtype: f"{dtype} " * 4 + "i32 i32 i32 i32 i32 i32"
AOT = [
    Build(_matmul_kernel, _types("*bf16"), ROWS_AND_COLUMNS | dict(BM=128, BN=128, BK=32, GATED=False), num_warps=8),
    Build(_matmul_kernel, _types("*bf16"), ROWS_AND_COLUMNS | dict(BM=128, BN=64, BK=32, GATED=True), num_warps=8),
    Build(_matmul_kernel, _types("*fp32"), ROWS_AND_COLUMNS | dict(BM=64, BN=64, BK=32, GATED=False), num_warps=8),
    *(Build(_matmul_kernel, _types("*fp16"), WEIGHT_FIRST | dict(BM=64, BN=n, BK=128)) for n in (8, 16, 64)),
    Build(_matmul_kernel, _types("*fp32"), WEIGHT_FIRST | dict(BM=64, BN=64, BK=32), num_warps=8),
    Build(_gemv_kernel, "*bf16 *bf16 *bf16 i32 i32 i32", {"ROWS": 16, "COLS": 256}),
]
