"""The package stays compact and readable: `make size` prints how it is written, and fails over a ceiling.

Counted are tokens of code (no comments, no docstrings) and statements (logical lines, however they are broken), so
that joining or breaking lines changes nothing: only saying less does. The ceilings hold for the finished project;
half is better. Python 3.12 splits f-strings into tokens, so counts are compared on 3.11 only.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "llmstack"
CEILINGS = {
    "ops": 50_000,
    "architectures": 50_000,
    "execution": 50_000,
    "intensity": 21_000,
    "hardware": 31_000,
    "parallelism": 28_000,
    "memory": 15_000,
    "inference": 34_000,
    "course": 25_000,
    "course/labs": 35_000,
    "course/builds": 25_000,
    "claims": 11_000,
    "experiments": 24_000,
    "the rest": 12_000,
}
MODULE_LINES = 450
FUNCTION_STATEMENTS = 45
LONGER = {"_decode_kernel": 52}  # split decoding with two modes in one kernel
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(tree: ast.Module) -> set[int]:
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def statements(source: str) -> list[tuple[int, int]]:
    """(first line, tokens of code) of each logical line."""
    docs = docstring_lines(ast.parse(source))
    found, tokens = [], []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            if tokens:
                found.append((tokens[0].start[0], len(tokens)))
            tokens = []
        elif token.type not in SILENT and token.start[0] not in docs:
            tokens.append(token)
    return found


def modules() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def part_of(path: Path) -> str:
    *folders, _ = path.relative_to(PACKAGE).parts
    nested = "/".join(folders[:2])
    if nested in CEILINGS:
        return nested
    return folders[0] if folders and folders[0] in CEILINGS else "the rest"


def sizes() -> dict[str, int]:
    total = dict.fromkeys(CEILINGS, 0)
    for path, source in modules().items():
        total[part_of(path)] += sum(tokens for _, tokens in statements(source))
    return total


def over_the_limits() -> list[str]:
    """What is longer than it may be: parts, modules, functions."""
    found = [f"{part}: {n} tokens" for part, n in sizes().items() if n > CEILINGS[part]]
    for path, source in modules().items():
        name = path.relative_to(PACKAGE)
        lines = source.count("\n")
        if lines > MODULE_LINES:
            found.append(f"{name}: {lines} lines, at most {MODULE_LINES}")
        starts = [at for at, _ in statements(source)]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, FUNCTIONS):
                n = sum(node.body[0].lineno <= at <= node.end_lineno for at in starts)
                most = LONGER.get(node.name, FUNCTION_STATEMENTS)
                if n > most:
                    found.append(f"{name}: {node.name} has {n} statements, at most {most}")
    return found


def test_counting_skips_docstrings_comments_and_blanks():
    source = '"""Doc\nstring."""\n\n# comment\nx = 1  # why\ny = f(\n    a,\n    b)\n'
    assert statements(source) == [(5, 3), (6, 8)]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="f-strings are one token in Python 3.11 only")
def test_nothing_is_over_its_ceiling():
    assert not over_the_limits(), "simplify before you ask for more"


if __name__ == "__main__":
    for part, n in sizes().items():
        print(f"{part:<14}{n:>8,} of {CEILINGS[part]:>7,} tokens")
    if over_the_limits():
        sys.exit("\n".join(["over the limits:", *over_the_limits()]))
