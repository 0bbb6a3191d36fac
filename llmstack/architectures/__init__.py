"""Chapter 1: the three families of Transformers, built from a config, loaded from and saved to checkpoints.

build(config, seed=0) -> model        pretrained(name) -> model, tokenizer
load(path) -> model                   save(model, path)
"""

from importlib import import_module

_FRONT = {"build": "checkpoints", "load": "checkpoints", "save": "checkpoints", "pretrained": "zoo"}

__all__ = list(_FRONT)


def __getattr__(name: str):
    if name in _FRONT:
        return getattr(import_module(f"llmstack.architectures.{_FRONT[name]}"), name)
    raise AttributeError(f"module 'llmstack.architectures' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FRONT])
