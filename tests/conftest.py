"""One torch thread a worker, and the marks that a machine decides."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest

import llmstack  # noqa: F401  before anything that imports Triton, for which it chooses the interpreter

GPU = any(Path(p).exists() for p in ("/proc/driver/nvidia/version", "/dev/kfd"))


def pytest_collection_modifyitems(items):
    if not GPU:
        skip = pytest.mark.skip(reason="no GPU driver on this machine")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
