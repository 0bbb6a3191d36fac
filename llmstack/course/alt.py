"""What a figure shows, in numbers read off what was drawn: for a screen reader, and for nbval to compare.

    describe(fig)   "FFN: 66 at 128, 8.3 at 131,072; attention: …"

Pictures are not compared, so a wrong figure fails by this text. The numbers are rounded to what a picture shows, which
is also what holds on every processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def describe(fig: Any, digits: int = 2) -> str:
    """One sentence a panel: its lines' ends and extremes, its bars, its images' range and the means of their quarters.

    digits: significant figures of each bar, and of each value on a logarithmic axis; elsewhere of a panel's largest
    value. 0: no text, for measured times.
    """
    if not digits:
        return ""
    panels = []
    for ax in fig.axes:
        parts = _lines(ax, digits) + _bars(ax, digits) + _points(ax, digits) + _images(ax, digits)
        name = ax.get_title()
        if parts:
            panels.append((f"[{name}] " if name and len(fig.axes) > 1 else "") + "; ".join(parts))
    return " | ".join(panels)


def _lines(ax: Any, digits: int) -> list[str]:
    found = []
    drawn = [line for line in ax.lines if len(line.get_ydata())]
    values = [np.asarray(line.get_ydata(), dtype=float) for line in drawn]
    rounded = _rounded(values, digits, ax.get_yscale() == "log")
    for line, y in zip(drawn, rounded):
        x = line.get_xdata()
        label = "" if line.get_label().startswith("_") else f"{line.get_label()}: "
        ends = [f"{_number(y[0])} at {_place(x[0])}"]
        if len(y) > 1:
            ends.append(f"{_number(y[-1])} at {_place(x[-1])}")
        if np.nanmin(y) < min(y[0], y[-1]):
            ends.append(f"least {_number(np.nanmin(y))}")
        if np.nanmax(y) > max(y[0], y[-1]):
            ends.append(f"most {_number(np.nanmax(y))}")
        found.append(label + ", ".join(ends))
    return found


def _bars(ax: Any, digits: int) -> list[str]:
    found = []
    groups = [c for c in ax.containers if hasattr(c, "datavalues")]
    values = [np.asarray(c.datavalues, dtype=float) for c in groups]
    for group, lengths in zip(groups, _rounded(values, digits, each=True)):
        ticks = ax.get_yticklabels() if group.orientation == "horizontal" else ax.get_xticklabels()
        names = [tick.get_text() for tick in ticks]
        if len(names) != len(lengths):
            names = range(len(lengths))
        label = "" if group.get_label().startswith("_") or not group.get_label() else f"{group.get_label()}: "
        found.append(label + ", ".join(f"{name} {_number(v)}" for name, v in zip(names, lengths)))
    return found


def _points(ax: Any, digits: int) -> list[str]:
    found = []
    clouds = [c for c in ax.collections if len(np.ma.getdata(c.get_offsets())) > 1]
    heights = [np.asarray(c.get_offsets(), dtype=float)[:, 1] for c in clouds]
    for cloud, y in zip(clouds, _rounded(heights, digits, ax.get_yscale() == "log")):
        label = "" if cloud.get_label().startswith("_") else f"{cloud.get_label()}: "
        found.append(f"{label}{len(y)} points, {_number(np.nanmin(y))} to {_number(np.nanmax(y))}")
    return found


def _images(ax: Any, digits: int) -> list[str]:
    found = []
    for image in ax.images:
        m = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
        if m.ndim == 3:  # colours
            m = m.mean(-1)
        upper, lower = np.array_split(m, 2)
        quarters = [*np.array_split(upper, 2, axis=1), *np.array_split(lower, 2, axis=1)]
        means = [np.nanmean(part) if np.isfinite(part).any() else np.nan for part in quarters]
        (numbers,) = _rounded([np.array([np.nanmin(m), np.nanmax(m), *means])], digits, False)
        low, high, *means = map(_number, numbers)
        found.append(
            f"{m.shape[0]} by {m.shape[1]} values from {low} to {high}, means of the quarters {' '.join(means)}"
        )
    return found


def _rounded(values: list[np.ndarray], digits: int, each: bool) -> list[np.ndarray]:
    """Each to its own `digits` figures, else all to the last figure of half of the largest: 1 to hundredths."""
    sizes = [abs(v) for series in values for v in series if np.isfinite(v)]
    top = max(sizes, default=0)
    if not top:
        return values
    return [np.array([_round(v, digits, abs(v) if each else top / 2) for v in series]) for series in values]


def _round(value: float, digits: int, size: float) -> float:
    if not np.isfinite(value) or not size:
        return value
    return round(value, digits - 1 - math.floor(math.log10(size))) + 0.0  # no minus zero


def _number(value: float) -> str:
    if not np.isfinite(value) or abs(value) < 1e-3 and value or abs(value) >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value == round(value) else f"{value:,.6g}"


def _place(x: Any) -> str:
    return str(x) if isinstance(x, str) else _number(_round(float(x), 3, abs(float(x))))
