"""Labs draw what the package computes: every control moves the picture, and captions say numbers that are known."""

import math
import re

import numpy as np
import pytest

from llmstack.course import labs


@pytest.mark.parametrize("name", labs.__all__)
def test_every_control_moves_the_picture(name):
    panel = getattr(labs, name)()
    for control in panel.controls.values():
        before, start = panel.png, control.value
        if hasattr(control, "options"):
            control.index = 1
        else:
            control.value = control.max if control.value != control.max else control.min
        assert panel.png != before, control.description
        control.value = start
        assert panel.png == before, "the same settings draw the same picture"


def test_an_unknown_lab_is_refused():
    with pytest.raises(AttributeError, match="no lab 'position'; there are parameters, "):
        _ = labs.position


def test_parameters_are_the_published_ones():
    panel = labs.parameters()
    assert "gpt2 with 12 layers has 124 M parameters" in panel.caption
    panel.set(model="deepseek-v3")
    assert "671 G parameters, of which a token passes 37.6 G" in panel.caption
    panel.set(model="llama3.1-8b", depth=2.0)
    assert "64 layers has 15 G" in panel.caption and "As published it has 8.03 G" in panel.caption


def test_who_sees_whom():
    panel = labs.attention_reach()
    sees = lambda: [int(n) for n in re.findall(r"(\d+) in the", panel.caption)]  # encoder, encoder-decoder, decoder
    assert sees() == [10, 6, 3]
    assert panel.set(token=6) and sees() == [10, 7, 7]
    assert panel.set(token=9) and sees() == [10, 10, 10]
    assert panel.set(window=2) and sees() == [2, 2, 2]
    assert panel.set(token=4) and sees() == [3, 3, 2], "an encoder's window looks both ways"


def test_position_encodings():
    panel = labs.positions()
    key0 = lambda: float(re.search(r"key 0 gets ([-\d.e]+)", panel.caption)[1])
    cosines = np.cos(64 * 10000.0 ** -(np.arange(0, 32, 2) / 32)).mean()
    assert "dimensions 8 and 9 repeat every 62.8 tokens" in panel.caption
    assert key0() == pytest.approx(cosines, rel=5e-3)
    panel.set(kind="RoPE")
    assert key0() == pytest.approx(cosines, rel=5e-3)
    panel.set(kind="ALiBi", part=0)
    assert "head 0 takes 0.5 from the logit" in panel.caption
    panel.set(part=7, query=10)
    assert key0() == pytest.approx(math.exp(-10 / 256), rel=5e-3)
    panel.set(kind="T5 buckets", query=127)
    assert "16 of 32 buckets" in panel.caption, "all keys on one side: half of the buckets less those of the future"


def test_norms_at_depth_follow_the_theorem():
    panel = labs.norms_at_depth()
    ratio = lambda: float(re.search(r"gradient is ([\d.]+) times as large", panel.caption)[1])
    grown = lambda: float(re.search(r"grows ([\d.]+) times", panel.caption)[1])
    shallow = ratio(), grown()
    panel.set(layers=48)
    assert 1.5 < ratio() / shallow[0] < 3.5, "four times the depth: post over pre grows by about √4"
    assert 1.5 < grown() / shallow[1] < 3.5, "so does the stream"


def test_ffn_widths_are_llamas():
    panel = labs.ffn_width()
    for d_model, d_ff in {4096: 11008, 5120: 13824, 6656: 17920, 8192: 22016}.items():
        panel.set(d_model=d_model)
        assert f"rounded up to {d_ff} " in panel.caption
    assert "1.5 times as many" in panel.caption


def test_activations():
    panel = labs.activations()
    assert "gelu is lowest, -0.170, at x = -0.75" in panel.caption
    panel.set(function="silu")
    assert "silu is lowest, -0.278, at x = -1.30" in panel.caption or "-1.25" in panel.caption
