"""The lab of routers says what the routers say."""

import re

import pytest

from llmstack.architectures import routers
from llmstack.course import labs
from llmstack.course.labs.experts import EXPERTS, TOKENS, selections, tokens


def test_the_caption_is_the_routers():
    panel = labs.routing()
    said = lambda: [float(x) for x in re.findall(r"(\d+\.\d+)", panel.caption.partition(": the fullest")[2])]
    for name in selections(1.25):
        panel.set(router=name)
        r = selections(1.25)[name](tokens(1.5))
        missed = 100 * (1 - len(set(r.token.tolist())) / TOKENS)
        worst = float(r.load.max()) / (len(r.token) / EXPERTS)
        assert said() == pytest.approx([worst, missed, float(routers.balance_loss(r))], abs=0.051), name


def test_what_the_routers_are_known_for():
    """Without skew or with: drops only where there is a capacity, and an even load where it is made even."""
    for skew in (0.0, 3.0):
        found = {name: select(tokens(skew)) for name, select in selections(1.0).items()}
        even = {name for name, r in found.items() if float(r.load.max() / r.load.float().mean()) < 1.05}
        assert {"expert choice", "BASE: best even assignment"} <= even
        assert found["Switch: top 1"].dropped > (0.05 if skew else 0) and found["V-MoE: top 1 by score"].dropped > 0
        for name in ("Mixtral: top 2, no capacity", "DeepSeek-V3: top 2, corrected", "hash of the word"):
            assert found[name].dropped == 0
    assert float(routers.cv_squared(found["DeepSeek-V3: top 2, corrected"].load.float())) < 0.01
