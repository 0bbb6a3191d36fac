"""The tests and notebooks under other processors than this one: `make portable`.

The libraries that compute choose their kernels by processor, and sum in another order on each. Environment variables
make them choose as an older processor would, so one machine shows what several would print. A stored output, a
tolerance or a sentence that holds on one of them only is found here.

    python tests/portable.py                          everything, under the four settings of WHOLE
    python tests/portable.py --changed                what the change against main touches
    python tests/portable.py --settings nehalem-1 tests/ops chapters/00_start_here.ipynb

Every case that differs is named with the settings under which it does; JUnit files go into results/portable/.
"""

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEVELS = ["default", "avx2", "avx512"]  # as torch names them, oldest first

# Which instructions each library may use: torch's own kernels, MKL and oneDNN below torch, OpenBLAS below NumPy.
PROCESSORS = {
    "nehalem": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
    "haswell": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "skylakex": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_CBWR": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "OPENBLAS_CORETYPE": "SkylakeX",
    },
}
THREADS = [1, 2]
WHOLE = ["nehalem-1", "nehalem-2", "haswell-1", "skylakex-2"]  # each processor, each number of threads


def settings() -> dict[str, dict[str, str]]:
    """Environment variables by setting, as "haswell-2": a processor and a number of threads."""
    found = {}
    for processor, variables in PROCESSORS.items():
        for threads in THREADS:
            found[f"{processor}-{threads}"] = {**variables, "OMP_NUM_THREADS": str(threads)}
    return found


def level_here() -> str:
    """The widest instructions of this machine, as torch sees them when nothing is emulated."""
    emulated = {name for variables in PROCESSORS.values() for name in variables}
    plain = {name: value for name, value in os.environ.items() if name not in emulated}
    command = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    seen = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    return seen.stdout.strip().lower()


def emulable(variables: dict[str, str], here: str) -> bool:
    """Whether a machine with the instructions `here` can run under these variables. Other kinds have only default."""
    widest = LEVELS.index(here) if here in LEVELS else 0
    return LEVELS.index(variables["ATEN_CPU_CAPABILITY"]) <= widest


def changed_files() -> list[Path]:
    """What differs from main, committed or not, and what git does not track yet. On main itself: from its upstream."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    upstream = git("rev-parse", "--abbrev-ref", "main@{upstream}") if branch == "main" else "main"
    base = git("merge-base", "HEAD", upstream) if upstream else "HEAD"
    names = git("diff", "--name-only", base or "HEAD").splitlines()
    names += git("ls-files", "--others", "--exclude-standard").splitlines()
    return [Path(name) for name in names if (ROOT / name).exists()]


def touched(changed: list[Path]) -> list[str]:
    """Tests and notebooks that are changed, or whose text names a changed module or fact file."""
    cases = [path.relative_to(ROOT) for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    cases += [path.relative_to(ROOT) for path in sorted(ROOT.glob("chapters/**/*.ipynb"))]
    words = set()
    for path in changed:
        if path.parts[0] in ("llmstack", "data"):
            words.add(path.parent.name if path.stem == "__init__" else path.stem)
    named = re.compile(r"\b(?:" + "|".join(sorted(map(re.escape, words))) + r")\b") if words else None
    found = []
    for case in cases:
        text = (ROOT / case).read_text(encoding="utf-8")
        if case in changed or (named and named.search(text)):
            found.append(case.as_posix())
    return found


def failures(junit: Path) -> dict[str, str]:
    """Case → the first line of what went wrong, from a JUnit file."""
    found = {}
    for case in ET.parse(junit).getroot().iter("testcase"):
        for problem in [*case.iter("failure"), *case.iter("error")]:
            lines = (problem.get("message") or problem.text or "").strip().splitlines()
            found[f"{case.get('classname')}::{case.get('name')}"] = lines[0][:150] if lines else ""
    return found


def run(name: str, variables: dict[str, str], cases: list[str], workers: int) -> dict[str, str]:
    """Run cases under one setting; what fails, and why. Raises RuntimeError where pytest itself could not run."""
    junit = ROOT / "results" / "portable" / f"{name}.xml"  # apart from the lanes' own, which the ledger reads
    junit.parent.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "--tb=short"]
    command += ["-m", "not slow and not gpu", "--nbval", "--nbval-cell-timeout=600", f"--junitxml={junit}", *cases]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    if not junit.exists():
        raise RuntimeError(f"{name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"{name}: {(done.stdout.strip().splitlines() or ['no output'])[-1]}", flush=True)
    return failures(junit)


def report(by_setting: dict[str, dict[str, str]]) -> list[str]:
    """A line for each case that differs, with the settings under which it does."""
    under = defaultdict(list)
    for name, failed in by_setting.items():
        for case, message in failed.items():
            under[case].append((name, message))
    lines = []
    for case, seen in sorted(under.items()):
        names = ", ".join(name for name, _ in seen)
        lines.append(f"{case}\n    under {names}: {seen[0][1]}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tests and notebooks under emulated processors.")
    parser.add_argument("cases", nargs="*", default=["tests", "chapters"], help="files or folders; default: all")
    parser.add_argument("--settings", nargs="+", choices=settings(), metavar="NAME", help=f"of {', '.join(settings())}")
    parser.add_argument("--changed", action="store_true", help="only what the change against main touches")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)

    cases = touched(changed_files()) if options.changed else options.cases
    if not cases:
        print("nothing that runs is touched by the change")
        return 0
    here = level_here()
    by_setting = {}
    for name in options.settings or WHOLE:
        variables = settings()[name]
        if emulable(variables, here):
            by_setting[name] = run(name, variables, cases, options.workers)
        else:
            print(f"{name}: skipped, this machine has {here} only", flush=True)
    lines = report(by_setting)
    print("\n".join(lines) if lines else f"the same under {', '.join(by_setting)}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
