"""The one place that imports Triton. Without a GPU driver kernels run in the interpreter; without Triton they do not run.

Triton has builds for Linux alone. Elsewhere `triton` and `tl` are stand-ins: a file with kernels still imports and reads
the same, its IMPLS has no "triton" entry, and calling a kernel or its launcher raises a RuntimeError that says why.
"""

import os
from collections.abc import Callable
from pathlib import Path

if not any(Path(p).exists() for p in ("/proc/driver/nvidia/version", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

__all__ = ["HAVE_TRITON", "available", "tl", "triton"]


class _Absent:
    """Stands for any name of a package that is not installed: it can be named and decorate, but not be called."""

    def __getattr__(self, name: str) -> "_Absent":
        return _Absent()

    def jit(self, fn: Callable) -> "_Absent":
        return _Absent()

    def __call__(self, *args, **kwargs):
        raise RuntimeError(
            "this function runs a Triton kernel, and Triton is not installed (it has builds for Linux alone): "
            "use the NumPy or torch version beside it, or install triton on Linux or WSL"
        )

    __getitem__ = __call__


try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:
    triton = tl = _Absent()
    HAVE_TRITON = False


def available(impls: dict[str, Callable]) -> dict[str, Callable]:
    """The implementations that can run here: all of them, or all but Triton's."""
    return {name: fn for name, fn in impls.items() if HAVE_TRITON or name != "triton"}
