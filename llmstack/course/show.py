"""Code and claims on the page, as HTML with a short plain text beside it.

nbval compares both, so neither may hold a path of this machine, a time or a random id.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

IMPLEMENTATIONS = {"numpy": "np", "torch": "torch", "triton": "triton"}
TITLES = {"numpy": "NumPy", "torch": "PyTorch", "triton": "Triton"}
PRE = "margin:0;padding:.6em;overflow-x:auto;white-space:pre;font:11px/1.35 monospace;background:#f7f7f7;color:#111"


def put(text: str, *, html: str | None = None, png: bytes | None = None, alt: str = "", widget: Any = None) -> None:
    """Display one output in its plain form and richer ones; a page shows the richest that it can."""
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(text)
        return
    view = widget and {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    forms = {"text/plain": text, "text/html": html, "image/png": png, "application/vnd.jupyter.widget-view+json": view}
    metadata = {"image/png": {"alt": alt or text}} if png else {}
    display({kind: form for kind, form in forms.items() if form is not None}, raw=True, metadata=metadata)


def side_by_side(op: str, backward: bool = False) -> None:
    """Show one operation of llmstack.ops in columns, NumPy | PyTorch | Triton: those that exist.

    op: a file of ops ("rmsnorm"), or a function in one ("glu.swiglu"). backward adds the hand-written gradients.
    Raises ValueError when there is no such operation.
    """
    module, functions = _implementations(op)
    columns = []
    for name, fn in functions.items():
        parts = [*_kernels(fn, module), fn]
        gradient = getattr(module, f"{fn.__name__}_backward", None)
        if backward and gradient:
            parts += [*_kernels(gradient, module), gradient]
        code = "\n\n".join(_source(part) for part in dict.fromkeys(parts))
        share = 1 + 0.4 * (len(parts) > 1)  # a kernel's column is the wider one
        column = f'<div style="flex:{share} 1 0;min-width:15em"><b>{TITLES.get(name, name)}</b>{highlight(code)}</div>'
        columns.append(column)
    where = relative_path(module)
    page = f'<div style="display:flex;gap:.8em;overflow-x:auto;align-items:flex-start">{"".join(columns)}</div>'
    put(f"{op}: {' | '.join(functions)} ({where})", html=f"<div>{page}<small>{where}</small></div>")


def source(obj: Callable | ModuleType | type) -> None:
    """Show the source of a function, class, kernel or module, with its place in the package."""
    obj = getattr(obj, "fn", obj)  # a Triton kernel wraps its function
    name = getattr(obj, "__qualname__", getattr(obj, "__name__", ""))
    where = relative_path(obj)
    label = where if inspect.ismodule(obj) else f"{where}: {name}"
    put(f"source of {name} ({where})", html=f"<div><small>{html.escape(label)}</small>{highlight(_source(obj))}</div>")


def claim(id: str) -> None:
    """Compute a survey's claim and show its words, its value, ours, the verdict and why. Raises KeyError for an id."""
    from llmstack import facts

    result = facts.compute_claim(id)
    rows = {"The survey says": result.says, "Its value": result.survey_value, "Ours": result.ours}
    rows |= {"Verdict": result.verdict, "Why": result.why, "Note": result.note}
    rows = {k: str(v) for k, v in rows.items() if v not in (None, "")}
    cell = '<tr><th style="text-align:left;vertical-align:top">{}</th><td style="text-align:left">{}</td></tr>'
    body = "".join(cell.format(k, html.escape(v)) for k, v in rows.items())
    plain = "\n".join([f"Claim {id}", *(f"  {k + ':':<17}{v}" for k, v in rows.items())])
    put(plain, html=f'<table style="text-align:left"><caption><b>Claim {html.escape(id)}</b></caption>{body}</table>')


def relative_path(obj: Any) -> str:
    """Where an object's source stands, from the folder that holds the package: llmstack/ops/rmsnorm.py."""
    path = Path(inspect.getsourcefile(obj)).resolve()
    root = Path(__file__).resolve().parents[2]
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def highlight(code: str) -> str:
    """Python as HTML that needs no style sheet; plain escaped text where Pygments is absent."""
    try:
        from pygments import highlight as paint
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer
    except ImportError:
        return f'<pre style="{PRE}">{html.escape(code)}</pre>'
    return paint(code, PythonLexer(), HtmlFormatter(noclasses=True, prestyles=PRE, style="xcode"))


def _implementations(op: str) -> tuple[ModuleType, dict[str, Callable]]:
    file, _, prefix = op.partition(".")
    try:
        module = import_module(f"llmstack.ops.{file}")
    except ModuleNotFoundError as error:
        if error.name != f"llmstack.ops.{file}":
            raise
        known = sorted(p.stem for p in Path(import_module("llmstack.ops").__file__).parent.glob("[a-z]*.py"))
        raise ValueError(f"no operation {op!r} in llmstack.ops; there are {', '.join(known)}") from None
    named = {k: getattr(module, f"{prefix or file}_{end}", None) for k, end in IMPLEMENTATIONS.items()}
    found = {k: f for k, f in named.items() if callable(f)} if prefix else getattr(module, "IMPLS", None) or named
    found = {k: f for k, f in found.items() if callable(f)}
    if not found:
        raise ValueError(f"llmstack.ops.{file} has no functions {prefix or file}_np, _torch or _triton")
    return module, found


def _kernels(fn: Callable, module: ModuleType, seen: tuple = ()) -> list[Any]:
    """The Triton kernels and private helpers of the same file that a function names, those it calls first."""
    found: list[Any] = []
    code = getattr(getattr(fn, "fn", fn), "__code__", None)
    for name in _names(code) if code else ():
        part = getattr(module, name, None)
        local = name.startswith("_") and getattr(getattr(part, "fn", part), "__module__", "") == module.__name__
        if callable(part) and local and name not in seen:
            found += [*_kernels(part, module, (*seen, name)), part]
    return found


def _names(code: CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return [*code.co_names, *inner]


def _source(obj: Any) -> str:
    return inspect.getsource(getattr(obj, "fn", obj)).rstrip()
