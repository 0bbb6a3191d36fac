"""Source and claims on the page: what is shown, and that it is safe, short and the same every time."""

import re
import sys

import pytest

from llmstack import facts
from llmstack.course import show
from llmstack.ops import rmsnorm


@pytest.fixture
def shown(monkeypatch):
    """What `put` was asked to display, in place of a notebook."""
    outputs = []
    monkeypatch.setattr(show, "put", lambda text, **forms: outputs.append((text, forms)))
    return outputs


def test_three_implementations_stand_in_columns(shown):
    show.side_by_side("rmsnorm")
    text, page = shown[0][0], shown[0][1]["html"]
    assert text == "rmsnorm: numpy | torch | triton (llmstack/ops/rmsnorm.py)"
    assert [page.count(f"<b>{name}</b>") for name in ("NumPy", "PyTorch", "Triton")] == [1, 1, 1]
    assert "constexpr" in page.split("<b>Triton</b>")[1], "the kernel belongs to the Triton column"
    assert [float(share) for share in re.findall(r"flex:([\d.]+) ", page)] == [1, 1, 1.4], "a kernel needs more room"
    assert "rmsnorm_np_backward" not in page
    show.side_by_side("rmsnorm", backward=True)
    assert "rmsnorm_np_backward" in shown[1][1]["html"]


def test_a_function_of_a_file_with_several(shown):
    show.side_by_side("glu.swiglu")
    assert shown[0][0].startswith("glu.swiglu: numpy | torch")
    assert "swiglu_np" in shown[0][1]["html"] and "reglu_np" not in shown[0][1]["html"]


@pytest.mark.parametrize("op", ["rmsnrom", "rmsnorm.swiglu"])
def test_an_unknown_operation_is_refused(op):
    with pytest.raises(ValueError, match=r"no operation 'rmsnrom' in llmstack.ops; there are .*rmsnorm|no functions"):
        show.side_by_side(op)


def test_source_names_its_place_in_the_package(shown):
    show.source(rmsnorm.rmsnorm_np)
    text, forms = shown[0]
    assert text == "source of rmsnorm_np (llmstack/ops/rmsnorm.py)"
    assert "llmstack/ops/rmsnorm.py: rmsnorm_np" in forms["html"]
    assert str(facts.data_path().parent) not in forms["html"], "no path of this machine"


def test_code_is_escaped_with_and_without_pygments(monkeypatch):
    code = 'x = "<script>alert(1)</script>" if a < b & c else None'
    painted = show.highlight(code)
    assert "<script>" not in painted and "&lt;" in painted and "style=" in painted
    monkeypatch.setitem(sys.modules, "pygments", None)
    plain = show.highlight(code)
    assert "<script>" not in plain and "&lt;script&gt;" in plain and "color" not in plain.split(">")[1]


def test_a_claim_shows_both_values_and_the_verdict(shown, monkeypatch):
    result = facts.ClaimResult("XX-01", "a < b, they say", "2.7", "2.6875", "in part", "", why="two of three")
    monkeypatch.setattr(facts, "compute_claim", lambda id: result)
    show.claim("XX-01")
    text, forms = shown[0]
    assert text.splitlines() == [
        "Claim XX-01",
        "  The survey says: a < b, they say",
        "  Its value:       2.7",
        "  Ours:            2.6875",
        "  Verdict:         in part",
        "  Why:             two of three",
    ]
    assert "a &lt; b, they say" in forms["html"] and "2.6875" in forms["html"]


def test_each_form_is_displayed_under_its_type(monkeypatch, capsys):
    import IPython
    import IPython.display

    show.put("plain", html="<b>")
    assert capsys.readouterr().out == "plain\n", "outside of a notebook only text is shown"
    calls = []
    monkeypatch.setattr(IPython, "get_ipython", object)
    monkeypatch.setattr(IPython.display, "display", lambda forms, **how: calls.append((forms, how)))
    show.put("text", html="<b>", png=b"p", alt="a picture")
    show.put("text", png=b"p")
    show.put("text")
    pictures = [{"image/png": {"alt": alt}} for alt in ("a picture", "text")]
    assert [how for _, how in calls] == [dict(raw=True, metadata=metadata) for metadata in (*pictures, {})]
    assert calls[0][0] == {"text/plain": "text", "text/html": "<b>", "image/png": b"p"}
    assert calls[2][0] == {"text/plain": "text"}
