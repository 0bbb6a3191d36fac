"""Ceilings of published and of this machine, and what lies under them."""

import pytest
import torch

from llmstack import facts, preset
from llmstack.architectures import build
from llmstack.intensity.counts import KIM, by_part, terms, total
from llmstack.intensity.machine import Ceiling, Machine, ceiling, measure, threads
from llmstack.intensity.roof import Point, Roofline, roofline
from llmstack.intensity.timing import Timing, predict, timed
from llmstack.intensity.trace import Trace, traced


def test_the_ridge_is_the_accelerators():
    """Which tests/test_published.py holds against what others print."""
    for name in ("a100-sxm-40gb", "tpu-v4", "wse-2"):
        chip = facts.accelerator(name)
        assert roofline(chip).ridge == chip.ridge()


def test_a_roof_has_two_slopes():
    roof = Roofline("", peak=100.0, bandwidth=10.0)
    assert roof.ridge == 10
    assert [roof.attainable(i) for i in (1, 9, 10, 1000)] == [10, 90, 100, 100]
    slow, fast = Point("", 50.0, 10.0), Point("", 5000.0, 10.0)
    assert (roof.bound(slow), roof.seconds(slow)) == ("memory", 1.0)
    assert (roof.bound(fast), roof.seconds(fast)) == ("compute", 50.0)
    assert roof.bound(Point("", 100.0, 10.0)) == "compute"
    assert (roof.bound(Point("", 5.0, 0.0)), roof.bound(Point("", 0.0, 5.0))) == ("compute", "memory")


def test_prefill_and_decode_on_an_a100():
    """A127: prefill's matmuls lie above the A100's ridge of 200.6, decoding's below; products of activations have less
    intensity than the FFN at every length."""
    roof, config = roofline(facts.accelerator("a100-sxm-40gb")), preset("llama2-7b")
    assert round(roof.ridge, 1) == 200.6
    heavy = ("projections", "ffn")
    for T in (512, 2048, 8192):
        prefill, decode = (by_part(terms(config, 1, T, phase)) for phase in ("prefill", "decode"))
        for part in heavy:
            assert roof.bound(Point(part, prefill[part].flops, prefill[part].bytes)) == "compute"
            assert roof.bound(Point(part, decode[part].flops, decode[part].bytes)) == "memory"
    for T in (1, 16, 128, 1024, 16384, 131072):
        parts = by_part(terms(preset("bert-base-uncased"), 1, T, "forward", KIM))
        assert parts["attention"].intensity < parts["ffn"].intensity


def test_what_may_stand_under_a_roof():
    """Points by their label, Terms by their name, or by their part where they are a sum."""
    some = terms(preset("gpt2"), 1, 8)
    points = roofline(facts.accelerator("a100-sxm-40gb"), [Point("", 1.0, 1.0), some[0], total(some, "all")]).points
    assert [p.label for p in points] == ["", "q", "all"]
    assert points[1].flops == some[0].flops and points[1].bytes == some[0].bytes and points[1].seconds is None


def test_refused():
    with pytest.raises(ValueError, match="moves bytes"):
        roofline(facts.accelerator("a100-sxm-40gb"), [Point("nothing", 1.0, 0.0)])
    with pytest.raises(KeyError, match="fp5"):
        roofline(facts.accelerator("a100-sxm-40gb"), dtype="fp5")
    with pytest.raises(ValueError, match="repeats"):
        measure(repeats=0)
    with pytest.raises(ValueError, match="fp5"):
        measure(dtypes=("fp5",))
    with pytest.raises(ValueError, match="ceilings are positive"):
        Roofline("", peak=100.0, bandwidth=0.0)


def test_a_ceiling_is_the_best_run(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0])  # runs of 2, 1 and 4 seconds
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    runs = []
    assert ceiling(8.0, lambda: runs.append(1), repeats=3) == Ceiling(best=8.0, spread=0.5)
    assert len(runs) == 4


def test_what_each_ceiling_counts(monkeypatch):
    """A copy moves two values a place, a triad three; a product of n by n matrices takes 2 n^3 FLOPs."""
    counted = []
    monkeypatch.setattr(
        "llmstack.intensity.machine.ceiling", lambda work, *_: counted.append(work) or Ceiling(1.0, 0.0)
    )
    measure(1, ("fp32", "bf16"), megabytes=3, size=256, repeats=1)
    assert counted == [6e6, 9e6, 2 * 256**3, 2 * 128**3]


def test_this_machine_as_an_accelerator():
    before = torch.get_num_threads()
    machine = measure(1, ("fp32", "fp64"), megabytes=1, size=32, repeats=2)
    accelerator = machine.accelerator()
    assert accelerator.bandwidth == max(machine.copy.best, machine.triad.best)
    assert accelerator.peaks == {dtype: machine.gemm[dtype].best for dtype in ("fp32", "fp64")}
    assert roofline(accelerator, [Point("x", 1.0, 1.0)], "fp32").ridge > 0
    with threads(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before
    assert isinstance(machine, Machine)


@pytest.mark.parametrize("phase", ["forward", "decode"])
def test_timed_runs_what_is_traced(phase):
    config = preset("smollm2-135m").with_(n_layers=1, vocab_size=128)
    ours = timed(config, 2, 9, phase, runs=2)
    assert ours.flops == traced(config, 2, 9, phase).flops
    assert all(row.seconds > 0 for row in ours.rows)
    with pytest.raises(ValueError, match="train"):
        timed(config, phase="train")


def test_timed_a_state_and_what_it_refuses():
    mamba = preset("mamba-130m").with_(n_layers=1, vocab_size=64)
    rows = timed(mamba, 1, 5, "decode", runs=1).rows
    assert [row.flops for row in rows if row.flops] == [row.flops for row in traced(mamba, 1, 5, "decode").matmuls()]
    bert = preset("bert-base-uncased")
    for config, how in [(bert, dict(phase="decode")), (preset("t5-small"), {}), (bert, dict(batch=0))]:
        with pytest.raises(ValueError, match="timed runs"):
            timed(config, **how)


def test_each_operation_is_given_its_fastest_run(monkeypatch):
    config = preset("smollm2-135m").with_(n_layers=1, vocab_size=128)
    ticks = []
    monkeypatch.setattr("time.perf_counter", lambda: float(ticks.append(0) or len(ticks) ** 2))  # ever slower
    seconds = []
    for runs in (1, 3):
        ticks.clear()
        seconds.append([row.seconds for row in timed(config, 1, 3, runs=runs).rows])
    assert seconds[0] == seconds[1], "the first that counts is the fastest"
    assert seconds[0][0] > 2 * len(seconds[0]), "the very first run does not count"


def test_timing_is_a_trace_with_a_clock():
    config = preset("smollm2-135m").with_(n_layers=1, vocab_size=128)
    model, ids = build(config), torch.zeros(1, 9, dtype=torch.long)
    with torch.no_grad():
        with Trace() as plain:
            model(ids)
        with Timing() as timed:
            model(ids)
    assert [(r.name, r.flops, r.bytes) for r in timed.rows] == [(r.name, r.flops, r.bytes) for r in plain.rows]
    assert all(row.seconds > 0 for row in timed.rows)
    assert sum(timed.shares().values()) == pytest.approx(1)
    kinds = {kind: sum(r.flops for r in timed.rows if r.kind == kind) for kind in ("linear", "attention", "other")}
    parts = by_part(terms(config, 1, 9))
    assert kinds["attention"] == parts["attention"].flops
    assert kinds["linear"] == total(parts.values()).flops - parts["attention"].flops
    assert kinds["other"] == 0
    roof = Roofline("", peak=1e9, bandwidth=1e9)
    for row, ratio in predict(timed.rows, roof):
        assert ratio == pytest.approx(row.seconds / max(row.flops, row.bytes) * 1e9)
