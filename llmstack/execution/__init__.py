"""Chapter 2: how models are trained, tuned and run.

Trainer(model, data, optimizer, schedule, …).run(steps) -> records
generate(model, ids, max_new_tokens) -> ids
"""

from importlib import import_module

_FRONT = {"Trainer": "trainer", "generate": "generation"}

__all__ = list(_FRONT)


def __getattr__(name: str):
    if name in _FRONT:
        return getattr(import_module(f"llmstack.execution.{_FRONT[name]}"), name)
    raise AttributeError(f"module 'llmstack.execution' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FRONT])
