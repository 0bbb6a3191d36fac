"""The lab of chapter 3.4 counts what the fusion pass counts."""

import re
from functools import reduce

import pytest
import torch
import torch.nn.functional as F

from llmstack import facts
from llmstack.course import labs
from llmstack.course.labs.fusion import chain_and_norm
from llmstack.intensity.fusion import capture, cost, fuse, rewrite
from llmstack.ops.rmsnorm import rmsnorm_torch


def test_what_the_kernels_move_is_what_the_pass_counts():
    R, D, chain = 6, 10, [F.silu, torch.exp, torch.tanh]

    def program(x, r, g):
        s = reduce(lambda y, f: f(y), chain, x) + r
        return s, rmsnorm_torch(s, g)

    graph = capture(program, torch.ones(R, D), torch.ones(R, D), torch.ones(D))
    moved = chain_and_norm(len(chain), R, D)
    assert cost(graph) == (len(moved["each alone"]), 4 * sum(moved["each alone"]))
    assert rewrite(graph, "torch") == ["add + RMSNorm"] and len(fuse(graph, "numpy")) == 1
    assert cost(graph) == (len(moved["two"]), 4 * sum(moved["two"]))
    tensors = R * D, R * D, D, R * D, R * D  # x, r, g, the sum, its norm
    assert moved["one"] == [sum(tensors)]


def test_a_chain_and_a_norm():
    panel = labs.fused_chain()
    said = lambda name: float(re.search(rf"\b{name} [\d.]+ \w+ in ([\d.e+]+) µs", panel.caption)[1])
    bandwidth = facts.accelerator("h100-sxm5").bandwidth
    once = 1e6 * 2 * (4 * 4096 * 4096 + 4096) / bandwidth
    assert said("1 kernel") == pytest.approx(once, rel=5e-3)
    assert (said("6 kernels"), said("2 kernels")) == pytest.approx((13 / 4 * once, 6 / 4 * once), rel=5e-3)
    panel.set(tokens=0)
    assert (said("6 kernels"), said("2 kernels"), said("1 kernel")) == (24, 8, 4), "a launch each"
    panel.set(launch=0, along="width")
    assert said("1 kernel") == pytest.approx(1e6 * 2 * 5 * 4096 / bandwidth, rel=5e-3), (
        "the weights weigh as much as a token"
    )
