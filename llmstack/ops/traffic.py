"""The bytes that a kernel moves, counted where it moves them: at each load and store of the interpreter.

    with counting() as moved: softmax_triton(x)            moved.loaded, moved.stored, moved.bytes, moved.launches
    moved.by("argument") -> {"x_ptr": …, "y_ptr": …}       also by "kernel", "way" and "dtype"

A lane that the mask leaves out moves nothing; every other moves its dtype's bytes at each access, so a value that a
kernel reads twice counts twice. That is what the kernel asks for: a cache may answer part of it, and a GPU moves whole
sectors of 32 bytes. An atomic reads and writes. Work that PyTorch does around a launch (`contiguous`, a last sum) is
not seen.
"""

from collections import Counter, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np

from llmstack.ops._triton import HAVE_TRITON, INTERPRETED, interpreter

Access = namedtuple("Access", "kernel argument way dtype")  # way: "load" or "store"

ACCESSES = {  # what the interpreter calls: where its pointers and its mask stand, and what they do
    "create_masked_load": (0, 1, "load"),
    "create_masked_store": (0, 2, "store"),
    "create_atomic_cas": (0, None, "load", "store"),
    "create_atomic_rmw": (1, 3, "load", "store"),
}


@dataclass
class Moved:
    """Bytes by kernel, argument, way and dtype, and how many kernels were launched."""

    accesses: Counter[Access] = field(default_factory=Counter)
    launches: int = 0

    @property
    def loaded(self) -> int:
        return self.by("way").get("load", 0)

    @property
    def stored(self) -> int:
        return self.by("way").get("store", 0)

    @property
    def bytes(self) -> int:
        return self.accesses.total()

    def by(self, *fields: str) -> dict:
        """Bytes by one field of an Access, or by several (tuples as keys)."""
        found: Counter = Counter()
        for access, n in self.accesses.items():
            key = tuple(getattr(access, name) for name in fields)
            found[key[0] if len(fields) == 1 else key] += n
        return dict(found)


@contextmanager
def counting() -> Iterator[Moved]:
    """Counts the kernels launched inside. Raises RuntimeError where kernels do not run in the interpreter."""
    if not (HAVE_TRITON and INTERPRETED):
        raise RuntimeError("bytes are counted in Triton's interpreter: install Triton, and set TRITON_INTERPRET=1")
    builder, moved, launch = interpreter.interpreter_builder, Moved(), {}
    begin = interpreter.GridExecutor._init_args_hst

    def count(pointers, mask, ways):
        mask = True if mask is None else np.broadcast_to(mask.data, pointers.data.shape)
        lanes = pointers.data[mask]
        if lanes.size:
            dtype, first = pointers.get_element_ty(), int(lanes.flat[0])
            owner = next((name for name, start, end in launch["spans"] if start <= first < end), "")
            for way in ways:
                access = Access(launch["kernel"], owner, way, str(dtype))
                moved.accesses[access] += lanes.size * max(1, dtype.primitive_bitwidth // 8)

    def launched(executor, args, kwargs):
        host = args, kwargs = begin(executor, args, kwargs)
        named = {**dict(zip(executor.arg_names, args)), **kwargs}
        tensors = {name: getattr(x, "base", x) for name, x in named.items()}
        tensors = {name: x for name, x in tensors.items() if hasattr(x, "data_ptr")}
        launch["spans"] = [(name, x.data_ptr(), x.data_ptr() + _span(x)) for name, x in tensors.items()]
        launch["kernel"] = executor.fn.__name__
        moved.launches += 1
        return host

    def counted(name, pointers, mask, *ways):
        run = getattr(builder, name)

        def access(*args, **options):
            count(args[pointers], None if mask is None else args[mask], ways)
            return run(*args, **options)

        return access

    hooks = {name: counted(name, *how) for name, how in ACCESSES.items()}
    with patch.multiple(builder, **hooks), patch.object(interpreter.GridExecutor, "_init_args_hst", launched):
        yield moved


def _span(x) -> int:
    """Bytes from a tensor's first value to its last."""
    return x.element_size() * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))) if x.numel() else 0
