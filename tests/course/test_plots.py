"""One style: the same bytes for the same data, readable in grey, with a text in the place of the picture."""

import io
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from llmstack.course import plots


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(plots, "put", lambda text, **forms: outputs.append((text, forms)))
    return outputs


DRAW = {
    "line": lambda **k: plots.line(
        {"a": [1, 2, 4], "b": [3, 2, 1]}, x=[1, 10, 100], xlabel="x (s)", ylabel="y (B)", logx=True, **k
    ),
    "bars": lambda **k: plots.bars({"a": 1, "b": 2e6}, ylabel="parameters", **k),
    "groups": lambda **k: plots.bars({"s": {"a": 1, "b": 2}, "t": {"a": 2}}, ylabel="rows", stacked=True, **k),
    "heatmap": lambda **k: plots.heatmap(np.eye(3), xlabel="key", ylabel="query", unit="weight", annotate=True, **k),
    "stack": lambda **k: plots.stack([("model", "a network", "llmstack.architectures"), ("chip", "", "")], **k),
}


@pytest.mark.parametrize("name", DRAW)
def test_a_helper_shows_one_picture_with_its_text(name, shown):
    assert DRAW[name](alt="what it shows") is None
    assert DRAW[name](alt="what it shows") is None
    (text, forms), (_, again) = shown
    assert text == forms["alt"] and text.startswith("what it shows")
    assert forms["png"] == again["png"], "the same data gives the same bytes"
    picture = Image.open(io.BytesIO(forms["png"]))
    assert picture.info["Description"] == text
    assert np.asarray(picture.convert("L")).std() > 1, "something is drawn"


def test_a_picture_without_a_text_gets_one(shown):
    plots.line({"loss": [1, 2]}, xlabel="step", ylabel="loss (nats)", title="Training")
    assert shown[0][0] == "Training against step\nloss: 1 at 0, 2 at 1"


@pytest.mark.parametrize(
    ("draw", "numbers"),
    [
        (lambda **k: plots.line({"a": [3, 0.5, 9e-9]}, [1, 10, 1e5], xlabel="x", **k), "a: 3 at 1, 0 at 100,000"),
        (lambda **k: plots.line({"a": [1, 0.2, 7e-9]}, xlabel="x", logy=True, **k), "a: 1 at 0, 7e-09 at 2"),
        (lambda **k: plots.line({"": [3, -1.26, 2, 4, 3]}, xlabel="x", **k), "3 at 0, 3 at 4, least -1.3, most 4"),
        (
            lambda **k: plots.bars({"s": {"a": 1, "b": 2.34}, "t": {"a": 2e6}}, **k),
            "s: a 1, b 2.3; t: a 2,000,000, b 0",
        ),
        (
            lambda **k: plots.heatmap(np.tril(np.ones((4, 4))), xlabel="key", **k),
            "4 by 4 values from 0 to 1, means of the quarters 0.75 0 1 0.75",
        ),
        (
            lambda **k: plots.heatmap([[np.nan, 2], [1, np.nan]], xlabel="key", **k),
            "2 by 2 values from 1 to 2, means of the quarters nan 2 1 nan",
        ),
        (lambda **k: plots.line({"seconds": [0.1, 0.2]}, xlabel="x", read=0, **k), None),
    ],
    ids=["linear", "log", "extremes", "bars", "image", "holes", "times"],
)
def test_the_text_holds_the_numbers_that_were_drawn(shown, draw, numbers):
    """A wrong figure fails by its text: pictures are not compared."""
    draw(ylabel="y", alt="as said")
    assert shown[0][0].split("\n") == ["as said", *([numbers] if numbers else [])]


def test_each_panel_is_read(shown):
    fig, (left, right) = plots.axes("x", "y", panels=2)
    plots.line({"a": [1, 2]}, xlabel="x", ylabel="y", title="before", ax=left)
    right.scatter([0, 1, 2], [5, 4, 9], label="b")
    right.set_title("after")
    plots.show(fig, "two")
    assert shown[0][0] == "two\n[before] a: 1 at 0, 2 at 1 | [after] b: 3 points, 4 to 9"


def test_on_given_axes_nothing_is_shown(shown):
    _, (left, right) = plots.axes("x", "y", panels=2)
    plots.line({"a": [1, 2], "b": [2, 1]}, xlabel="step", ylabel="loss (nats)", ax=left)
    plots.bars({"a": 1}, ylabel="bytes", ax=right)
    assert not shown
    assert (left.get_xlabel(), left.get_ylabel(), right.get_xlabel()) == ("step", "loss (nats)", "bytes")


def test_series_differ_without_colour():
    grey = [np.dot(to_rgb(c), (0.299, 0.587, 0.114)) for c in plots.COLOURS]
    assert all(abs(a - b) > 0.12 for a, b in zip(grey, grey[1:])), grey
    assert len(set(plots.DASHES)) == len(set(plots.HATCHES)) == len(set(plots.MARKERS)) == len(plots.COLOURS)


def test_bars_stand_where_they_should():
    _, ax = plots.axes("", "")
    plots.bars({"s": {"a": 1, "b": 2}, "t": {"a": 2}, "u": {"b": 4, "a": 3}}, ylabel="rows", stacked=True, ax=ax)
    boxes = [(p.get_x(), p.get_width()) for p in ax.patches]
    assert boxes == [(0, 1), (0, 2), (1, 2), (2, 0), (3, 3), (2, 4)]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"] and ax.yaxis_inverted()


@dataclass
class Row:
    name: str
    size: int
    share: float


def test_a_table_is_aligned_escaped_and_rounded(shown):
    plots.table([Row("a<b", 1234567, 0.123456), {"name": "c", "size": 2, "share": 12.0}])
    text, forms = shown[0]
    assert text == "name       size   share\na<b   1,234,567  0.1235\nc             2      12"
    assert "a&lt;b" in forms["html"] and "1,234,567" in forms["html"]


SI = {0: "0", 999: "999", 1234567: "1.23 M", 999_999: "1 M", 8.03e9: "8.03 G", 1.5e12: "1.5 T", -2e3: "-2 k"}


@pytest.mark.parametrize(("value", "text"), SI.items())
def test_si(value, text):
    assert plots.si(value) == text


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="bars: there is nothing to draw"):
        plots.bars({}, ylabel="bytes")
    for matrix in ([], [1, 2], np.zeros((0, 3)), np.zeros((2, 2, 2))):
        with pytest.raises(ValueError, match=r"heatmap: a matrix is \[rows, columns\], got shape"):
            plots.heatmap(matrix, xlabel="key", ylabel="query")
    assert plots.si(float("inf")) == "inf"


def test_points_stand_on_their_roof_or_where_they_were_measured():
    from llmstack.intensity.roof import Point, Roofline

    points = (Point("met", 10.0, 1.0), Point("measured", 10.0, 1.0, 5.0), Point("adds nothing", 0.0, 1.0))
    _, ax = plots.axes("", "")
    plots.roofline(Roofline("chip", 100.0, 5.0, points), ax=ax)
    roof, *drawn = ax.lines
    assert [line.get_label() for line in drawn] == ["met", "measured"]
    assert [line.get_ydata()[0] for line in drawn] == [50.0, 2.0]
    assert max(roof.get_ydata()) == 100.0 and min(roof.get_xdata()) < 10 < max(roof.get_xdata())
    assert drawn[0].get_markerfacecolor() == "white" != drawn[1].get_markerfacecolor()


@pytest.mark.parametrize("signed", [False, True])
def test_a_value_is_written_where_it_can_be_read(signed):
    """White on dark, black on light, over the whole range of colours."""
    fig, ax = plt.subplots()
    low = -1.0 if signed else 10.0
    plots.heatmap(np.linspace(low, low + 2, 9)[None], annotate=True, signed=signed, ax=ax, xlabel="key", ylabel="query")
    (image,) = ax.images
    for text, value in zip(ax.texts, image.get_array()[0]):
        luminance = np.dot(image.cmap(image.norm(value))[:3], (0.2126, 0.7152, 0.0722))
        assert text.get_color() == ("white" if luminance < 0.5 else "black"), (value, luminance)
    plt.close(fig)
