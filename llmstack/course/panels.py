"""Panels that live in the notebook: labs, questions, progress bars.

A live panel needs a kernel; a page has none. So a panel is one output with two forms: the widget, which JupyterLab
prefers while its kernel runs, and a still one (PNG or HTML), which is what llmstack.course.execute keeps in the stored
notebook. Callbacks set the value of an Image or HTML widget and print nothing, as strict nbval needs.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

from llmstack.course.show import put


class Lab:
    """A running panel. `set(name=value)` moves its controls as a hand would; `png` and `caption` are what it shows."""

    def __init__(self, draw: Callable[..., tuple[Any, str]], title: str, controls: Mapping[str, Any]):
        import ipywidgets as W

        self.draw, self.title = draw, title
        self.controls = {name: _control(W, name, spec) for name, spec in controls.items()}
        self._image = W.Image(format="png", layout=W.Layout(max_width="100%", height="auto", align_self="flex-start"))
        self._caption = W.HTML()
        self._redraw()
        for control in self.controls.values():
            control.observe(self._redraw, names="value")
        heading = W.HTML(f"<b>{html.escape(title)}</b>")
        self.box = W.VBox([heading, *self.controls.values(), self._image, self._caption])
        self.box.add_class("llmstack-lab")

    def _redraw(self, change: Any = None) -> None:
        from llmstack.course import plots

        try:
            figure, self.caption = self.draw(**{name: c.value for name, c in self.controls.items()})
            self.png = plots.save_png(figure, alt=self.caption)
            self._image.value = self.png
            self._caption.value = html.escape(self.caption)
        except ValueError as error:  # a setting that the package refuses: say why, keep the last picture
            if change is None:
                raise
            self._caption.value = f"<b>Not possible:</b> {html.escape(str(error))}"

    def set(self, **values: Any) -> Lab:
        for name, value in values.items():
            if name not in self.controls:
                raise KeyError(f"no control {name!r}; there are {', '.join(self.controls)}")
            self.controls[name].value = value
        return self

    def show(self) -> None:
        put(f"Lab: {self.title}. {self.caption}", widget=self.box, png=self.png, alt=self.caption)

    def _ipython_display_(self) -> None:
        """Nothing: lab() has shown it already."""

    def __repr__(self) -> str:
        return f"Lab({self.title!r})"


def lab(draw: Callable[..., tuple[Any, str]], title: str = "", /, **controls: Any) -> Lab:
    """Show a panel: controls above a figure that follows them.

    draw(**values) -> (matplotlib Figure, caption); the caption states in words and numbers what the figure shows.
    controls: a name (underscores become spaces) and
        (low, high), (low, high, step), (low, high, step, start)   a slider, whole numbers or not as low and step are
        a list or a mapping label -> value                          a menu; it starts at the first
        a bool, or any ipywidgets widget with a value

    labs.…() in this package are such panels; `lab(lambda n: (figure, "…"), "Title", n=(1, 8))` makes your own.
    """
    panel = Lab(draw, title or getattr(draw, "__name__", "lab").replace("_", " "), controls)
    panel.show()
    return panel


class Check(NamedTuple):
    right: bool
    says: str


class Question:
    """A question with its answer. `check(x)` takes a number, a text from the form, or the index of a choice."""

    def __init__(self, prompt, answer, choices, unit, tolerance, hints):
        if choices is not None and not (isinstance(answer, int) and 0 <= answer < len(choices)):
            raise ValueError(f"answer = {answer!r} must be the index of one of the {len(choices)} choices")
        if choices is None and (isinstance(answer, bool) or not isinstance(answer, Real) or not isfinite(answer)):
            raise ValueError(
                f"answer = {answer!r} must be a number, or give choices=[…] and the index of the right one"
            )
        if wrong := [key for key in hints or {} if not isinstance(key, Real | None)]:
            raise ValueError(f"hints for {wrong}: a hint stands under a number, the index of a choice, or None")
        self.prompt, self.answer, self.choices = prompt, answer, choices
        self.unit, self.tolerance, self.hints = unit, tolerance, dict(hints or {})

    def check(self, given: Any) -> Check:
        if self.choices is not None:
            given = self.choices.index(given) if given in self.choices else given
            if given == self.answer:
                return Check(True, f"Right. {self.hints.get(self.answer, '')}".strip())
            return Check(False, f"Not that one. {self.hints.get(given, self.hints.get(None, ''))}".strip())
        value = _number(given)
        if value is None:
            return Check(False, f"Write a number{self._in_unit()}, such as 1500, 1.5e3 or 1/3.")
        if _near(value, self.answer, self.tolerance):
            return Check(True, f"Right: {self.answer:g}{self._with_unit()}.")
        hint = next((h for v, h in self.hints.items() if v is not None and _near(value, v, self.tolerance)), "")
        return Check(False, f"Not {value:g}{self._with_unit()}. {hint or self._guess(value)}".strip())

    def _guess(self, value: float) -> str:
        """What was probably mistaken, from how far off the answer is."""
        if None in self.hints:
            return self.hints[None]
        if not self.answer or not value:
            return ""
        if value * self.answer < 0:
            return "The size may be right, the sign is not."
        ratio = max(value / self.answer, self.answer / value)
        for factor, says in FACTORS.items():
            if _near(ratio, factor, max(self.tolerance, 0.01)):
                return f"You are a factor of {factor:g} {'over' if value > self.answer else 'under'}. {says}"
        return "Too large." if value > self.answer else "Too small."

    def _with_unit(self) -> str:
        return f" {self.unit}" if self.unit else ""

    def _in_unit(self) -> str:
        return f" in {self.unit}" if self.unit else ""

    def show(self) -> None:
        put(self._plain(), widget=self.form(), html=self._page())

    def form(self) -> Any:
        """The widget: a menu of choices or a field, and below it the reply to what was given."""
        import ipywidgets as W

        if self.choices is not None:
            field = W.RadioButtons(options=list(self.choices), index=None, layout=W.Layout(width="max-content"))
        else:
            hint = f"a number{self._in_unit()}, then Enter"
            field = W.Text(placeholder=hint, continuous_update=False, layout=W.Layout(width="22em"))
        reply = W.HTML()

        def answered(change):
            if change["new"] not in (None, ""):
                result = self.check(change["new"])
                reply.value = f"<b>{'✓' if result.right else '✗'}</b> {html.escape(result.says)}"

        field.observe(answered, names="value")
        box = W.VBox([W.HTML(f"<b>Question.</b> {html.escape(self.prompt)}"), field, reply])
        return box.add_class("llmstack-question")

    def _listed(self) -> list[str]:
        return [f"{chr(97 + i)}) {choice}" for i, choice in enumerate(self.choices or ())]

    def _plain(self) -> str:
        return "\n  ".join([f"Question: {self.prompt}", *self._listed()])

    def _page(self) -> str:
        asked = "<br>".join([f"<b>Question.</b> {html.escape(self.prompt)}", *map(html.escape, self._listed())])
        right = f"{self.answer:g}{self._with_unit()}" if self.choices is None else self._listed()[self.answer]
        return f"<div><p>{asked}</p><details><summary>Answer</summary>{html.escape(right)}</details></div>"

    def _ipython_display_(self) -> None:
        """Nothing: question() has shown it already."""

    def __repr__(self) -> str:
        return f"Question({self.prompt!r})"


def question(
    prompt: str,
    *,
    answer: float | int,
    choices: Sequence[str] | None = None,
    unit: str = "",
    tolerance: float = 0.01,
    hints: Mapping[Any, str] | None = None,
) -> Question:
    """Show a question that is answered in the notebook: a choice (answer is its index), or a number with a unit.

    tolerance is relative. hints: what was probably mistaken, by the index of the wrong choice or the wrong number; the
    hint of None is for every other; the hint of the right choice is added to "Right.". Without a hint a number that is
    off by a usual factor (2, 8, 1000, …) is told so. Raises ValueError when the answer does not fit the form.
    """
    asked = Question(prompt, answer, choices, unit, tolerance, hints)
    asked.show()
    return asked


FACTORS = {
    2: "Is a multiply and an add counted as two operations? Does a value take two bytes or four?",
    4: "Does a value take four bytes?",
    8: "Bits or bytes?",
    1.073741824: "GB is 1e9 bytes, GiB is 2^30.",
    1e3: "Check the prefix: kilo, mega, giga, tera go in steps of 1000.",
    1e6: "Check the prefix: kilo, mega, giga, tera go in steps of 1000.",
    1e9: "Check the prefix: kilo, mega, giga, tera go in steps of 1000.",
}


def progress(iterable: Iterable, label: str = "", total: int | None = None) -> Iterable:
    """The items of `iterable` under a bar: tqdm's, in a notebook as a widget that stores no text."""
    from tqdm import tqdm

    if not _in_notebook():
        yield from tqdm(iterable, desc=label, total=total, leave=False)
        return
    from tqdm.notebook import tqdm as tqdm_notebook

    bar = tqdm_notebook(iterable, desc=label, total=total, display=False)
    put("", widget=bar.container, html="")
    yield from bar


def _in_notebook() -> bool:
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _control(W: Any, name: str, spec: Any) -> Any:
    label = dict(description=name.replace("_", " "), style={"description_width": "9em"}, layout=W.Layout(width="36em"))
    if isinstance(spec, W.Widget):
        return spec
    if isinstance(spec, bool):
        return W.Checkbox(value=spec, indent=False, description=label["description"])
    numbers = isinstance(spec, tuple) and 2 <= len(spec) <= 4 and all(isinstance(x, Real) for x in spec)
    if numbers and spec[0] <= spec[1]:
        low, high, step, start = (*spec, *(None,) * (4 - len(spec)))
        step = step or (1 if isinstance(low, int) and isinstance(high, int) else (high - low) / 50)
        start = low if start is None else start
        kind = W.IntSlider if isinstance(low, int) and isinstance(step, int) else W.FloatSlider
        return kind(value=start, min=low, max=high, step=step, **label)
    if isinstance(spec, list | Mapping) and spec:
        options = list(spec.items()) if isinstance(spec, Mapping) else spec
        return W.Dropdown(options=options, **label)
    raise ValueError(f"control {name} = {spec!r}: give (low, high, step, start), a list, a mapping, a bool or a widget")


def _number(given: Any) -> float | None:
    """A number, or a text that holds one (or a fraction) and then at most a unit. None for all else."""
    if isinstance(given, bool):
        return None
    number = r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?"
    text = re.sub(r"(?<=\d)(,(?=\d{3})|_(?=\d))", "", str(given))  # thousands
    match = re.fullmatch(rf"\s*({number})(?:\s*/\s*({number}))?\D*", text)
    if not match or not float(match[2] or 1):
        return None
    value = float(match[1]) / float(match[2] or 1)
    return value if isfinite(value) else None


def _near(value: float, wanted: float, tolerance: float) -> bool:
    return abs(value - wanted) <= tolerance * abs(wanted) + 1e-12
