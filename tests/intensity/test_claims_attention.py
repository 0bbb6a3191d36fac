"""The figure of FlashAttention's first paper, against its printed numbers and the formulas of ops/flash."""

import pytest

from llmstack import facts
from llmstack.intensity.claims_attention import flash_figure_2
from llmstack.ops.flash.ref import block_rule, values_moved


def test_operations_are_not_those_printed():
    """275 G forward; 66.6 and 75.2 of arXiv:2205.14135v2, Fig. 2, fit neither in size nor in ratio."""
    found = {name: row["operations"] / 1e9 for name, row in flash_figure_2().items()}
    assert found["forward"] == pytest.approx(275, abs=0.5)
    assert found["standard"] == pytest.approx(825, abs=0.5) and found["flash"] == pytest.approx(962, abs=0.5)
    assert found["standard"] > 12 * 66.6 and found["flash"] > 12 * 75.2
    assert found["flash"] / found["standard"] == pytest.approx(7 / 6) and 75.2 / 66.6 == pytest.approx(1.13, abs=0.005)


def test_bytes_are_near_those_printed():
    found = {name: row.get("bytes", 0) / 1e9 for name, row in flash_figure_2().items()}
    assert found["flash"] == pytest.approx(4.4, rel=0.06)
    assert found["standard"] < 40.3 < found["standard with mask and dropout"] < 1.11 * 40.3
    assert found["standard with mask and dropout"] / found["flash"] == pytest.approx(9.2, rel=0.05)


def test_the_forward_part_is_the_formula_of_the_tiles():
    """fp16 throughout in the formula; the figure's statistics are fp32, so they weigh twice."""
    T, Dh, heads = 1024, 64, 1024
    forward = values_moved(T, T, Dh, *block_rule(98304, Dh))
    assert block_rule(98304, Dh) == (64, 384)
    assert forward["flash-1"] == (3 + 3 * 3) * T * Dh + (2 + 4 * 3) * T
    assert forward["standard"] == 4 * T * Dh + 4 * T * T
    backward = (7 + 5 * 3) * T * Dh * 2 * heads + 2 * 3 * T * 4 * heads
    whole = 2 * heads * (forward["flash-1"] + (2 + 4 * 3) * T) + backward
    assert flash_figure_2()["flash"]["bytes"] == whole


def test_the_ledger_says_why_there_is_no_time():
    claim, result = facts.claims()["BC-25"], facts.compute_claim("BC-25")
    assert claim.verdict == "not reproducible here" and result.agrees and "825 and 962 G" in result.ours
