"""Small edits that an author could make by mistake: what tests/mutants.py plants.

Finder(path).found      in a Python file, from its syntax tree: the text around an edit stays as it is
numbers(path)           one digit of each number of a TOML file
"""

import ast
import random
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWAPS = {ast.Add: "+-", ast.Sub: "-+", ast.Mult: "*/", ast.Div: "/*", ast.FloorDiv: ("//", "/"), ast.Pow: ("**", "*")}
SWAPS |= {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
SWAPS |= {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.And: ("and", "or"), ast.Or: ("or", "and")}
UNDRAWN = ("data/systems.toml", "data/claims.toml")  # prose; values that are compared within their own tolerance
UNORDERED = ("isinstance", "getattr", "hasattr", "setattr", "max", "min")  # errors at once, or the same
CHOSEN = ("seed", "steps")
TERMS = ast.Add | ast.Sub | ast.Mult


@dataclass(frozen=True)
class Fault:
    """`old` at this byte of the file becomes `new`."""

    path: str
    start: int
    old: str
    new: str
    kind: str

    def plant(self, source: bytes) -> bytes:
        end = self.start + len(self.old.encode())
        assert source[self.start : end].decode() == self.old
        return source[: self.start] + self.new.encode() + source[end:]

    def diff(self) -> tuple[int, str, str]:
        """The line's number, the lines of the edit before and after, each joined to one."""
        source = (ROOT / self.path).read_bytes()
        start = source.rfind(b"\n", 0, self.start) + 1
        behind = source[source.find(b"\n", self.start + len(self.old.encode())) :]
        sides = []
        for text in (source, self.plant(source)):
            lines = text.removesuffix(behind)[start:].decode().splitlines()
            sides.append(" ".join(line.strip() for line in lines))
        return source[: self.start].count(b"\n") + 1, *sides


class Finder(ast.NodeVisitor):
    """All faults of one Python file. Docstrings, annotations and messages of errors are left alone."""

    def __init__(self, path: str):
        self.path, self.source = path, (ROOT / path).read_bytes()
        self.lines = [0]
        for line in self.source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.found: list[Fault] = []
        self.visit(ast.parse(self.source))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.source[start:end].decode()

    def add(self, start: int, end: int, new: str, kind: str) -> None:
        self.found.append(Fault(self.path, start, self.text(start, end), new, kind))

    def between(self, left: ast.AST, op: ast.AST, right: ast.AST, kind: str) -> None:
        """Another operator between two operands."""
        if type(op) in SWAPS:
            old, new = SWAPS[type(op)]
            gap = self.span(left)[1]
            at = gap + self.source[gap : self.span(right)[0]].index(old.encode())
            self.add(at, at + len(old), new, kind)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        sides = (node.left, node.right)
        if any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in sides):
            return
        if any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides):
            return
        self.between(node.left, node.op, node.right, "arithmetic")
        if isinstance(node.op, TERMS):
            self.add(*self.span(node), self.text(*self.span(node.left)), "dropped term")

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            self.between(left, op, right, "comparison")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        self.between(node.values[0], node.op, node.values[1], "condition")

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.generic_visit(node)
        start, end = self.span(node.test)
        self.add(start, end, f"(not ({self.text(start, end)}))", "condition")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in UNORDERED:
            return
        if len(node.args) > 1 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            (start, a), (b, end) = self.span(node.args[0]), self.span(node.args[1])
            first, second = self.text(start, a), self.text(b, end)
            if first != second:
                self.add(start, end, second + self.text(a, b) + first, "swapped arguments")

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "frozen":
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(*self.span(node), str(not node.value), "default or flag")
        elif isinstance(node.value, int):
            self.add(*self.span(node), str(node.value + 1), "off by one")
        elif isinstance(node.value, float):
            self.add(*self.span(node), repr(node.value * 2 or 0.1), "constant")

    def visit_arg(self, node: ast.arg) -> None:
        """Annotations are no code."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (node.args, *node.decorator_list, *node.body):
            self.visit(part)

    def visit_arguments(self, node: ast.arguments) -> None:
        """Defaults, but for those that have no right value: which random numbers, how many steps."""
        names = [arg.arg for arg in (node.posonlyargs + node.args)[-len(node.defaults) :]] if node.defaults else []
        names += [arg.arg for arg in node.kwonlyargs]
        for name, default in zip(names, node.defaults + node.kw_defaults):
            if default is not None and name not in CHOSEN:
                self.visit(default)

    visit_IfExp = visit_If
    visit_Raise = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_arg


def numbers(path: str) -> list[Fault]:
    """One digit of each number of a table, outside of its words."""
    text = (ROOT / path).read_text(encoding="utf-8")
    words = r'"""[\s\S]*?"""|"[^"\n]*"|\'[^\'\n]*\'|#[^\n]*|^\[.*\]$|[A-Za-z_][\w.-]*'
    found = []
    for match in re.finditer(rf"(?m){words}|(\d[\d_.]*)", text):
        if match[1]:
            line = text[text.rfind("\n", 0, match.start()) + 1 : match.end()]
            at = random.Random(line).choice([i for i, c in enumerate(match[1]) if c.isdigit()])
            digit = match[1][at]
            start = len(text[: match.start(1) + at].encode())
            found.append(Fault(path, start, digit, str(int(digit) % 9 + 1), "digit"))
    return found


def part_of(path: str) -> str:
    folders = path.split("/")
    return folders[0] if folders[0] == "data" or len(folders) == 2 else folders[1]


def faults_of(name: str) -> list[Fault]:
    found = Finder(name).found if name.endswith(".py") else numbers(name)
    if name.startswith("llmstack/course"):  # sizes and places on a page are looked at
        return [fault for fault in found if fault.kind not in ("off by one", "constant", "swapped arguments")]
    return found


def rank(fault: Fault, seed: int) -> bytes:
    """Where a fault stands in the draw: by its own words, so that an edit elsewhere leaves it where it is."""
    _, was, now = fault.diff()
    return sha256(f"{seed} {fault.path} {was} {now}".encode()).digest()


def draw(seed: int, n: int, only: str) -> list[Fault]:
    """n faults, one part of the package after the other, so that small parts are not forgotten; one on a line."""
    parts: dict[str, dict[tuple, Fault]] = {}
    for path in sorted(chain(ROOT.glob("llmstack/**/*.py"), ROOT.glob("data/*.toml"))):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(only) or name in UNDRAWN:
            continue
        found = [fault for fault in faults_of(name) if fault.diff()[1:] not in equivalent(name)]
        found.sort(key=lambda fault: rank(fault, seed), reverse=True)
        parts.setdefault(part_of(name), {}).update({(name, fault.diff()[0]): fault for fault in found})
    turns = [sorted(by_line.values(), key=lambda fault: rank(fault, seed)) for by_line in parts.values()]
    return [fault for fault in chain.from_iterable(zip_longest(*turns)) if fault][:n]


@cache
def equivalent(path: str) -> list[tuple[str, str]]:
    rows = tomllib.loads((ROOT / "tests/mutants_equivalent.toml").read_text(encoding="utf-8"))["fault"]
    return [(row["was"], row["now"]) for row in rows if row["path"] == path]
