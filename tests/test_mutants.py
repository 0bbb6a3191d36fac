"""The planted faults: which edits of a line there are, where they stand, and what is left alone."""

import ast

import faults
import pytest

SOURCE = '''"""Doc with 1 + 2."""
from a import b

def f(x: int | None, n: int = 3, seed: int = 5, *, keep: bool = True, steps: int = 7) -> int | None:
    """Doc."""
    if x < n and not keep:
        raise ValueError(f"x = {x + 1} is below 3")
    return g(x, n) - 0.5 * max(x, 1)  # Größe
'''
EDITS = {
    "comparison": ["<= for <"],
    "condition": ["or for and", "(not (x < n and not keep)) for x < n and not keep"],
    "off by one": ["4 for 3", "2 for 1"],
    "default or flag": ["False for True"],
    "constant": ["1.0 for 0.5"],
    "arithmetic": ["/ for *", "+ for -"],
    "dropped term": ["0.5 for 0.5 * max(x, 1)", "g(x, n) for g(x, n) - 0.5 * max(x, 1)"],
    "swapped arguments": ["n, x for x, n"],
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    return tmp_path


def test_each_kind_of_edit_and_no_other(tree):
    (tree / "f.py").write_text(SOURCE, encoding="utf-8")
    found = faults.Finder("f.py").found
    assert {kind: [f"{f.new} for {f.old}" for f in found if f.kind == kind] for kind in EDITS} == EDITS
    assert len(found) == sum(map(len, EDITS.values()))
    for fault in found:
        ast.parse(fault.plant(SOURCE.encode()))
    line, was, now = next(fault for fault in found if fault.kind == "comparison").diff()
    assert (line, was, now) == (6, "if x < n and not keep:", "if x <= n and not keep:")


def test_digits_of_numbers_and_not_of_words(tree):
    text = '[h100-80]\ntitle = "H100 80 GB"  # 3 ö\npeaks = { bf16 = 9e3, int8 = 10 }\n'
    (tree / "t.toml").write_text(text, encoding="utf-8")
    planted = [fault.plant(text.encode()).decode() for fault in faults.numbers("t.toml")]
    assert len(planted) == 2 and all(new.startswith(text[:40]) and len(new) == len(text) for new in planted)


def test_an_edit_elsewhere_leaves_the_draw(tree, monkeypatch):
    monkeypatch.setattr(faults, "equivalent", lambda path: [])
    folder = tree / "llmstack"
    folder.mkdir()
    rows = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(30))
    drawn = []
    for source in (rows, "import math\n\n\n" + rows.replace("x + 7\n", "x - 70\n")):
        (folder / "g.py").write_text(source, encoding="utf-8")
        drawn.append([fault.diff()[1:] for fault in faults.draw(0, 29, "")])
    others = [[diff for diff in draw if "7" not in diff[0]] for draw in drawn]
    assert len(others[0]) >= 20 and others[0][:20] == others[1][:20]
