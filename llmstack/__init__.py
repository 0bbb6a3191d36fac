"""llmstack: the systems that train and serve large language models, as code that can be read and run.

Importing the package costs nothing: numpy, torch and the chapters' packages load when they are first used.
"""

import os
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

# Triton reads this when it is first imported, and torch may be the one that imports it (torch._dynamo does).
if not any(Path(p).exists() for p in ("/proc/driver/nvidia/version", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

_FRONT = {"preset": "config", "presets": "config", "ModelConfig": "config", "Plan": "config"}
_PACKAGES = ("architectures", "course", "execution", "facts", "hardware", "inference", "intensity", "memory", "ops")
_PACKAGES += ("parallelism", "config", "events", "stack")

__all__ = ["__version__", *_FRONT]


def __getattr__(name: str):
    if name in _FRONT:
        return getattr(import_module(f"llmstack.{_FRONT[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"llmstack.{name}")
    raise AttributeError(f"module 'llmstack' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FRONT, *_PACKAGES])
