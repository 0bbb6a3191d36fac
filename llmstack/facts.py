"""Numbers about the world, read from data/*.toml, where each stands once and with its source.

    table(name)          one file, parsed                     accelerators(), accelerator(name)
    data_path()          where the files are                  systems()   what the surveys name, and where it runs here
    reference(name)      an optional reference file           claims()    what they claim, and what we find

Units: operations a second (dense peaks, a multiply and an add counted as two), bytes, bytes a second, watts. GB is 1e9.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

REFERENCE_HINT = (
    "the reference tables are not here; set LLMSTACK_REFERENCE to a folder that holds reference/ and traces/, "
    "or run `llmstack fetch FOLDER`"
)
CATEGORIES = ("architectures", "execution modes", "operational intensity", "hardware", "parallelism", "memory")
CATEGORIES += ("inference",)  # the chapters, in order
STATUSES = ("todo", "done")
LESS = ("in part", "number only", "not reproducible here")  # verdicts that grant less than the claim says, and say why
VERDICTS = ("todo", "reproduced", "derived", "simulated", "corrected", *LESS)


@cache
def data_path() -> Path:
    """The folder of facts: data/ of a checkout, llmstack/_data of an installed wheel. Raises FileNotFoundError."""
    package = Path(__file__).resolve().parent
    for place in (package.parent / "data", package / "_data"):
        if (place / "models.toml").is_file():
            return place
    hint = "install the wheel again, or work from a checkout with `pip install -e .`"
    raise FileNotFoundError(f"no data/models.toml beside or in {package}: llmstack was installed without it; {hint}")


@cache
def table(name: str) -> dict[str, Any]:
    """data/<name>.toml as a mapping. Raises FileNotFoundError with the names that exist."""
    path = data_path() / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in data_path().glob("*.toml")))
        raise FileNotFoundError(f"no table {name!r} in {data_path()}; there are {known}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def cache_path() -> Path:
    """The user's cache folder for files that the package does not carry."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "llmstack"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "llmstack"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "llmstack"


def reference(name: str) -> Path | None:
    """A reference file such as "models.csv" or "azure_llm_2023_code.csv", or None where there is none.

    Looked for in LLMSTACK_REFERENCE and in the user's cache, in reference/ and traces/. Skip with REFERENCE_HINT.
    """
    roots = [Path(root) for root in (os.environ.get("LLMSTACK_REFERENCE"), cache_path()) if root]
    places = (root / folder / name for root in roots for folder in ("reference", "traces", ""))
    return next((path for path in places if path.is_file()), None)


@dataclass(frozen=True)
class Accelerator:
    """One device (one SKU). Peaks are dense, without 2:4 sparsity; `peaks` maps a dtype to operations a second."""

    name: str
    title: str
    peaks: dict[str, float] = field(hash=False)
    source: str
    source_date: str  # the year of the source
    bandwidth: float | None = None  # bytes a second from its main memory
    memory_bytes: float | None = None
    interconnect: float | None = None  # bytes a second to its peers, both directions together
    tdp_w: float | None = None
    released: str = ""  # the year in which its maker announced it
    sparse_peaks: dict[str, float] = field(default_factory=dict, hash=False)  # with sparsity: in no ridge
    units: int = 0  # SMs, compute units, tiles or cores
    registers_bytes: int = 0  # of a unit
    shared_bytes: int = 0  # of a unit: L1 and shared memory together
    l2_bytes: int = 0  # the last cache, of all units
    sram_bytes: float = 0  # of all units, under a program's control
    arrays: int = 0  # matrix arrays of all units
    array: list[int] = field(default_factory=list, hash=False)  # its sides; their product is multiply-adds a cycle
    clock_hz: float = 0.0
    confidence: str = "high"  # low and medium: sources differ, do not assert tightly
    note: str = ""

    def peak(self, dtype: str = "") -> float:
        """Operations a second in `dtype`; by default in the first 16-bit format that it has, else in its first."""
        if not self.peaks:
            raise KeyError(f"{self.title} has no stated dense peak")
        dtype = dtype or next((d for d in ("bf16", "fp16") if d in self.peaks), next(iter(self.peaks)))
        if dtype not in self.peaks:
            raise KeyError(f"{self.title} has no stated peak in {dtype!r}; it has {', '.join(self.peaks)}")
        return self.peaks[dtype]

    def ridge(self, dtype: str = "") -> float:
        """Operations a byte at which the memory roof meets the compute roof."""
        if not self.bandwidth:
            raise ValueError(f"{self.title} has no stated memory bandwidth, so it has no ridge point")
        return self.peak(dtype) / self.bandwidth

    @property
    def on_chip_bytes(self) -> float:
        """The largest memory on the chip that all its units share. Raises ValueError where the facts state none."""
        largest = max(self.l2_bytes, self.sram_bytes)
        if not largest:
            raise ValueError(f"{self.title} has no stated on-chip memory")
        return largest


@dataclass(frozen=True)
class System:
    """A row of the systems ledger: what a survey names, and the code, lesson and test that make it work here."""

    id: str
    name: str
    survey: str
    section: str
    category: str
    what: str
    status: str
    check: str = ""
    module: str = ""  # dotted path
    notebook: str = ""  # path from the checkout's root
    heading: str = ""  # a heading in that notebook
    test: str | list[str] = ""  # tests/file.py::test_name, or several
    same_as: str = ""
    note: str = ""

    @property
    def tests(self) -> list[str]:
        return [self.test] * bool(self.test) if isinstance(self.test, str) else self.test


@dataclass(frozen=True)
class Claim:
    """A quantitative statement of a survey. `value` is what `function` must give within the relative `tolerance`."""

    id: str
    survey: str
    section: str
    says: str
    finding: str  # right, wrong, imprecise …, as the original papers show
    verdict: str  # how it stands here: one of VERDICTS
    why: str = ""  # of a verdict that grants less than the claim says: what was shown, and what was not
    note: str = ""
    plan: str = ""
    survey_value: str = ""
    value: float | list[float] | None = None
    unit: str = ""
    tolerance: float = 0.0
    function: str = ""  # dotted path of a function that returns Computed
    status: str = "todo"


@dataclass(frozen=True)
class Computed:
    """What a claim's function found: a number (or numbers), its unit, and a sentence. A note alone has no number."""

    value: float | list[float] | None
    unit: str
    text: str


@dataclass(frozen=True)
class ClaimResult:
    """A claim beside what we compute. `agrees` is None where there is no number to compare."""

    id: str
    says: str
    survey_value: str
    ours: str
    verdict: str
    note: str
    agrees: bool | None = None
    why: str = ""


def _records(kind: type, name: str) -> dict[str, Any]:
    known, id_field = {f.name for f in fields(kind)}, next(f.name for f in fields(kind))
    for key, row in table(name).items():
        if unknown := sorted(set(row) - known):
            raise ValueError(f"data/{name}.toml: [{key}] has no field {', '.join(unknown)}; there are {sorted(known)}")
    return {key: kind(**{id_field: key, **row}) for key, row in table(name).items()}


@cache
def accelerators() -> dict[str, Accelerator]:
    """All devices of data/accelerators.toml by name."""
    return _records(Accelerator, "accelerators")


def accelerator(name: str) -> Accelerator:
    """A device by name or title; case, spaces and dashes do not matter. Raises KeyError with the nearest names."""
    plain = lambda text: "".join(c for c in text.lower() if c.isalnum())
    for device in accelerators().values():
        if plain(name) in (plain(device.name), plain(device.title)):
            return device
    raise KeyError(f"no accelerator {name!r}; {near(name, accelerators())}")


@cache
def systems() -> dict[str, System]:
    """The systems ledger by id."""
    return _records(System, "systems")


@cache
def claims() -> dict[str, Claim]:
    """The claims ledger by id."""
    return _records(Claim, "claims")


def near(name: str, names: Any) -> str:
    """A hint for an error message: the closest of the names."""
    from difflib import get_close_matches

    found = get_close_matches(str(name), names, n=3, cutoff=0.4)
    return f"did you mean {', '.join(found)}?" if found else f"there are {', '.join(list(names)[:8])} …"


def resolve(path: str) -> Callable[..., Any]:
    """The object that a dotted path names, imported when asked, so that facts stay below what computes them."""
    from importlib import import_module

    module, _, attribute = path.rpartition(".")
    return getattr(import_module(module), attribute)


def compute_claim(id: str) -> ClaimResult:
    """Recompute one claim. Raises KeyError for an unknown id; a claim without a function gives its verdict alone."""
    if id not in claims():
        raise KeyError(f"no claim {id!r}; {near(id, claims())}")
    claim = claims()[id]
    if not claim.function:
        return ClaimResult(id, claim.says, claim.survey_value, "", claim.verdict, claim.note, why=claim.why)
    ours: Computed = resolve(claim.function)()
    agrees = None if claim.value is None or ours.value is None else _agrees(ours.value, claim.value, claim.tolerance)
    return ClaimResult(id, claim.says, claim.survey_value, ours.text, claim.verdict, claim.note, agrees, claim.why)


def _agrees(ours: Any, value: Any, tolerance: float) -> bool:
    ours, value = (list(x) if isinstance(x, list | tuple) else [x] for x in (ours, value))
    return len(ours) == len(value) and all(abs(a - b) <= tolerance * abs(b) for a, b in zip(ours, value))
