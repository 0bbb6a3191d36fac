"""The lab of HNSW's steps says what the search did."""

import re

from llmstack.course import labs


def test_the_caption_counts_the_search():
    panel = labs.hnsw_steps()
    said = lambda: [
        int(n) for n in re.search(r"(\d+) of 600 nodes.*?(\d+) distances.*?; (\d+) of", panel.caption).groups()
    ]
    for built_on in panel.controls["built_on"].options:
        panel.set(built_on=built_on, ef=1)
        few = said()
        panel.set(ef=60)
        many = said()
        assert few[0] < many[0] <= few[1] + many[1] < 1200 and few[1] < many[1]
        assert few[2] <= 1 and many[2] >= 9
    panel.set(question="Do not steal.")
    assert "Ye shall not steal" in panel.caption
