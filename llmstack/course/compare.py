"""How far two results lie apart, printed so that it holds on every processor."""

from __future__ import annotations

from typing import Any

import numpy as np


def gap(a: Any, b: Any, limit: float) -> str:
    """The largest |a - b| over the largest |b|: "under 1e-06" where it is below the limit, else the number itself.

    a, b: numbers, arrays or tensors of one shape. Processors sum in different orders, so the digits of a rounding
    error differ between them; that it lies below a limit does not. Raises ValueError when the shapes differ.
    """
    a, b = _array(a), _array(b)
    if a.shape != b.shape:
        raise ValueError(f"a has shape {a.shape} and b {b.shape}: only results of one shape can be compared")
    largest = np.abs(b).max()
    apart = np.abs(a - b).max()
    if apart:
        apart = apart / largest
    return f"under {limit:g}" if apart < limit else f"{apart:.1g}"


def _array(x: Any) -> np.ndarray:
    """A tensor (with or without gradient, of any dtype) or what NumPy takes, in fp64."""
    if hasattr(x, "detach"):
        x = x.detach().double().cpu()
    return np.asarray(x, dtype=np.float64)
