"""The wheel carries data/: installed elsewhere, it finds its presets."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_installed_elsewhere_loads_a_preset_and_a_checkpoint(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel)
    program = (
        "import llmstack; from llmstack import facts;"
        "print(llmstack.__file__, facts.data_path(), llmstack.preset('llama3.1-405b').n_layers,"
        " (facts.data_path() / 'checkpoints').is_dir())"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    module, data, layers, checkpoints = run(sys.executable, "-c", program, cwd=tmp_path, env=environment).split()
    assert Path(module).is_relative_to(target) and Path(data) == target / "llmstack" / "_data"
    assert (layers, checkpoints) == ("126", "True")
