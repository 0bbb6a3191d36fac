"""The simulated pipeline against its closed form and a recurrence; what padding, buffers and choice cost, modelled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack.facts import accelerator
from llmstack.hardware.buffers import PROFILED, modelled, pipeline, pipeline_seconds, thin_seconds
from llmstack.ops.matmul import KINDS, choose

GPUS = ["a100-sxm-80gb", "h100-sxm5", "h20", "mi300x"]


@pytest.mark.parametrize("load, compute", [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (0.0, 1.0)])
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_equal_tiles_take_the_closed_form(n, buffers, load, compute):
    assert pipeline([load] * n, [compute] * n, buffers).seconds == pipeline_seconds(n, load, compute, buffers)


def test_first_load_and_n_times_the_slower():
    """As the survey has it; where loading is the slower it counts one load for the last, shorter multiplication."""
    assert pipeline_seconds(10, 1.0, 3.0) == 1 + 10 * 3
    assert pipeline_seconds(10, 3.0, 1.0) == 3 + 10 * 3 - (3 - 1)
    assert pipeline_seconds(10, 3.0, 3.0, 1) == 60 and pipeline_seconds(10, 3.0, 3.0, 2) == 33


def test_who_waits_when():
    run = pipeline([2, 2, 2], [1, 1, 1])
    assert run.load_start == (0, 2, 4) and run.compute_start == (2, 4, 6) and run.stalled == pytest.approx(4 / 7)
    run = pipeline([1, 1, 1, 1], [3, 3, 3, 3])
    assert run.load_start == (0, 1, 4, 7) and run.compute_start == (1, 4, 7, 10)
    assert pipeline([], []).seconds == pipeline([], []).stalled == 0


times = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20)


@given(times, st.integers(1, 4))
def test_any_tiles_follow_the_recurrence(tiles, buffers):
    """A load waits for the one before and for its buffer; a multiplication for its load and the one before."""
    loaded, done = [0], [0] * buffers
    for load, compute in tiles:
        loaded.append(max(loaded[-1], done[-buffers]) + load)
        done.append(max(loaded[-1], done[-1]) + compute)
    run = pipeline(*zip(*tiles), buffers)
    assert run.seconds == done[-1]
    assert run.compute_start == tuple(end - c for end, (_, c) in zip(done[buffers:], tiles))


@given(times)
def test_more_buffers_are_never_slower_and_only_help_tiles_that_differ(tiles):
    loads, computes = zip(*tiles)
    seconds = [pipeline(loads, computes, b).seconds for b in (1, 2, 3, 99)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] >= max(sum(loads) + computes[-1], loads[0] + sum(computes))


def test_a_third_buffer_takes_up_what_varies():
    loads, computes = [1, 1, 1, 1, 9, 1], [5, 5, 5, 5, 1, 1]
    assert pipeline(loads, computes, 3).seconds < pipeline(loads, computes, 2).seconds


def test_bad_input():
    with pytest.raises(ValueError, match="one load a multiplication, and a buffer: got 2, 1 and 2"):
        pipeline([1, 1], [1])
    with pytest.raises(ValueError, match="got 1, 1 and 0"):
        pipeline([1], [1], 0)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="times are 0 or more"):
            pipeline([1, wrong], [1, 1])


@pytest.mark.parametrize("device", GPUS)
def test_gemv_takes_the_time_of_its_weights(device):
    """One token of a 4096 × 4096 layer on any of them: within 0.1 % of weight bytes / bandwidth, two for two rows."""
    chip, N = accelerator(device), 4096
    weights = 2 * N * N / chip.bandwidth
    assert thin_seconds("gemv", 1, N, N, device) == pytest.approx(weights, rel=1e-3)
    assert thin_seconds("gemv", 2, N, N, device) == pytest.approx(2 * weights, rel=1e-3)
    assert thin_seconds("flat", 8, N, N, device) == pytest.approx(weights, rel=5e-3)
    assert thin_seconds("gemm", 8192, N, N, device) == pytest.approx(2 * 8192 * N * N / chip.peak())


def test_thin_seconds_by_hand():
    """Bytes of x, w and the product, whole tiles of rows; together with one buffer, the slower of both with two."""
    chip, (M, N, K) = accelerator("a100-sxm-80gb"), (65, 128, 256)
    once = {"gemv": (65, 65), "flat": (2, 128), "gemm": (1, 128)}  # readings of w, rows multiplied
    for kind, (passes, rows) in once.items():
        load = 2 * (passes * N * K + M * K + M * N) / chip.bandwidth
        compute = 2 * rows * N * K / chip.peak()
        assert thin_seconds(kind, M, N, K, buffers=1) == pytest.approx(load + compute, rel=1e-12, abs=0), kind
        assert thin_seconds(kind, M, N, K) == pytest.approx(max(load, compute), rel=1e-12, abs=0), kind
    assert thin_seconds("gemv", M, N, K, value_bytes=4) == pytest.approx(
        2 * thin_seconds("gemv", M, N, K), rel=1e-12, abs=0
    )


def test_what_is_profiled():
    """Powers of two, the middle between two, and one row more than a tile of 64 has."""
    rows = {2**e for e in range(10)} | {3 * 2**e for e in range(7)} | {65}
    assert tuple(sorted(rows)) == PROFILED


def test_what_padding_to_64_costs():
    """8 rows as 64: 64 operations a byte, below the ridge of an A100 and above that of an H20. With two buffers the
    A100 hides it all behind the loads; with one nobody does."""
    slower = lambda device, buffers: (
        thin_seconds("flat", 8, 4096, 4096, device, buffers, 64) / thin_seconds("flat", 8, 4096, 4096, device, buffers)
    )
    assert accelerator("a100-sxm-80gb").ridge() > 64 > accelerator("h20").ridge()
    assert slower("a100-sxm-80gb", 2) == 1 and slower("a100-sxm-80gb", 1) == pytest.approx(1.35, abs=0.01)
    assert slower("h20", 2) == pytest.approx(1.72, abs=0.01)


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("N, K", [(4096, 4096), (11008, 4096)])
def test_the_modelled_choice_is_the_fastest_at_every_m(N, K, device, buffers):
    table = {(N, K): modelled(N, K, device, buffers)}
    assert table[N, K][0] == 2
    for M in PROFILED:
        seconds = {kind: thin_seconds(kind, M, N, K, device, buffers) for kind in KINDS}
        assert seconds[choose(M, N, K, table)] == pytest.approx(min(seconds.values()))
