"""The matrix unit against NumPy and the closed form; tiles that fit what accelerators have on chip."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack.facts import accelerator
from llmstack.hardware.claims import ffn_exceeds_on_chip
from llmstack.hardware.matrix_unit import MatrixUnit, planned, tile_bytes
from llmstack.ops.matmul import matmul_bytes

side = st.integers(1, 40)
shape = st.tuples(side, side, side)


@given(shape, st.builds(MatrixUnit, side, side, side, st.integers(1, 5)))
def test_any_shape_is_numpys_product_in_whole_tiles(sizes, unit):
    M, N, K = sizes
    a, b = np.arange(M * K).reshape(M, K) % 13 - 6, np.arange(K * N).reshape(K, N) % 7 - 3
    run = unit.run(a, b)
    assert (run.c == a @ b).all()
    tiles = np.ceil(M / unit.m) * np.ceil(N / unit.n) * np.ceil(K / unit.k)
    assert run.cycles == unit.cycles(M, N, K) == tiles * unit.tile_cycles
    assert run.utilisation == pytest.approx(M * N * K / (tiles * unit.m * unit.n * unit.k))
    assert run.utilisation == pytest.approx(unit.utilisation(M, N, K)) and 0 < run.utilisation <= 1


def test_whole_tiles_use_all_of_it_and_one_more_row_does_not():
    unit = MatrixUnit(16, 16, 16)
    assert unit.peak == 4096 and unit.cycles(64, 64, 64) == 64 and unit.utilisation(64, 64, 64) == 1
    assert unit.cycles(65, 64, 64) == 80 and unit.utilisation(65, 64, 64) == pytest.approx(65 / 80)
    assert unit.utilisation(1, 4096, 4096) == 1 / 16  # a token
    slow = MatrixUnit(16, 16, 16, tile_cycles=4)
    assert slow.peak == 1024 and slow.cycles(64, 64, 64) == 256 and slow.utilisation(64, 64, 64) == 1


def test_fractions_and_nothing():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 63)), rng.standard_normal((63, 100))
    np.testing.assert_allclose(MatrixUnit().run(a, b).c, a @ b, atol=1e-12)
    empty = MatrixUnit().run(np.ones((0, 3)), np.ones((3, 5)))
    assert empty.c.shape == (0, 5) and empty.cycles == 0 and empty.utilisation == 0
    assert MatrixUnit().utilisation(3, 5, 0) == MatrixUnit().utilisation(0, 5, 3) == 0
    assert MatrixUnit() == MatrixUnit(16, 16, 16, 1)


@pytest.mark.parametrize("sizes", [(4096, 16384, 4096), (100, 63, 1000), (1, 4096, 4096)])
@pytest.mark.parametrize("capacity", [64 * 2**10, 192 * 2**10, 40 * 2**20])
def test_the_planned_tile_fits_and_no_other_moves_less(sizes, capacity):
    tile = planned(*sizes, capacity)
    assert tile_bytes(tile) <= capacity
    moved = sum(matmul_bytes(*sizes, tile))
    for BM in (16, 64, 128, 256, 1024, 4096):
        for BN in (16, 64, 128, 256, 1024, 4096):
            assert tile_bytes((BM, BN, 16)) > capacity or sum(matmul_bytes(*sizes, (BM, BN, 16))) >= moved


def test_more_memory_moves_fewer_bytes():
    moved = [sum(matmul_bytes(4096, 16384, 4096, planned(4096, 16384, 4096, 2**e))) for e in range(14, 32)]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 2 * (4096 * 4096 + 2 * 4096 * 16384)  # everything once


def test_tile_bytes_by_hand():
    assert tile_bytes((128, 256, 64)) == 2 * 2 * (128 * 64 + 64 * 256) + 4 * 128 * 256
    assert tile_bytes((16, 16, 16), 4, 1) == 3 * 4 * 16 * 16


def test_ac_26_a_matrix_of_an_ffn_is_larger_than_what_is_on_most_chips():
    found = ffn_exceeds_on_chip()
    assert found.value == 2 * 4096 * 16384 * 2 and found.unit == "bytes"
    assert accelerator("h100-sxm5").on_chip_bytes < found.value / 2 < accelerator("wse-3").on_chip_bytes
    assert found.text.endswith("128 × 256 × 32")  # 48 KiB of strips, twice 24, and 128 KiB of sums


def test_bad_input():
    with pytest.raises(ValueError, match="sides of a tile and its cycles are 1 or more"):
        MatrixUnit(m=0)
    with pytest.raises(ValueError, match=r"a \[M, K\] meets b \[K, N\], got \[2, 3\] and \[2, 3\]"):
        MatrixUnit().run(np.ones((2, 3)), np.ones((2, 3)))
    with pytest.raises(ValueError, match="at least 3072 bytes with 2 buffers, got 1000"):
        planned(64, 64, 64, 1000)
