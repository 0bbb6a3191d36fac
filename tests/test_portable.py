"""What `make portable` finds: settings reach the kernels, a case that differs is named, changes select their users."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import portable

SLICE = [
    "tests/ops/test_cross_entropy.py",
    "tests/ops/test_attention.py",
    "chapters/02_execution_modes/01_forward_backward_update.ipynb",
    "chapters/03_operational_intensity/05_scaling_laws.ipynb",
]


def test_a_setting_above_the_machine_is_skipped_by_name(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(portable, "level_here", lambda: "avx2")
    monkeypatch.setattr(portable, "run", lambda name, *_: ran.append(name) or {})
    assert portable.main(["tests/test_facts.py"]) == 0
    assert ran == ["nehalem-1", "nehalem-2", "haswell-1"]
    out = capsys.readouterr().out
    assert "skylakex-2: skipped, this machine has avx2 only" in out
    assert out.endswith("the same under nehalem-1, nehalem-2, haswell-1\n")


def test_other_kinds_of_processor_have_the_default_only():
    able = [name for name, variables in portable.settings().items() if portable.emulable(variables, "neon")]
    assert able == ["nehalem-1", "nehalem-2"]


def test_a_case_that_differs_is_named_with_its_settings():
    one, two = {"tests.test_a::test_b": "assert 2.7 == 2.8"}, {}
    assert portable.report({"nehalem-1": one, "haswell-1": two, "haswell-2": one}) == [
        "tests.test_a::test_b\n    under nehalem-1, haswell-2: assert 2.7 == 2.8"
    ]


def test_a_change_selects_what_names_it():
    chosen = portable.touched([Path("llmstack/ops/cross_entropy.py"), Path("tests/test_wheel.py")])
    assert "tests/ops/test_cross_entropy.py" in chosen and "tests/test_wheel.py" in chosen
    assert "tests/execution/retrieval/test_indexes.py" not in chosen
    assert portable.touched([]) == []


@pytest.mark.slow
def test_the_setting_reaches_the_kernels_and_a_difference_is_seen(tmp_path):
    """A test that holds on the newest processors only is found by the run under the oldest."""
    case = tmp_path / "test_level.py"
    case.write_text(
        "import torch\n\n\n"
        "def test_level():\n    assert torch.backends.cpu.get_cpu_capability() == 'AVX2'\n\n\n"
        "def test_threads():\n    assert torch.get_num_threads() == 1\n"
    )
    failed = portable.run("nehalem-1", portable.settings()["nehalem-1"], [str(case)], workers=1)
    assert [name.split("::")[1] for name in failed] == ["test_level"]
    assert "DEFAULT" in next(iter(failed.values()))


@pytest.mark.slow
def test_a_slice_holds_under_the_oldest_processor():
    assert portable.run("nehalem-2", portable.settings()["nehalem-2"], SLICE, workers=1) == {}
