"""The labs of chapter 3.3 show what the algorithm moves and what the pipeline does."""

import re

from llmstack.course import labs
from llmstack.course.labs.kernels import DH
from llmstack.ops.flash.ref import values_moved


def test_the_walk_moves_what_the_formula_says():
    panel = labs.tile_walk().set(percent_of_the_walk=100)
    said = lambda pattern: float(re.search(pattern, panel.caption)[1])
    formula = values_moved(128, 128, DH, 16, 16)
    assert said(r"([\d.]+) kB at the end") == round(4 * formula["flash-2"] / 1e3, 1)
    assert said(r"standard attention ([\d.]+\d)") == round(4 * formula["standard"] / 1e3, 1)
    read, written = said(r"([\d.]+) kB read"), said(r"([\d.]+) kB written")
    assert written == round(4 * (128 * DH + 128) / 1e3, 1)
    assert abs(read + written - said(r"([\d.]+) kB at the end")) < 0.11
    panel.set(causal=True)
    assert "36 tiles of 64 are made" in panel.caption
    panel.set(causal=False, percent_of_the_walk=1)
    assert said(r"([\d.]+) kB read") == round(4 * 3 * 16 * DH / 1e3, 1), "a tile of queries, of keys and of values"


def test_buffers():
    panel = labs.two_buffers()
    assert "2 buffers: 9 µs, of which the matrix unit waits 11%. First load + n · max: 9 µs" in panel.caption
    panel.set(buffers=1)
    assert "1 buffer: 16 µs, of which the matrix unit waits 50%" in panel.caption
