"""The lab of the rank of an update draws Eckart and Young's bound."""

import re

import numpy as np

from llmstack.course import labs
from llmstack.course.labs.finetune import updates


def test_the_error_of_a_rank_is_what_the_singular_values_leave_out():
    rng = np.random.default_rng(0)
    u, s, v = np.linalg.svd(rng.normal(size=(192, 192)))  # the lab's "noise alone"
    np.testing.assert_allclose(updates()["noise alone"], s)
    error = np.linalg.norm(u[:, 40:] * s[40:] @ v[40:]) / np.linalg.norm(s)
    panel = labs.lora_rank().set(update="noise alone", rank=40)
    said = re.search(r"has ([\d.]+)% .* leaves out ([\d.]+)%", panel.caption)
    assert abs(float(said[1]) - 100 * 40 * 2 / 192) < 0.06 and abs(float(said[2]) - 100 * error) < 0.06


def test_every_update_can_be_drawn_at_every_end():
    panel = labs.lora_rank()
    for update in panel.controls["update"].options:
        for rank in (1, 191):
            assert f"{update}, rank {rank}:" in panel.set(update=update, rank=rank).caption
    assert len([u for u in panel.controls["update"].options if u.startswith("ΔW")]) == 3
