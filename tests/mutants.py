"""Would some test notice? `make mutants` plants faults, one at a time, and prints those that no test noticed.

    make mutants SEED=0 N=100        or: python tests/mutants.py --seed 0 --n 100 --only llmstack/ops

Seeds 0, 1 and 2 are those that are looked after: of 100 faults each at most 3 may survive.

A fault is a small edit that a tired author could make: another sign, < for <=, a number off by one or one digit,
a term dropped, two arguments or two words exchanged, a condition turned round. They are drawn in turn from each part
of the package and from the numbers of data/*.toml. Each is planted in a copy of the tree, and only the tests of that
file run: that with its name (ops/rope.py: tests/ops/test_rope.py) and those that MORE names, else those that import it.
A test that fails must pass without the fault, or it proves nothing.

results/mutants.jsonl has a line for each fault that was tried, so that an interrupted run goes on where it was; what
survived is tried again. Faults that change nothing that can be observed stand in mutants_equivalent.toml with a reason.
"""

import argparse
import ast
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from faults import ROOT, Fault, draw

PRELOADED = ["pytest", "hypothesis", "numpy", "torch", "scipy", "transformers"]  # once for all runs
SURVIVORS = 0.03  # the share that may survive
SECONDS = 150  # of a processor: a fault that makes its tests run longer is noticed
MORE = {  # files and folders whose tests have another name
    "llmstack/course/labs/": ["tests/course/test_lab_figures.py"],
    "llmstack/architectures/layers.py": ["tests/architectures/test_checkpoints.py"],
    "llmstack/intensity/operations.py": ["tests/intensity/test_counts.py", "tests/intensity/test_trace.py"],
    "llmstack/execution/claims": ["tests/test_ledger.py"],
    "llmstack/architectures/claims": ["tests/test_ledger.py"],
    "llmstack/architectures/moe_claims": ["tests/test_ledger.py"],
    "llmstack/intensity/claims": ["tests/test_ledger.py"],
    "data/accelerators.toml": ["tests/test_published.py", "tests/test_facts.py"],
    "data/models.toml": ["tests/test_published.py", "tests/test_config.py", "tests/intensity/test_params.py"],
    "data/claims.toml": ["tests/test_ledger.py"],
    "data/counts.toml": ["tests/test_published.py"],
    "data/scaling.toml": ["tests/test_published.py"],
    "data/layouts.toml": ["tests/architectures/test_checkpoints.py", "tests/architectures/test_parity.py"],
    "llmstack/architectures/ends.py": ["tests/architectures/test_decoder.py"],
    "llmstack/config.py": ["tests/architectures/test_checkpoints.py"],
}


@cache
def imports(test: str) -> set[str]:
    """Dotted names that a test file imports: modules, and names of modules."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / test).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def own_tests(path: str) -> list[str]:
    """The test files of one file, nearest first."""
    module = Path(path).with_suffix("")
    tests = [test.relative_to(ROOT).as_posix() for test in sorted(ROOT.glob("tests/**/test_*.py"))]
    more = [test for start, tests_of in MORE.items() if path.startswith(start) for test in tests_of]
    if path.startswith("data/"):
        reads = re.compile(rf'table\("{module.stem}"\)|\b{module.stem}\(\)|{module.name}\.toml')
        return more or [test for test in tests if reads.search((ROOT / test).read_text(encoding="utf-8"))]
    folder = Path("tests", *module.parts[1:-1])
    stems = (folder / f"test_{module.name}", folder.parent / f"test_{folder.name}_{module.name}")
    names = [f"{stem.as_posix()}.py" for stem in (*stems, folder.parent / f"test_{folder.name}")]
    named = [name for name in names if name in tests][:1] + more
    dotted = ".".join(module.parts).removesuffix(".__init__")
    using = [test for test in tests if dotted in imports(test)]
    beside = [test for test in tests if Path(test).parent == folder]
    return named or [test for test in using if test in beside] or using or beside


class FirstFailure:
    """A pytest plugin that keeps the first test that failed."""

    name = ""

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid} (import)"


def run_tests(tree: str, tests: list[str], answer) -> None:
    """In a forked process, in the copy: sends the first failure, or ""."""
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    os.chdir(tree)
    sys.path.insert(0, tree)
    os.environ["PYTHONPATH"] = tree
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    first = FirstFailure()
    flags = ["-x", "-q", "-p", "no:xdist", "-p", "no:nbval", "-p", "no:randomly", "-m", "not slow and not gpu"]
    code = pytest.main([*flags, f"--rootdir={tree}", *tests], plugins=[first])
    answer.send(first.name or ("" if code in (0, 5) else f"pytest's exit {int(code)}"))


def first_failure(context, tree: Path, tests: list[str]) -> str:
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=run_tests, args=(str(tree), tests, send))
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(10 * SECONDS) else "asleep"
    except EOFError:
        return "died or ran too long"
    finally:
        if process.is_alive():
            process.join(1)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def verdict(context, tree: Path, fault: Fault, sound: set[str]) -> str:
    """The test that noticed the fault, or "". Raises where that test fails without the fault as well."""
    tests, path = own_tests(fault.path), tree / fault.path
    if not tests:
        return ""
    clean = path.read_bytes()
    path.write_bytes(fault.plant(clean))
    try:
        noticed = first_failure(context, tree, tests)
    finally:
        path.write_bytes(clean)
    if "::" in noticed and noticed not in sound:
        if again := first_failure(context, tree, [noticed]):
            raise RuntimeError(f"{again} fails without a fault")
        sound.add(noticed)
    return noticed


def copies(into: Path, n: int) -> SimpleQueue:
    """n copies of what is tracked, or new and not ignored."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    free = SimpleQueue()
    for worker in range(n):
        for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
            target = into / str(worker) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        free.put(into / str(worker))
    return free


def results(path: Path) -> Iterator[dict]:
    if path.is_file():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--only", default="", help="files whose path begins so")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "mutants.jsonl")
    args = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"):  # a stale .pyc would hide a fault of the same length
        os.environ[name] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    noticed_before = {tuple(row["fault"]) for row in results(args.out) if row["noticed"]}
    sound: set[str] = set()  # tests that pass without a fault
    survivors = []
    faults = draw(args.seed, args.n, args.only)
    with tempfile.TemporaryDirectory() as folder, args.out.open("a", encoding="utf-8") as out:
        free = copies(Path(folder), args.workers)

        def trial(fault: Fault, diff: tuple[int, str, str]) -> None:
            line, was, now = diff
            key = [fault.path, was, now]
            if tuple(key) in noticed_before:
                return
            tree = free.get()
            noticed = verdict(context, tree, fault, sound)
            free.put(tree)
            row = {"fault": key, "line": line, "kind": fault.kind, "seed": args.seed, "noticed": noticed}
            print(json.dumps(row), file=out, flush=True)
            print(f"{fault.path}:{line} [{fault.kind}] {noticed or 'SURVIVED'}", flush=True)
            if not noticed:
                survivors.append(f"{fault.path}:{line}\n  - {was}\n  + {now}")

        with ThreadPoolExecutor(args.workers) as pool:
            try:
                list(pool.map(trial, faults, [fault.diff() for fault in faults]))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    print(f"\nseed {args.seed}: {len(survivors)} of {len(faults)} survive", *survivors, sep="\n")
    sys.exit(len(survivors) > SURVIVORS * len(faults))


if __name__ == "__main__":
    main()
