"""The command, called as a function; what needs a process of its own (encoding, pipes) in one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmstack import cli, facts


def run(capsys, *argv):
    status = cli.main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_systems(capsys):
    status, out, _ = run(capsys, "systems")
    assert status == 0 and len(out.splitlines()) == 287 and out.splitlines()[-1].startswith("286 rows, ")
    status, out, _ = run(capsys, "systems", "--category", "memory")
    assert out.splitlines()[-1].startswith("28 rows")
    done = sum(row.status == "done" for row in facts.systems().values())
    status, out, _ = run(capsys, "systems", "--status", "done")
    assert out.splitlines()[-1] == f"{done} rows, {done} done"
    status, out, _ = run(capsys, "systems", "a013")
    assert status == 0 and "Transformer (2017)" in out and "check" in out
    status, out, _ = run(capsys, "systems", "--summary")
    assert f"| all | {done} | 286 |" in out and "| architectures |" in out


def test_claims(capsys):
    status, out, err = run(capsys, "claims")
    done = sum(claim.status == "done" for claim in facts.claims().values())
    assert status == 0 and "AC-28  corrected" in out and "; off:" not in out
    assert out.splitlines()[-1] == f"{done} claims have a verdict, {86 - done} are open"
    assert "claims:" in err and f"/{done}" in err, "a bar tells that it is at work"
    status, out, _ = run(capsys, "claims", "ac-28")
    assert status == 0 and "llama2-70b 28672 = 3.5 h" in out and "agrees              True" in out


def test_a_claim_that_is_off_ends_with_status_1(capsys, monkeypatch):
    from llmstack.intensity import claims

    monkeypatch.setattr(claims, "gpt2_xl", lambda: facts.Computed(1, "parameters", "one"))
    assert run(capsys, "claims")[0] == 1 and run(capsys, "claims", "AC-03")[0] == 1


def test_models(capsys):
    status, out, _ = run(capsys, "models")
    assert status == 0 and "llama3.1-405b" in out and "405,853,388,800" in out and "12,879,925,248 active" in out
    status, out, _ = run(capsys, "models", "gpt3-13b")
    assert status == 0 and "12,936,488,380" in out and "5,140" in out and "activation          gelu_tanh" in out
    status, out, _ = run(capsys, "models", "gemini")
    assert status == 0 and "undisclosed" in out and "d_model" not in out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["systems", "A999"], "A001 to A127"),
        (["claims", "AC-99"], "no claim 'AC-99'"),
        (["models", "lama-7b"], "did you mean llama-7b"),
        (["fetch", "nowhere"], "nowhere lacks reference/models.csv"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_exist_is_said(capsys, argv, message):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "") and message in err and "Traceback" not in err


def test_doctor(capsys, monkeypatch):
    status, out, _ = run(capsys, "doctor")
    assert status == 0 and "ready" in out
    for what in ("Python", "facts", "torch", "Triton", "gloo", "GPU", "jupyterlab", "SmolLM2-135M", "reference tables"):
        assert what in out
    monkeypatch.setattr(facts, "reference", lambda name: None)
    assert "reference tables" in (out := run(capsys, "doctor")[1]) and "optional" in out
    monkeypatch.setattr(facts, "reference", lambda name: Path("/tables/reference") / name)
    assert "/tables/reference" in run(capsys, "doctor")[1]
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    status, out, _ = run(capsys, "doctor")
    assert status == 0 and "no  SmolLM2-135M" in out and "→ make models" in out  # chapters still run
    monkeypatch.setitem(sys.modules, "numpy", None)
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "not ready: numpy" in out


def test_fetch_copies_into_the_cache(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LLMSTACK_REFERENCE", raising=False)
    for name in cli.REFERENCE_FILES:
        (tmp_path / "given" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "given" / name).write_text("a,b\n", encoding="utf-8")
    status, out, _ = run(capsys, "fetch", str(tmp_path / "given"))
    assert status == 0 and "5 files" in out
    assert facts.reference("azure_llm_2023_code.csv").parent.name == "traces"
    (tmp_path / "given" / "reference" / "models.csv").unlink()
    assert run(capsys, "fetch", str(tmp_path / "given"))[0] == 2


def test_a_console_that_is_not_utf8_and_a_pipe_that_closes():
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "llmstack.cli", "claims", "AC-12"]
    done = subprocess.run(command, capture_output=True, env=env, check=True)
    assert "O(s²)" in done.stdout.decode("utf-8")
    process = subprocess.Popen([*command[:3], "systems"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait() in (0, 120)
    process = subprocess.Popen([*command[:3], "systems", "A013"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # what fits in a buffer is written at the end
    assert process.stderr.read() == b"" and process.wait() == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_an_output_that_cannot_be_written():
    run = f"{sys.executable} -m llmstack.cli systems A013"
    done = subprocess.run(f"{run} > /dev/full", shell=True, capture_output=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(b"llmstack: ") and b"Traceback" not in done.stderr
    done = subprocess.run(f"{run} >&-", shell=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_version(capsys):
    from llmstack import __version__

    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"llmstack {__version__}\n"
