"""The ledgers are whole, and whatever they call done exists, runs in a chapter, and passes its test.

With LLMSTACK_JUNIT set to a JUnit file of the last run, the tests that rows name must have passed there; files beside
it (the slow lane's) count as well.
"""

import ast
import json
import os
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmstack import facts

ROOT = Path(__file__).parents[1]
COUNTS = {  # category: survey A, survey B
    "architectures": (55, 30),
    "execution modes": (29, 17),
    "operational intensity": (9, 7),
    "hardware": (17, 30),
    "parallelism": (10, 9),
    "memory": (2, 26),
    "inference": (5, 40),
}


def _with_entries_of_the_same(row: facts.System) -> facts.System:
    return facts.systems()[row.same_as] if row.same_as and not row.module else row


DONE = [_with_entries_of_the_same(row) for row in facts.systems().values() if row.status == "done"]


def test_every_system_is_listed():
    rows = facts.systems()
    assert list(rows) == [f"A{i:03}" for i in range(1, 128)] + [f"B{i:03}" for i in range(1, 160)]
    for category, (a, b) in COUNTS.items():
        assert Counter(r.survey for r in rows.values() if r.category == category) == Counter(A=a, B=b), category
    assert tuple(COUNTS) == facts.CATEGORIES
    for id, row in rows.items():
        assert row.name and row.what and row.section and row.survey == id[0], id
        assert row.status in facts.STATUSES, id
        assert not row.same_as or row.same_as in rows and not rows[row.same_as].same_as, id


def test_every_claim_is_listed():
    rows = facts.claims()
    assert list(rows) == [f"AC-{i:02}" for i in range(1, 33)] + [f"BC-{i:02}" for i in range(1, 55)]
    kinds = Counter(_kind(row.finding) for row in rows.values())
    assert kinds == {"right": 56, "doubtful": 17, "unverifiable": 5, "wrong": 4, "slip": 4}
    for id, row in rows.items():
        assert row.says and row.section and row.survey == id[0], id
        assert row.verdict in facts.VERDICTS and row.status in facts.STATUSES, id
        assert (row.verdict == "todo") == (row.status == "todo"), id
        assert row.value is None or row.function and row.unit, id
        assert row.verdict not in facts.LESS or row.why, f"{id}: a verdict of {row.verdict!r} says why"
        assert row.verdict != "reproduced" or row.value is not None, f"{id}: reproduced, but there is no value"


def test_readers_see_no_number_from_memory():
    """A value has a source, or the ledger says that none was found."""
    for name in ("claims", "systems"):
        text = (ROOT / "data" / f"{name}.toml").read_text(encoding="utf-8")
        assert "†" not in text and "quoted from memory" not in text, name


def _kind(finding: str) -> str:
    words = dict.fromkeys(("imprecise", "overstated", "doubtful", "inconsistent"), "doubtful")
    words |= dict.fromkeys(("qualitative", "unverifiable", "unconfirmed", "plausible"), "unverifiable")
    words |= dict.fromkeys(("translation", "source", "typo"), "slip")
    if "wrong" in finding:
        return "wrong"
    return next((kind for word, kind in words.items() if finding.startswith(word)), "right")


def missing(row: facts.System) -> list[str]:
    """What a done row names and there is not."""
    found = []
    if not row.module or not find_spec(row.module):
        found.append(f"{row.id}: module {row.module!r} does not exist")
    if row.heading not in headings(row.notebook):
        found.append(f"{row.id}: {row.notebook!r} has no heading {row.heading!r}")
    absent = [test for test in row.tests if not _test_exists(test)]
    if absent or not row.tests:
        found.append(f"{row.id}: no test {absent or ''}; write it as tests/file.py::test_name")
    return found


def test_what_is_done_exists():
    assert not list(chain.from_iterable(map(missing, DONE)))


def test_what_is_not_there_is_missed():
    row = replace(DONE[0], module="llmstack.nothing", heading="Nothing", test="tests/test_ledger.py::test_nothing")
    assert [line.partition(": ")[2].split()[0] for line in missing(row)] == ["module", f"{row.notebook!r}", "no"]


@pytest.mark.skipif("LLMSTACK_JUNIT" not in os.environ, reason="LLMSTACK_JUNIT is the path of a run's JUnit file")
def test_what_is_done_passed():
    ran, wrong = junit(os.environ["LLMSTACK_JUNIT"]), []
    for row, test in [(done, test) for done in DONE for test in done.tests]:
        file, _, name = test.partition("::")
        outcomes = ran.get((file.removesuffix(".py").replace("/", "."), name))
        if outcomes is None and "slow" in marks(file, name):
            continue  # of the slow lane, which has not run
        if not outcomes or "failed" in outcomes:
            wrong.append(f"{row.id}: {test} did not pass in the last run")
        elif "passed" not in outcomes:
            wrong.append(f"{row.id}: {test} was only skipped")
    assert not wrong


@pytest.mark.parametrize("id", [id for id, claim in facts.claims().items() if claim.function])
def test_claims_agree(id):
    result, claim = facts.compute_claim(id), facts.claims()[id]
    assert result.ours
    if claim.value is not None:
        assert result.agrees, f"{id}: {claim.function} gives {result.ours}, not {claim.value} {claim.unit}"


@cache
def headings(notebook: str) -> list[str]:
    """The headings in a notebook's markdown cells, without their #."""
    path = ROOT / notebook
    if not path.is_file():
        return []
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    lines = [line for c in cells if c["cell_type"] == "markdown" for line in "".join(c["source"]).splitlines()]
    return [line.lstrip("#").strip() for line in lines if line.startswith("#")]


@cache
def _functions(file: str) -> dict[str, list[str]]:
    """The test functions of a file (Class::name inside classes), each with the marks above it."""
    found = {}
    if not (ROOT / file).is_file():
        return found
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for f in inside:
            if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) and f.name.startswith("test"):
                found[prefix + f.name] = [ast.unparse(d) for d in f.decorator_list]
    return found


def marks(file: str, name: str) -> str:
    return " ".join(_functions(file).get(name, []))


def _test_exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return name in _functions(file)


@cache
def junit(path: str) -> dict[tuple[str, str], set[str]]:
    """(module, test without its parameters) -> outcomes, from a JUnit file and those beside it."""
    outcomes = {}
    for file in {Path(path), *Path(path).parent.glob("*.xml")}:
        for case in ElementTree.parse(file).iter("testcase"):
            tags = {child.tag for child in case}
            outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
            module, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
            outcomes.setdefault((module, name), set()).add(outcome)
    return outcomes


def test_headings_tests_and_junit_are_read(tmp_path, monkeypatch):
    """The readers above, on files made for them."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    cells = [{"cell_type": "markdown", "source": ["## Does a norm\n", "text"]}, {"cell_type": "code", "source": "# no"}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert headings("a.ipynb") == ["Does a norm"] and headings("b.ipynb") == []
    (tmp_path / "test_a.py").write_text("@pytest.mark.slow\ndef test_x(): ...\ndef helper(): ...\n", encoding="utf-8")
    assert _test_exists("test_a.py::test_x") and marks("test_a.py", "test_x") == "pytest.mark.slow"
    assert not _test_exists("test_a.py::helper") and not _test_exists("test_b.py::test_x")
    cases = '<testcase classname="tests.test_a" name="test_x[1]"/><testcase classname="tests.test_a" name="test_x[2]">'
    (tmp_path / "j.xml").write_text(f"<suite>{cases}<failure/></testcase></suite>", encoding="utf-8")
    assert junit(str(tmp_path / "j.xml")) == {("tests.test_a", "test_x"): {"passed", "failed"}}
