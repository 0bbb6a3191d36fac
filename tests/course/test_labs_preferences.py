"""The labs of preferences say what the stored runs and the objective give."""

import re

from llmstack import facts
from llmstack.course import labs


def test_every_stored_run_is_shown_and_drift_falls_with_its_price():
    panel, drift = labs.kl_coefficient(), {}
    for run in facts.table("preferences/results")["run"]:
        for beta, end in run["fixed"].items():
            panel.set(beta=float(beta), seed=run["seed"])
            pattern = r": (\d+\.\d) nats .* says (-?\d+\.\d), the reader counts (\d\.\d) .* a cat: (.*)"
            shown = re.search(pattern, panel.caption)
            assert [float(x) for x in shown.groups()[:3]] == [
                float(f"{end[key]:.1f}") for key in ("last_kl", "last_reward", "last_gold")
            ]
            assert shown[4] == end["says"]
            drift[run["seed"], float(beta)] = end["last_kl"]
        assert drift[run["seed"], 0.0] > drift[run["seed"], 0.1] > drift[run["seed"], 1.0]


def test_the_clip_is_where_the_caption_says():
    panel = labs.clip_range()
    assert "up until the ratio is 1.20" in panel.caption
    assert "down until the ratio is 0.70" in panel.set(advantage=-1.5, clip=0.3).caption
    assert "nothing to gain" in panel.set(advantage=0.0).caption
