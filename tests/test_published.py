"""Each number of data/models.toml and data/accelerators.toml against a second holding with sources of its own.

tests/reference/presets.csv and accelerators.csv were written from other tables than data/: a digit that changes in
either fails here, in every clone.
"""

import csv
import hashlib
import json
import re
from math import prod
from pathlib import Path

import pytest

from llmstack import facts
from llmstack.config import preset, presets

REFERENCE = Path(__file__).parent / "reference"


def rows(name: str) -> dict[str, dict[str, str]]:
    """A table by its first column, without its empty cells."""
    with open(REFERENCE / name, encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    return {line["name"]: {key: cell for key, cell in line.items() if cell} for line in lines}


def value(cell: str):
    """A cell's number, truth value, or list written 8/1/4."""
    if cell in ("true", "false"):
        return cell == "true"
    numbers = [float(part) for part in cell.split("/")]
    return numbers if len(numbers) > 1 else numbers[0]


def plain(dial):
    return [float(part) for part in dial] if isinstance(dial, list | tuple) else dial


PRESETS, ACCELERATORS = rows("presets.csv"), rows("accelerators.csv")
DERIVED = {"head_scale": lambda c: c.d_model**-0.5, "embedding_scale": lambda c: c.d_model**0.5}


def published(name: str) -> dict:
    """The dials of a preset as its row holds them."""
    row = PRESETS[name]
    more = dict(pair.split("=") for pair in row.get("more", "").split())
    return {key: value(cell) for key, cell in {**row, **more}.items() if key not in ("name", "more", "source")}


def test_every_preset_has_the_published_dials():
    wrong = []
    for name in presets():
        config = preset(name)
        ours = {dial: plain(getattr(config, dial)) for dial in published(name)}
        wrong += [(name, dial, ours[dial], theirs) for dial, theirs in published(name).items() if ours[dial] != theirs]
    assert not wrong


def test_no_number_of_a_preset_is_held_once():
    table, alone = facts.table("models"), []
    for name in presets():
        own = table["models"][name]
        for dial, ours in {**table["families"][own["family"]], **own}.items():
            if isinstance(ours, str) or dial in published(name):
                continue
            if dial in DERIVED:
                assert ours == pytest.approx(DERIVED[dial](preset(name)), rel=1e-15), (name, dial)
            elif not isinstance(ours, bool):
                alone.append((name, dial, ours))
    assert not alone and set(PRESETS) == set(presets())


UNITS = {"memory_GB": ("memory_bytes", 1e9), "bandwidth_GBps": ("bandwidth", 1e9), "tdp_W": ("tdp_w", 1)}
UNITS |= {"interconnect_GBps": ("interconnect", 1e9), "registers_KiB": ("registers_bytes", 2**10)}
UNITS |= {"shared_KiB": ("shared_bytes", 2**10), "l2_MiB": ("l2_bytes", 2**20), "sram_MiB": ("sram_bytes", 2**20)}
UNITS |= {"units": ("units", 1), "arrays": ("arrays", 1), "clock_MHz": ("clock_hz", 1e6), "released": ("released", 1)}
PEAKS = ("bf16", "fp16", "fp8", "int8", "fp4", "fp32")


def differences(device) -> list[str]:
    """What differs between a device and its row; a number that stands in one of the two only differs too."""
    row = ACCELERATORS[device.title]
    other = dict(pair.split("=") for pair in row.get("other_peaks", "").split())
    theirs = {dtype: float(cell) * 1e12 for dtype, cell in {**row, **other}.items() if dtype in (*PEAKS, *other)}
    ours = {**device.peaks, **{f"sparse_{dtype}": peak for dtype, peak in device.sparse_peaks.items()}}
    wrong = [] if ours == pytest.approx(theirs) else ["peaks"]
    for column, (field, unit) in UNITS.items():
        if float(getattr(device, field) or 0) != pytest.approx(float(row.get(column, 0)) * unit):
            wrong.append(field)
    if "/".join(map(str, device.array)) != row.get("array", ""):
        wrong.append("array")
    if "ridge" in row and device.ridge() != pytest.approx(float(row["ridge"]), abs=0.06):
        wrong.append("ridge")
    return wrong


def test_every_number_of_an_accelerator_is_the_published_one():
    wrong = {device.name: differences(device) for device in facts.accelerators().values()}
    assert {name: fields for name, fields in wrong.items() if fields} == {}


def test_the_matrix_arrays_make_the_peak():
    """A third way to the peak, and the only one for a clock; Groq's sheet rounds its 737e12 to 750."""
    for device in (device for device in facts.accelerators().values() if device.arrays):
        whole = device.name in ("tpu-v1", "groq-tsp")
        operations = 2 * device.arrays * prod(device.array) * device.clock_hz
        tolerance = 0.02 if device.name == "groq-tsp" else 0.003
        assert operations == pytest.approx(device.peak("int8" if whole else ""), rel=tolerance), device.name


def test_all_devices_are_held_twice_and_released_before_their_sources():
    assert {device.title for device in facts.accelerators().values()} == set(ACCELERATORS)
    assert all(device.released <= device.source_date for device in facts.accelerators().values())
    for name, years in {
        "v100-sxm2": ("2017", "2018"),
        "h100-sxm5": ("2022", "2023"),
        "tpu-v4": ("2021", "2023"),
    }.items():
        device = facts.accelerator(name)
        assert (device.released, device.source_date) == years


def test_tables_of_published_runs_are_as_they_were_read():
    """Last digits that no tolerance notices. Who corrects one, with the source open, writes the new digest here."""
    for name, digest in {"counts": "084338470270098b", "scaling": "258f00e4d7d9cd14"}.items():
        text = json.dumps(facts.table(name), sort_keys=True)
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest, name


def test_a_peak_that_is_not_dense_is_in_no_ridge():
    with pytest.raises(KeyError, match="Cerebras WSE-3 has no stated dense peak"):
        facts.accelerator("wse-3").ridge()


def test_the_year_of_an_arxiv_id_is_the_entrys():
    """A paper's number begins with its year and month; what it describes is of that year."""
    named = []
    for table in ("models", "accelerators", "counts", "scaling"):
        for name, row in walk(facts.table(table)):
            found = re.match(r"arXiv:(\d\d)\d\d\.", str(row.get("source", "")))
            if found and "year" in row:
                named.append(name)
                assert row["year"] == 2000 + int(found[1]), (table, name)
    assert len(named) >= 3


def walk(table: dict, name: str = ""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"{name}{key}", value
            yield from walk(value, f"{name}{key}.")
