"""One way to run every implementation, and one tolerance: at most twice plain PyTorch's own error to double."""

import numpy as np
import torch

from llmstack.ops._triton import INTERPRETED

SHAPES = [(1, 1), (7, 1), (1, 63), (3, 5, 100), (2, 1000), (0, 16)]
NATIVE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(fn, impl, *args, **options):
    """Calls an implementation with torch tensors whatever it takes, and returns a list of CPU tensors."""
    to = {"numpy": lambda t: t.detach().numpy(), "triton": lambda t: t.detach().to(NATIVE)}.get(impl, lambda t: t)
    out = fn(*(to(a) if isinstance(a, torch.Tensor) else a for a in args), **options)
    return [torch.as_tensor(o).cpu() for o in (out if isinstance(out, tuple) else (out,))]


def roundings(dtype, terms=1, size=1.0):
    """The relative error to expect of a result that a sum of `terms` goes into, in units of the unit roundoff u.

    Two roundings of the result itself; and √terms of the sum, since errors of random sign grow as a random walk does
    (Higham and Mary 2019, doi:10.1137/18M1226312; in the worst case it is `terms`). An exponential makes the absolute
    error of what it is given a relative one of its value: `size` is then how large the sum's terms are.
    PyTorch's own error is no floor: its rounding may be a lucky one.
    """
    if dtype == torch.float64:
        return 1e-11  # the exact result is one in double itself
    return torch.finfo(dtype).eps / 2 * (2 + size * terms**0.5)


def check(got, exact, plain, terms=1, size=1.0):
    """Each result has the exact one's shape, and at most twice the error of the plain one, or that of `roundings`."""
    assert len(got) == len(exact) == len(plain)
    for a, e, p in zip(got, exact, plain):
        assert a.shape == e.shape
        error = lambda t: (t.double() - e).norm().item()
        rounding = roundings(a.dtype, terms, size)
        assert error(a) <= 2 * error(p) + rounding * (1 + e.norm().item()), (error(a), error(p))


def check_forward(fn, impl, reference, *args, terms=1, size=1.0, **options):
    exact = reference(*(a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args))
    check(run(fn, impl, *args, **options), [exact], [reference(*args)], terms, size)


def check_backward(fn, impl, reference, inputs, dy, *args, terms=1, size=1.0, **options):
    """fn(dy, *args) against autograd of reference(*inputs); NumPy's by hand in double, Triton's in fp32.

    args are what fn takes after dy; inputs among them are given as the same tensors.
    """
    dtype = torch.float64 if impl == "numpy" else torch.float32
    wide, plain = _gradients(reference, inputs, dy, torch.float64), _gradients(reference, inputs, dy, dtype)
    cast = [a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in (dy, *args)]
    got = run(fn, impl, *cast, **options)
    assert all(g.dtype == dtype for g in got)
    check(got, wide, plain, terms, size)


def _gradients(reference, inputs, dy, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    return torch.autograd.grad(reference(*leaves), leaves, dy.to(dtype), materialize_grads=True)


def strided(t):
    """The same values with every stride doubled."""
    view = torch.stack([t, torch.full_like(t, np.nan)], -1)[..., 0]
    assert t.numel() < 2 or not view.is_contiguous()
    return view
