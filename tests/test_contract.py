"""The floors of the house, seen from its own files: imports run downwards only, and Triton enters at one door."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint(root: Path) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", "--config", "pyproject.toml"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, encoding="utf-8")


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "lint-imports").exists(), reason="import-linter is not beside Python"
)
def test_imports_run_downwards_only(tmp_path):
    """The contract holds; and on a copy where the lowest floor imports a higher one it is seen to break."""
    assert lint(ROOT).returncode == 0, lint(ROOT).stdout
    shutil.copytree(ROOT / "llmstack", tmp_path / "llmstack")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    softmax = tmp_path / "llmstack/ops/softmax.py"
    softmax.write_text(softmax.read_text(encoding="utf-8") + "\nimport llmstack.course\n", encoding="utf-8")
    broken = lint(tmp_path)
    assert broken.returncode == 1 and "llmstack.ops is not allowed to import llmstack.course" in broken.stdout


def test_triton_is_imported_in_one_place():
    doors = set()
    for path in (ROOT / "llmstack").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "triton" for name in names):
                doors.add(path.relative_to(ROOT / "llmstack").as_posix())
    assert doors - {"ops/aot.py"} == {"ops/_triton.py"}  # compiling for other machines needs Triton's compiler itself
