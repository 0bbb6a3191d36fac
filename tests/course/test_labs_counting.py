"""The labs of chapter 3.1 and 3.2 say what the counts say."""

import re

import pytest

from llmstack import facts, preset
from llmstack.course import labs
from llmstack.intensity import by_part, terms, traffic


def test_intensity_along_a_dial():
    panel = labs.intensity()
    said = lambda part: float(re.search(rf"\b{part} (\d[\d.e+]*\d|\d)", panel.caption)[1])
    ours = by_part(terms(preset("llama3.1-8b"), 1, 512, "prefill"))
    assert said("ffn") == pytest.approx(ours["ffn"].intensity, rel=5e-3)
    before = said("ffn"), said("attention")
    panel.set(bytes_a_value=4.0)
    assert (2 * said("ffn"), 2 * said("attention")) == pytest.approx(before, rel=1e-2)
    panel.set(bytes_a_value=2.0, phase="decode")
    assert said("ffn") == pytest.approx(1, abs=0.01)
    assert said("attention") == pytest.approx(4, rel=0.05), "four query heads share a key"
    panel.set(batch=5)
    assert said("ffn") == pytest.approx(32, rel=0.02)
    assert said("attention") == pytest.approx(4, rel=0.05), "a batch shares no cache"


def test_a_model_under_the_roof():
    panel = labs.under_the_roof()
    assert "ridge of 200.6, memory-bound" in panel.caption
    least = lambda: float(re.search(r"At best ([\d.e+]+) ms", panel.caption)[1]) / 1e3
    moved = traffic(preset("llama3.1-8b"), 1, 2048, "decode").bytes
    assert least() == pytest.approx(moved / facts.accelerator("a100-sxm-40gb").bandwidth, rel=5e-3)
    panel.set(phase="prefill")
    assert "compute-bound" in panel.caption
    of_peak = lambda: float(re.search(r"([\d.]+)% of the peak", panel.caption)[1])
    before = of_peak()
    panel.set(scores=False)
    assert before < 85 < 90 < of_peak() < 100, "nearer to the peak without the scores' traffic"
    panel.set(model="mixtral-8x7b", phase="decode", batch=64)
    assert "mixtral-8x7b, decode, 64 × 2,048 tokens" in panel.caption
