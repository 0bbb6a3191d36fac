"""Every notebook keeps the form of a lesson (CONTRIBUTING.md), stores its outputs, and is free of this machine."""

import ast
import re
from functools import cache
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted(p for p in (ROOT / "chapters").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
START = "00_start_here.ipynb"
PROSE = (40, 160)  # words a code cell, on average
LINES = 30
MACHINE = re.compile(r"/(?:home|root|Users|work|tmp)/\w|[A-Z]:\\Users")

pytestmark = pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.relative_to(ROOT / "chapters").as_posix())


@cache
def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code(path: Path) -> list:
    return [c for c in read(path).cells if c.cell_type == "code" and c.source.strip()]


def prose(path: Path) -> list[str]:
    return [c.source for c in read(path).cells if c.cell_type == "markdown"]


def outputs(path: Path):
    return [o for c in code(path) for o in c.outputs]


def calls(path: Path, name: str) -> int:
    """How often a notebook calls course.question, labs.something, …"""
    return sum(len(re.findall(rf"\b{name}\(", c.source)) for c in code(path))


def test_it_is_a_valid_notebook_for_any_python3(path):
    nbformat.validate(read(path))
    assert read(path).metadata.kernelspec.name == "python3"
    ids = [c.id for c in read(path).cells]
    assert len(set(ids)) == len(ids)
    kept = set(read(path).metadata) - {"kernelspec", "language_info"}
    assert not kept, f"the notebook stores {kept}; `make chapters` writes it without"
    assert not any("execution" in c.metadata for c in code(path)), "execution times do not belong in the repository"


def test_outputs_are_stored_whole_and_free_of_errors(path):
    counts = [c.execution_count for c in code(path)]
    assert counts == list(range(1, len(counts) + 1)), "run from top to bottom: make chapters"
    kinds = {o.output_type for o in outputs(path)}
    assert "error" not in kinds
    assert not [o.text for o in outputs(path) if o.output_type == "stream" and o.name == "stderr"]
    assert kinds & {"display_data", "execute_result"}, "no figure is stored"


def test_a_page_without_a_kernel_shows_everything(path):
    shown = [o.data for o in outputs(path) if "data" in o]
    assert not any("widget" in kind for data in shown for kind in data), "make chapters stores the still pictures"
    assert any("image/png" in data for data in shown)
    silent = [d for d in shown if "image/png" in d and d.get("text/plain", "").startswith("<")]
    assert not silent, "a picture has a text that says what it shows: plots' alt="


def test_outputs_name_no_path_of_a_machine(path):
    for cell in code(path):
        for output in cell.outputs:
            texts = [output.get("text", "")] + [t for k, t in output.get("data", {}).items() if k.startswith("text/")]
            found = [MACHINE.search(t) for t in texts if MACHINE.search(t)]
            assert not found, f"cell {cell.id} shows {found[0].group()}"


def test_it_opens_with_its_question_its_needs_and_its_time(path):
    first = prose(path)[0]
    assert read(path).cells[0].cell_type == "markdown" and first.startswith("# ")
    assert "?" in first, "which question does it answer?"
    assert re.search(r"\bneed|\bread\b", first), "what has one to have read?"
    assert re.search(r"\d+ minutes|half an hour|an hour", first), "how long does it take?"
    assert "survey" in first.lower(), "which section of the surveys is it about?"


def test_it_asks_and_lets_try(path):
    assert calls(path, "labs\\.\\w+") + calls(path, r"course\.lab") >= 1, "a section has a lab"
    assert calls(path, r"course\.question") >= 2, "a section asks two questions"
    for cell in code(path):
        if "course.question(" in cell.source:
            assert "hints=" in cell.source, f"cell {cell.id}: a wrong answer says what was probably mistaken"


def test_it_ends_with_claims_exercises_and_references(path):
    cells = read(path).cells
    headings = [(i, h.lower()) for i, c in enumerate(cells) for h in re.findall(r"^#+ (.+)$", c.source, re.MULTILINE)]
    headings = [(i, h) for i, h in headings if cells[i].cell_type == "markdown"]
    assert [h for _, h in headings[-2:]] == ["exercises", "references"], f"the last headings: {headings[-3:]}"
    claims = [i for i, c in enumerate(cells) if c.cell_type == "code" and "course.claim(" in c.source]
    assert claims and claims[-1] < headings[-2][0], "the claims of the section stand before its exercises"


def test_prose_and_code_keep_their_balance(path):
    words = sum(len(re.findall(r"\w+", text)) for text in prose(path))
    low, high = PROSE
    assert low <= words / len(code(path)) <= high, f"{words} words for {len(code(path))} code cells"
    lengths = {c.id: len(c.source.splitlines()) for c in code(path)}
    assert max(lengths.values()) <= LINES, f"cells over {LINES} lines: {[i for i, n in lengths.items() if n > LINES]}"


@cache
def package_names() -> frozenset[str]:
    """Public functions and classes at the top of the package's modules."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    trees = [ast.parse(p.read_text(encoding="utf-8")) for p in (ROOT / "llmstack").rglob("*.py")]
    return frozenset(n.name for t in trees for n in t.body if isinstance(n, kinds) and not n.name.startswith("_"))


def test_it_defines_nothing_that_the_package_has(path):
    for cell in code(path):
        plain = re.sub(r"^(\s*)[%!]", r"\1# ", cell.source, flags=re.MULTILINE)
        defined = {n.name for n in ast.walk(ast.parse(plain)) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert not defined & package_names(), f"cell {cell.id} defines {defined & package_names()} again"


def test_what_it_links_to_exists(path):
    for text in prose(path):
        for target in re.findall(r"\]\(([^)#:]+\.ipynb)", text):
            assert (path.parent / target).resolve().is_file(), f"{path.name} links to {target}"
