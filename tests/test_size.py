"""The package stays compact: `make size` prints the code lines of each part, and fails over a ceiling.

Code lines have no blanks, comments or docstrings. The ceilings hold for the finished project; half is better.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "llmstack"
CEILINGS = {
    "ops": 2850,
    "architectures": 3200,
    "execution": 2950,
    "intensity": 1400,
    "hardware": 2400,
    "parallelism": 2200,
    "memory": 1200,
    "inference": 2600,
    "course": 1700,
    "the rest": 900,
}
MODULE_LINES = 300
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def code_lines(source: str) -> int:
    """Lines that hold a token of code: a docstring, a comment and a blank line hold none."""
    docs = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docs.update(range(first.lineno, first.end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT and token.string.strip():
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def sizes() -> dict[str, int]:
    total = dict.fromkeys(CEILINGS, 0)
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0]
        total[part if part in CEILINGS else "the rest"] += code_lines(path.read_text(encoding="utf-8"))
    return total


def long_modules() -> list[str]:
    lengths = {p: p.read_text(encoding="utf-8").count("\n") for p in PACKAGE.rglob("*.py")}
    return [f"{p.relative_to(PACKAGE)}: {n} lines" for p, n in lengths.items() if n > MODULE_LINES]


def test_counting_skips_docstrings_comments_and_blanks():
    assert code_lines('"""Doc\nstring."""\n\n# comment\nx = 1  # why\ny = """a\nb"""\n') == 3


def test_packages_stay_under_their_ceilings():
    over = {part: n for part, n in sizes().items() if n > CEILINGS[part]}
    assert not over, f"code lines over the ceiling {CEILINGS}: {over}; simplify before you ask for more"


def test_no_module_is_over_300_lines():
    assert not long_modules()


if __name__ == "__main__":
    for part, n in sizes().items():
        print(f"{part:<14}{n:>6} of {CEILINGS[part]:>5}")
    if long_modules() or any(n > CEILINGS[part] for part, n in sizes().items()):
        sys.exit("\n".join(["over the ceiling", *long_modules()]))
