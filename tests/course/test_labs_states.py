"""The labs on states and on visual tokens say what the package computes."""

import re

from llmstack import intensity, preset
from llmstack.course import labs
from llmstack.execution import pictures


def test_a_larger_state_leaves_less_out():
    panel = labs.state_memory()
    left = lambda: float(re.search(r"leave out ([\d.e+-]+) %", panel.caption)[1])
    few = left()
    panel.set(states=64)
    assert left() < few / 4 and "64 numbers for 240 steps of waves" in panel.caption
    panel.set(past="noise")
    assert left() > 50, "noise has no short description"


def test_the_work_of_a_token_follows_the_parameters():
    """Two operations a parameter of the matrices, and the scan's seven for each state."""
    panel, c = labs.state_cost(), preset("mamba-2.8b")
    D, inner, N = c.d_model, c.expand * c.d_model, c.d_state
    matrices = intensity.params(c).by_part["mixer"] / c.n_layers - inner * (N + 3)  # without A, D and two biases
    even = (2 * (2 * matrices + 7 * inner * N) - 24 * D**2) / (4 * D)
    assert f"d_model = 2560, 16 states: equal work at {even:.0f} tokens" in panel.caption
    assert f"equal room at {2 * inner * (N + 3) / (2 * D):.0f}." in panel.caption


def test_fewer_visual_tokens_cost_words():
    panel = labs.token_budget().set(tokens=16)
    truth = " ".join(pictures.SCENES[pictures.UNSEEN[2]])
    assert panel.caption == f"From 16 of 16 tokens it writes “{truth}”; right is “{truth}”."
    from llmstack.course.labs.vision import captions

    assert captions(16)[1] > 0.9 > captions(4)[1] > captions(1)[1]
