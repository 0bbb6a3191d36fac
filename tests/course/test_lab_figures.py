"""Each lab's figure, in numbers read off what is drawn, at its start and with each control moved.

tests/course/lab_figures.json holds what was drawn when the pictures were last looked at, so that a change of a figure
is a change that somebody sees. After a figure changes on purpose, look at it, then:

    python tests/course/test_lab_figures.py
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from llmstack.course import labs

STORED = Path(__file__).with_name("lab_figures.json")
NUMBER = r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?"
# Two processors differ in the last bits of what is drawn, and a caption rounds to two or three figures.
RTOL, CAPTION_RTOL = 2e-3, 2e-2


def moved(panel) -> dict[str, dict]:
    """Settings by name: the start, and each control at two other values (the ends of a slider)."""
    start = {name: control.value for name, control in panel.controls.items()}
    found = {"start": start}
    for name, control in panel.controls.items():
        if hasattr(control, "options"):
            values = [option[1] if isinstance(option, tuple) else option for option in control.options]
        elif hasattr(control, "max"):
            values = [control.min, control.max]
        else:
            values = [not control.value]
        others = [value for value in values if value != control.value]
        for value in (others[0], others[-1]):
            found[f"{name} = {value}"] = {**start, name: value}
    return found


def summary(values) -> list[float]:
    """First, last, least, most, mean, and the mean weighted by place, so that an exchange of two shows."""
    values = np.ma.filled(np.ma.asarray(values, dtype=float), np.nan).ravel()
    values = values[np.isfinite(values)]
    if not len(values):
        return []
    weights = np.linspace(0, 1, len(values))
    return [values[0], values[-1], values.min(), values.max(), values.mean(), (weights * values).mean()]


def drawn(fig) -> dict[str, list[float]]:
    """Artist → the summary of its numbers."""
    found = {}
    for i, ax in enumerate(fig.axes):
        words = [ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale(), ax.get_yscale()]
        found[f"{i} axes {' | '.join(words)}"] = []
        for j, line in enumerate(ax.lines):
            x = [float(value) if not isinstance(value, str) else k for k, value in enumerate(line.get_xdata())]
            found[f"{i} line {j} {line.get_label()}: x"] = summary(x)
            found[f"{i} line {j} {line.get_label()}: y"] = summary(line.get_ydata())
        for j, patch in enumerate(ax.patches):
            box = patch.get_extents()
            found[f"{i} patch {j}"] = [*ax.transData.inverted().transform(box).ravel()]
        for j, cloud in enumerate(ax.collections):
            found[f"{i} points {j}"] = summary(np.ma.getdata(cloud.get_offsets()))
        for j, image in enumerate(ax.images):
            found[f"{i} image {j}"] = summary(np.asarray(image.get_array()))
        for j, text in enumerate(ax.texts):
            words = re.sub(NUMBER, "#", f"{text.get_text()} {text.get_color()}")
            found[f"{i} text {j} {words}"] = list(map(float, text.get_position()))
        for side, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
            colours = [to_hex(label.get_color()) for label in axis.get_ticklabels()]
            found[f"{i} ticks {side} {' '.join(dict.fromkeys(colours))}"] = [float(len(set(colours)))]
    return found


def shown(name: str) -> dict[str, dict]:
    import matplotlib.pyplot as plt

    panel = getattr(labs, name)()
    found = {}
    for setting, values in moved(panel).items():
        try:
            fig, caption = panel.draw(**values)
        except ValueError as refused:
            found[setting] = {"caption": f"refused: {refused}", "drawn": {}}
            continue
        found[setting] = {"caption": caption, "drawn": drawn(fig)}
        plt.close(fig)
    return found


def numbers(text: str) -> list[str]:
    return [number.replace(",", "").rstrip(".") for number in re.findall(NUMBER, text)]


@pytest.mark.parametrize("name", labs.__all__)
def test_the_figure_is_the_one_that_was_looked_at(name):
    stored = json.loads(STORED.read_text(encoding="utf-8"))[name]
    now = shown(name)
    assert list(now) == list(stored)
    for setting, was in stored.items():
        caption = now[setting]["caption"]
        assert re.sub(NUMBER, "#", caption) == re.sub(NUMBER, "#", was["caption"]), setting
        for said, before in zip(numbers(caption), numbers(was["caption"])):
            last_digit = 10.0 ** -len(before.partition(".")[2])
            assert float(said) == pytest.approx(float(before), rel=CAPTION_RTOL, abs=1.01 * last_digit), caption
        assert list(now[setting]["drawn"]) == list(was["drawn"]), setting
        for artist, values in was["drawn"].items():
            size = max(map(abs, values), default=0)
            found = now[setting]["drawn"][artist]
            np.testing.assert_allclose(found, values, RTOL, RTOL * size, err_msg=f"{setting}: {artist}")


if __name__ == "__main__":
    rounded = json.loads(
        json.dumps({name: shown(name) for name in labs.__all__}),
        parse_float=lambda text: float(f"{float(text):.6g}"),
    )
    lines = [f"{json.dumps(name)}: {json.dumps(figures, ensure_ascii=False)}" for name, figures in rounded.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
