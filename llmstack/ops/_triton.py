"""The one place that imports Triton. Without a GPU driver, kernels run in the interpreter.

Triton has builds for Linux alone. Elsewhere `triton` and `tl` are stand-ins: a file with kernels still imports and
reads the same, its IMPLS has no "triton" entry, and its launchers raise a RuntimeError that says why.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if not any(Path(p).exists() for p in ("/proc/driver/nvidia/version", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


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
    from triton.runtime import interpreter

    HAVE_TRITON = True
except ImportError:
    triton = tl = interpreter = _Absent()
    HAVE_TRITON = False

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if HAVE_TRITON and INTERPRETED and isinstance(tl.cdiv, triton.runtime.JITFunction):
    warnings.warn(
        "Triton was imported before it was told to interpret, so kernels will fail: import llmstack before triton and "
        "what imports it (torch.compile does), or set TRITON_INTERPRET=1 in the environment",
        stacklevel=2,
    )
TILE = 1 << 15 if INTERPRETED else 4096  # the interpreter's time goes by operation, so it gets few, large programs


@dataclass(frozen=True)
class Build:
    """One way to compile a kernel ahead of time: its arguments' types in order, and the values of its constants."""

    kernel: Any
    types: str  # "*bf16 *fp32 i32 fp32", a word an argument, constants left out
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3


def available(impls: dict[str, Callable]) -> dict[str, Callable]:
    """The implementations that can run here: all of them, or all but Triton's."""
    return {name: fn for name, fn in impls.items() if HAVE_TRITON or name != "triton"}


def row_tile(D: int) -> tuple[int, int, int]:
    """ROWS, COLS and warps of a program that keeps whole rows of D values in registers. Raises ValueError over 16 Ki.

    A GPU's program holds 4096 values or one row, 16 of them a thread as long as 16 warps are enough (8 Ki).
    """
    if D > 1 << 14:
        raise ValueError(f"the kernel keeps a row in registers: at most 16384 values, got {D}; use the torch version")
    COLS = triton.next_power_of_2(max(D, 1))
    ROWS = max(1, TILE // COLS)
    return ROWS, COLS, min(max(ROWS * COLS // 512, 4), 16)


def no_gradient(*tensors: torch.Tensor) -> None:
    """Raises RuntimeError where a launch would lose a gradient that is wanted."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError("a kernel's result has no gradient: call it under torch.no_grad(), or the torch version")


def operands(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """What a kernel multiplies, in fp32 where the interpreter would multiply bf16 wrongly.

    Raises TypeError where it cannot multiply their dtypes, RuntimeError when one wants a gradient.
    """
    no_gradient(*tensors)
    dtypes = [t.dtype for t in tensors]
    if dtypes[0] not in (torch.float32, torch.float16, torch.bfloat16) or len(set(dtypes)) > 1:
        raise TypeError(f"kernels multiply fp32, fp16 or bf16, all of one dtype, got {dtypes}; use the torch version")
    wide = INTERPRETED and dtypes[0] == torch.bfloat16
    return [t.float() if wide else t for t in tensors]


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x as contiguous rows [R, D], whatever its strides. Raises TypeError when a kernel cannot compute in its dtype,
    RuntimeError when it wants a gradient."""
    no_gradient(x)
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"kernels compute in fp32 on fp32, fp16 or bf16 values, got {x.dtype}; use the torch version")
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()


def same_shape(name: str, x: torch.Tensor, of: str, other: torch.Tensor) -> None:
    """Raises ValueError where x has not the shape of the other."""
    if x.shape != other.shape:
        raise ValueError(f"{name} has the shape of {of}: expected {list(other.shape)}, got {list(x.shape)}")
