"""Compile every kernel ahead of time for GPUs that are not here, and read what each costs.

Triton's compiler needs no driver, but a process whose kernels run in the interpreter cannot use it. So `compile_all`
starts one process without the interpreter, which compiles the `AOT` entries of the modules and prints a record a line
(`TRITON_INTERPRET=0 python -m llmstack.ops.aot` does so for all).
Pointers and whole numbers are taken as multiples of 16, as a launch on aligned tensors specialises them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

# Shared memory that one program can have, in bytes: CUDA C++ programming guide, table of compute capabilities
# (163 and 227 KiB); AMD Instinct MI300 instruction set architecture, local data share (64 KiB).
TARGETS = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True)
class Record:
    """What a compiled kernel uses: registers a thread, bytes spilled a thread, bytes of shared memory a program."""

    kernel: str  # module.kernel[constants]
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def shared_limit_bytes(self) -> int:
        return TARGETS[self.target][3]


def modules_with_kernels() -> list[str]:
    """Modules of llmstack.ops, at any depth, whose source has an AOT list."""
    root, has_list = Path(__file__).parent, re.compile(r"^AOT\b.*= \[", re.MULTILINE)
    files = (path.relative_to(root) for path in sorted(root.rglob("*.py")) if has_list.search(path.read_text("utf-8")))
    return [".".join(("llmstack.ops", *file.with_suffix("").parts)) for file in files]


def compile_all(
    targets: list[str] | None = None, modules: list[str] | None = None, first: int | None = None, timeout_s: float = 900
) -> list[Record]:
    """Records of all kernels in the modules (None: all in llmstack.ops), or of the first few entries of each.

    Raises RuntimeError with the compiler's message when one does not compile, ValueError on an unknown target.
    """
    targets = list(TARGETS) if targets is None else targets
    if unknown := sorted(set(targets) - set(TARGETS)):
        raise ValueError(f"targets {unknown} are not known: choose from {list(TARGETS)}")
    request = json.dumps([targets, modules_with_kernels() if modules is None else modules, first])
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "llmstack.ops.aot", request]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"ahead-of-time compilation failed:\n{done.stderr[-3000:]}")
    return [Record(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def compile_kernel(build, target: str):
    """Triton's compiled kernel, with its assembly in `.asm`; only in a process without the interpreter."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = build.kernel
    constants, types = build.constants, iter(build.types.split())
    signature = {n: "constexpr" if n in constants else next(types) for n in fn.arg_names}
    aligned = lambda t: t.startswith("*") or t in ("i32", "i64")
    attrs = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if aligned(t)}
    return triton_compile(
        ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget(*TARGETS[target][:3]),
        options={"num_warps": build.num_warps, "num_stages": build.num_stages},
    )


def compile_one(build, target: str) -> Record:
    """One entry for one target, and what it uses."""
    kernel, fn, constants = compile_kernel(build, target), build.kernel, build.constants
    settings = ",".join(f"{k}={v}" for k, v in constants.items())
    name = f"{fn.fn.__module__.rpartition('.')[2]}.{fn.fn.__name__}[{settings};{build.types.split()[0][1:]}]"
    registers, spilled = _cuda_usage(kernel) if TARGETS[target][0] == "cuda" else _amd_usage(kernel)
    return Record(name, target, registers, spilled, kernel.metadata.shared)


def _cuda_usage(kernel) -> tuple[int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    count = lambda field: int(re.search(rf"\b{field}:(\d+)", usage)[1])
    return count("REG"), count("LOCAL") + count("STACK")


def _amd_usage(kernel) -> tuple[int, int]:
    count = lambda field: int(re.search(rf"\.{field}:\s*(\d+)", kernel.asm["amdgcn"])[1])
    return count("vgpr_count"), 4 * count("vgpr_spill_count")


def main(request: str = "[null, null, null]"):
    targets, modules, first = json.loads(request)
    for module in modules or modules_with_kernels():
        for build in import_module(module).AOT[:first]:
            for target in targets or TARGETS:
                print(json.dumps(asdict(compile_one(build, target))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
