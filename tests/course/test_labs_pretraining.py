"""The lab of loss scaling counts what a cast loses."""

import re

import torch

from llmstack.course import labs
from llmstack.course.labs.pretraining import sampled_gradients


def shares(panel):
    return [float(x) for x in re.search(r"tokens: ([\d.]+)% .* zero, ([\d.]+)% infinite", panel.caption).groups()]


def test_the_shares_are_those_of_a_cast():
    panel, g = labs.loss_scaling(), sampled_gradients()
    for scale in (0, 20, 40):
        cast = (g / 2**20 * 2**scale).to(torch.float16)
        want = [100 * float(x.float().mean()) for x in (cast == 0, cast.isinf())]
        got = shares(panel.set(log2_of_scale=scale))
        assert all(abs(a - b) < 0.06 for a, b in zip(got, want))
    assert shares(panel.set(format="fp16", log2_of_scale=0))[0] > 30
    assert shares(panel.set(format="fp16", log2_of_scale=16))[0] < 12


def test_the_range_of_bf16_needs_no_scale():
    assert shares(labs.loss_scaling().set(format="bf16", log2_of_scale=0)) == [0, 0]
