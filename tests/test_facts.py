"""The facts parse, name their sources, and what is unknown or broken is refused by name."""

from dataclasses import replace

import pytest

from llmstack import facts


def test_ridge_in_another_dtype():
    """TPU v1's paper counts 1,350 multiply-adds a byte; twice that in operations."""
    tpu = facts.accelerator("tpu-v1")
    assert tpu.ridge("int8") / 2 == pytest.approx(1350, rel=0.003)
    assert tpu.peak() == tpu.peak("int8") == pytest.approx(2 * 256 * 256 * 700e6, rel=0.003)
    h100 = facts.accelerator("H100 SXM5")
    assert h100.ridge("fp8") == pytest.approx(2 * h100.ridge("bf16"), rel=1e-3)


def test_accelerators_are_dense_and_have_sources():
    assert len(facts.accelerators()) == 38
    for name, device in facts.accelerators().items():
        assert device.source and device.source_date and device.confidence in ("high", "medium", "low"), name
        assert all(peak > 1e12 for peak in device.peaks.values()), name
        assert device.peaks.get("bf16", 0) <= device.peaks.get("fp8", float("inf")), name
    assert facts.accelerator("H100 SXM5").peak("bf16") == 989.4e12  # the headline of 1,979e12 is for 2:4 sparsity
    assert facts.accelerator("h100 sxm5") is facts.accelerator("h100-sxm5")
    assert len(set(facts.accelerators().values())) == 38  # a device can be a key


def test_unknown_names_say_what_there_is():
    with pytest.raises(KeyError, match="did you mean h100-sxm5"):
        facts.accelerator("h100-sxm")
    with pytest.raises(FileNotFoundError, match="no table 'modells'.*models"):
        facts.table("modells")
    with pytest.raises(KeyError, match="no claim 'AC-99'"):
        facts.compute_claim("AC-99")
    with pytest.raises(KeyError, match="no stated peak in 'bf16'; it has fp16, fp32"):
        facts.accelerator("V100 SXM2").peak("bf16")
    with pytest.raises(ValueError, match="no stated memory bandwidth"):
        facts.accelerator("rapid").ridge()
    with pytest.raises(ValueError, match="H20 has no stated on-chip memory"):
        _ = facts.accelerator("h20").on_chip_bytes


def test_a_row_names_no_test_one_or_several():
    row = next(iter(facts.systems().values()))
    for test, tests in (("", []), ("a.py::test", ["a.py::test"]), (["a", "b"], ["a", "b"])):
        assert replace(row, test=test).tests == tests


def test_broken_data_is_refused(monkeypatch, tmp_path):
    (tmp_path / "accelerators.toml").write_text('[x]\ntitle = "X"\npeeks = 1\n', encoding="utf-8")
    (tmp_path / "claims.toml").write_text("[x\n", encoding="utf-8")
    monkeypatch.setattr(facts, "data_path", lambda: tmp_path)
    monkeypatch.setattr(facts, "table", facts.table.__wrapped__)
    with pytest.raises(ValueError, match=r"\[x\] has no field peeks"):
        facts.accelerators.__wrapped__()
    with pytest.raises(ValueError, match="claims.toml"):
        facts.claims.__wrapped__()


def test_reference_is_found_in_the_folder_and_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LLMSTACK_REFERENCE", raising=False)
    assert facts.reference("models.csv") is None
    cached = tmp_path / "cache" / "llmstack" / "reference" / "models.csv"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert facts.reference("models.csv") == cached
    (tmp_path / "given" / "traces").mkdir(parents=True)
    given = tmp_path / "given" / "traces" / "models.csv"
    given.touch()
    monkeypatch.setenv("LLMSTACK_REFERENCE", str(tmp_path / "given"))
    assert facts.reference("models.csv") == given


def test_the_cache_is_where_each_system_keeps_such_files(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(facts.Path, "home", lambda: tmp_path)
    places = {"linux": ".cache", "darwin": "Library/Caches", "win32": "AppData/Local"}
    for system, folder in places.items():
        monkeypatch.setattr(facts.sys, "platform", system)
        assert facts.cache_path() == tmp_path / folder / "llmstack", system
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert facts.cache_path() == tmp_path / "local" / "llmstack"


def test_a_computed_claim_is_compared():
    assert facts._agrees(101.0, 100.0, 0.01) and not facts._agrees(101.1, 100.0, 0.01)
    assert facts._agrees(90.0, 100.0, 0.1) and not facts._agrees(110.5, 100.0, 0.1)  # a share of the claim's value
    assert facts._agrees([1, 2], [1, 2], 0.0) and not facts._agrees([1, 2], [1], 1.0)
