"""`make bench-gpu` asks its questions rightly: all its cases, small, in the interpreter; without a GPU it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmstack.ops._triton import HAVE_TRITON

SCRIPT = Path(__file__).parents[1] / "benchmarks/gpu.py"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=os.environ | {"TRITON_INTERPRET": "1"}
    )


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_every_case_is_right_when_small(tmp_path):
    done = run("--tiny", folder=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 2 * 19
    assert all(line.endswith(": right") for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run(folder=tmp_path)
    assert done.returncode == 1
    assert "no GPU here" in done.stdout
    assert not (tmp_path / "results").exists()
