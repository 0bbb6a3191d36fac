"""What notebooks need: source side by side, claims, questions, labs, one plot style.

    course.side_by_side("rmsnorm")            one operation in NumPy, torch and Triton, in columns
    course.source(Decoder.forward)            a function, class or module as it stands in the package
    course.claim("BC-12")                     a survey's claim: its words, its value, ours, the verdict
    course.question(prompt, answer=…, …)      a question answered in the notebook
    course.lab(draw, **controls)              a panel whose figure answers a what-if
    course.progress(iterable, "training")     a bar on long work
    course.gap(ours, theirs, 1e-6)            how far apart two results are, in words that hold on every processor
    course.plots.line(…), course.labs.positions(), course.look.reach(model, ids)

Each displays itself, live in JupyterLab and as a picture or HTML on a page without a kernel, and gives nbval one short
line of text to compare.
"""

from importlib import import_module

_FRONT = {"side_by_side": "show", "source": "show", "claim": "show", "question": "panels", "lab": "panels"}
_FRONT |= {"progress": "panels", "gap": "compare"}
_MODULES = ("labs", "look", "plots")

__all__ = ["claim", "gap", "lab", "labs", "look", "plots", "progress", "question", "side_by_side", "source"]


def __getattr__(name: str):
    if name in _FRONT:
        return getattr(import_module(f"llmstack.course.{_FRONT[name]}"), name)
    if name in _MODULES:
        return import_module(f"llmstack.course.{name}")
    raise AttributeError(f"module 'llmstack.course' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FRONT, *_MODULES])
