"""One style for every figure: labelled axes with units, distinct in grey, with a text for those who cannot see it.

    plots.line({"RoPE": y, "ALiBi": z}, x=x, xlabel="distance (tokens)", ylabel="bias", alt="…")
    plots.bars({"Q, K, V": 3e6, "FFN": 8e6}, ylabel="parameters")          a mapping of mappings draws groups
    plots.heatmap(scores, xlabel="key", ylabel="query", unit="weight")
    plots.table(rows, columns=["model", "parameters"])
    plots.roofline(intensity.roofline(accelerator, points))
    plots.stack([("application", "a question", "llmstack.execution"), …])

Each shows itself and returns None. All figures take title=, logx=, logy=, alt= (what to see, in words) and ax= (draw
there and show nothing). The numbers that were drawn are read off the figure and follow alt: that is the text for a
screen reader, and what nbval compares. read= says to how many figures (2; 0 for measured times: no numbers). For a
figure of your own:

    fig, ax = plots.axes("query", "key");  ax.plot(…);  plots.show(fig, alt="…")

Figures are plain matplotlib Figure objects outside pyplot, so none stays open. The same data gives the same bytes.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from llmstack.course.alt import describe
from llmstack.course.show import put

# Okabe and Ito's colours in an order in which neighbours differ in grey as well as in hue.
COLOURS = ("#0072b2", "#e69f00", "#111111", "#d55e00", "#56b4e9", "#009e73", "#cc79a7", "#555555")
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (3, 3)), (0, (8, 2)), (0, (1, 1)))
MARKERS = "os^Dv<>P"
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--", "oo")
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.titlesize": 11,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "llmstack",
}
SIZE = (6.8, 3.6)


def axes(xlabel: str, ylabel: str, title: str = "", size: tuple[float, float] = SIZE, panels: int = 1):
    """A figure and its axes (an array of them when panels > 1, side by side), in the project's style."""
    with rc_context(STYLE):
        fig = Figure(figsize=size, layout="constrained", dpi=100)
        made = fig.subplots(1, panels, squeeze=False)[0]
    for ax in made:
        ax.set(xlabel=xlabel, ylabel=ylabel)
    made[0].set_title(title)
    return fig, (made[0] if panels == 1 else made)


def save_png(fig: Figure, alt: str = "") -> bytes:
    """The figure as PNG; alt stands in the file as its Description."""
    buffer = io.BytesIO()
    with rc_context(STYLE):
        fig.savefig(buffer, format="png", dpi=100, metadata={"Software": None, "Description": alt})
    return buffer.getvalue()


def show(fig: Figure, alt: str, read: int = 2) -> None:
    """Display a figure; alt and the numbers read off it are its text for screen readers and for nbval to compare.

    read: to how many figures the numbers are read; 0 for a figure of measured times, whose numbers differ each time.
    """
    text = "\n".join(filter(None, (alt, describe(fig, read))))
    put(text, png=save_png(fig, text), alt=text)


@contextmanager
def _frame(size=SIZE, *, xlabel: str, ylabel: str, title="", logx=False, logy=False, alt="", ax=None, read=2):
    """Axes to draw on; afterwards labels, scales and a legend, and unless they were given, the figure is shown."""
    fig, at = (None, ax) if ax is not None else axes("", "", size=size)
    yield at
    at.set(xlabel=xlabel, ylabel=ylabel, **({"title": title} if title else {}))
    for scale, wanted in ((at.set_xscale, logx), (at.set_yscale, logy)):
        if wanted:
            scale("log")
    if len(at.get_legend_handles_labels()[1]) > 1:
        at.legend(frameon=False)
    if fig is not None:
        about = title or ylabel or xlabel
        against = f" against {xlabel}" if xlabel and (title or ylabel) else ""
        show(fig, alt or about + against, read)


def line(series: Mapping[str, Any], x: Sequence[float] | None = None, marks: bool | None = None, **frame: Any) -> None:
    """One line a name: values over x, or pairs (x, y) where each has its own x. marks: by default up to 20 points."""
    with _frame(**frame) as ax:
        for (name, y), colour, dash, marker in zip(series.items(), cycle(COLOURS), cycle(DASHES), cycle(MARKERS)):
            xs, ys = y if x is None and isinstance(y, tuple) else (range(len(y)) if x is None else x, y)
            marked = len(ys) <= 20 if marks is None else marks
            ax.plot(xs, ys, color=colour, linestyle=dash, marker=marker if marked else None, label=name)


def roofline(*roofs: Any, span: tuple[float, float] | None = None, **frame: Any) -> None:
    """Roofs of intensity.roofline(…) with their points: at their measured rate, or hollow on the roof where they have
    none. A point without operations has no place on logarithmic axes and is left out. span: from which intensity to
    which; by default around points and ridges."""
    shown = [(roof, [p for p in roof.points if p.flops]) for roof in roofs]
    at = [p.intensity for _, points in shown for p in points] + [roof.ridge for roof in roofs]
    xs = np.geomspace(*(span or (min(at) / 3, max(at) * 3)), 200)
    labels = dict(xlabel="operations a byte", ylabel="operations a second")
    with _frame((7.6, 4.2), **labels, **frame) as ax:
        for (roof, points), colour, dash in zip(shown, cycle(COLOURS), cycle(DASHES)):
            ax.plot(xs, [roof.attainable(x) for x in xs], color=colour, linestyle=dash, label=roof.name)
            for i, label in enumerate(dict.fromkeys(p.label for p in points)):
                same = [p for p in points if p.label == label]
                y = [p.rate or roof.attainable(p.intensity) for p in same]
                shade = colour if len(roofs) > 1 else COLOURS[(i + 1) % len(COLOURS)]
                look = dict(marker=MARKERS[i % len(MARKERS)], color=shade, linestyle="", markersize=7)
                look |= {} if same[0].seconds else dict(markerfacecolor="white")
                ax.plot([p.intensity for p in same], y, label=label, **look)
        ax.set(xscale="log", yscale="log", **({"xlim": span} if span else {}))
        ax.yaxis.set_major_formatter(EngFormatter())


def bars(
    values: Mapping[str, Any], ylabel: str, stacked=False, logy=False, digits=3, colours=COLOURS, **frame: Any
) -> None:
    """Lying bars with their values; a mapping of mappings {series: {name: value}} draws groups, or stacks.

    ylabel and logy are the quantity's, although it lies; xlabel would name what the bars are.
    """
    if not values:
        raise ValueError("bars: there is nothing to draw; values is a mapping name -> number, with one entry at least")
    groups = values if isinstance(next(iter(values.values())), Mapping) else {"": values}
    names = list(dict.fromkeys(n for g in groups.values() for n in g))
    slots = len(names) * (1 if stacked else len(groups))
    height, left = (0.7, np.zeros(len(names))) if stacked else (0.8 / len(groups), None)
    quantity = dict(ylabel=frame.pop("xlabel", ""), xlabel=ylabel, logx=logy)
    with _frame((SIZE[0], 1.1 + 0.32 * slots), **quantity, **frame) as ax:
        for i, (series, g) in enumerate(groups.items()):
            length = np.array([float(g.get(n, 0)) for n in names])
            y = np.arange(len(names)) + (0 if stacked else (i - (len(groups) - 1) / 2) * height)
            look = dict(color=colours[i % len(colours)], hatch=HATCHES[i % 8], edgecolor="white", label=series)
            drawn = ax.barh(y, length, height, left=left, **look)
            if stacked:
                left = left + length
            else:
                ax.bar_label(drawn, [f"{v:,.{digits}g}" if v < 1e4 else si(v, digits) for v in length], padding=3)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.14)
        if not logy:
            ax.xaxis.set_major_formatter(EngFormatter())


def heatmap(matrix: Any, unit="", xticks=None, yticks=None, annotate=False, signed=False, **frame: Any) -> None:
    """Rows down, columns across, dark is large; signed centres the colours on zero, annotate writes the values in."""
    m = np.asarray(matrix, dtype=float)
    if m.ndim != 2 or not m.size:
        raise ValueError(f"heatmap: a matrix is [rows, columns], got shape {list(m.shape)}")
    top = np.nanmax(np.abs(m)) or 1.0
    with _frame((SIZE[0], 4.4), **frame) as ax:
        look = dict(cmap="RdBu_r", vmin=-top, vmax=top) if signed else dict(cmap="Greys")
        drawn = ax.imshow(m, aspect="auto", interpolation="nearest", **look)
        ax.grid(visible=False)
        for put_ticks, labels, turn in ((ax.set_xticks, xticks, 45), (ax.set_yticks, yticks, 0)):
            if labels is not None:
                put_ticks(range(len(labels)), labels, rotation=turn, ha="right")
        low, high = drawn.get_clim()
        for (i, j), v in np.ndenumerate(m) if annotate else ():
            dark = abs(v) > 0.6 * top if signed else v > (low + high) / 2
            ax.text(j, i, f"{v:.2g}", ha="center", va="center", fontsize=8, color="white" if dark else "black")
        if unit:
            ax.figure.colorbar(drawn, ax=ax, label=unit)


def table(rows: Iterable[Any], columns: Sequence[str] | None = None, digits: int = 4, caption: str = "") -> None:
    """Rows (mappings or dataclasses) as a table; numbers to `digits` figures, whole ones with thousands apart."""
    rows = [asdict(r) if is_dataclass(r) else dict(r) for r in rows]
    columns = list(columns or dict.fromkeys(k for r in rows for k in r))
    cells = [[_cell(r.get(c, ""), digits) for c in columns] for r in rows]
    numeric = [all(not isinstance(r.get(c), str) for r in rows) for c in columns]
    wide = [max([len(c), *(len(r[i]) for r in cells)]) for i, c in enumerate(columns)]
    fit = lambda r: "  ".join(t.rjust(w) if n else t.ljust(w) for t, w, n in zip(r, wide, numeric)).rstrip()
    side = [f' style="text-align:{"right" if n else "left"}"' for n in numeric]
    row = lambda tag, r: "<tr>" + "".join(f"<{tag}{s}>{html.escape(t)}</{tag}>" for t, s in zip(r, side)) + "</tr>"
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    page = f"<table>{title}<thead>{row('th', columns)}</thead><tbody>{''.join(row('td', r) for r in cells)}</tbody>"
    put("\n".join([*([caption] if caption else []), fit(columns), *map(fit, cells)]), html=f"{page}</table>")


def stack(layers: Sequence[tuple[str, str, str]], alt: str = "", ax: Any = None) -> None:
    """Boxes from the top layer down: (name, what it does, where it is here)."""
    fig, at = (None, ax) if ax is not None else axes("", "", size=(SIZE[0], 0.72 * len(layers) + 0.2))
    at.set_axis_off()
    at.set(xlim=(0, 10), ylim=(-len(layers), 0))
    for i, (name, what, where) in enumerate(layers):
        shade = 0.97 - 0.25 * i / max(1, len(layers) - 1)
        at.add_patch(_box(0.1, -i - 0.88, 9.8, 0.72, shade))
        at.text(0.35, -i - 0.52, name, weight="bold", va="center", fontsize=11)
        at.text(2.7, -i - 0.52, what, va="center", fontsize=9.5)
        at.text(9.7, -i - 0.52, where, va="center", ha="right", fontsize=8.5, family="monospace")
        if i:
            at.annotate("", (5, -i - 0.17), (5, -i + 0.13), arrowprops=dict(arrowstyle="-|>", color="#444444"))
    if fig is not None:
        show(fig, alt or "The layers from top to bottom: " + "; ".join(f"{n}: {w} ({p})" for n, w, p in layers))


def si(value: float, digits: int = 3) -> str:
    """1234567 -> "1.23 M": thousands k, millions M, then G (1e9), T, P, E."""
    for limit, prefix in ((1e18, " E"), (1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if float("inf") > abs(value) >= limit * (1 - 0.5 * 10.0**-digits):
            return f"{float(f'{value / limit:.{digits}g}'):g}{prefix}"
    return f"{float(f'{value:.{digits}g}'):g}"


def _box(x: float, y: float, width: float, height: float, shade: float):
    from matplotlib.patches import FancyBboxPatch

    rounded = "round,pad=0,rounding_size=0.12"
    return FancyBboxPatch((x, y), width, height, boxstyle=rounded, facecolor=str(shade), edgecolor="#444444")


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return f"{value:,.{digits}g}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.{digits}g}"
    return str(value)
