"""The lab of sampling says how many tokens are left, and what was cut."""

import re

from llmstack.course import labs


def test_the_caption_counts_what_is_left():
    panel = labs.next_token()
    left = lambda: int(re.search(r"(\d+) of 2048 tokens", panel.caption)[1])
    bits = lambda: [float(x) for x in re.search(r"Entropy (.*) bits before, (.*) now", panel.caption).groups()]
    nucleus = left()
    assert 1 < nucleus < 2048
    panel.set(top_p=1.0)
    assert left() == 2048 and "0% of the model's own mass" in panel.caption and bits()[0] == bits()[1]
    panel.set(temperature=2.0)
    assert bits()[1] > bits()[0]
    panel.set(temperature=0.5)
    assert bits()[1] < bits()[0]
    panel.set(top_k=7)
    assert left() == 7
    panel.set(min_p=0.9)
    assert left() == 1 and bits()[1] == 0
    panel.set(after="KING HENRY V:\nMy")
    assert panel.caption.startswith("After “KING HENRY V:\nMy”")
