"""Peak memory of a training step: full tuning, LoRA and QLoRA of one model, measured and from a ledger.

Measured is the running sum of what PyTorch's CPU allocator gives and takes back during the second step (the first makes
the optimizer's moments), as torch.profiler records it, on top of what the model and the moments hold. That is exact
where a process's resident size is not: it has no libraries, caches or fragments in it.

The ledger is worked out from the config and the rank, but for the activations, which autograd's saved_tensors_hooks
count (each storage once, parameters apart). Bytes of fp32, N weights in the blocks' matrices, t trained:

    base          full, LoRA 4 N       QLoRA N/2 + N/64 + 4 ceil(N/64/256) + 4 a matrix
    the rest      4 a weight: embedding, norms, A and B          moments 8 t          gradients 4 t
    peak          base + rest + moments + the larger of
                  activations + one weight made anew (QLoRA: 4 + 2 bytes a weight) when backward begins, and
                  gradients + the optimizer's four arrays of the largest trained weight when it steps

Not in it, and within the 5 %: gradients of activations on their way, RoPE tables. Writes
results/bench_finetune_memory.json.
"""

import os

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys  # noqa: E402

import torch  # noqa: E402
from side_by_side import write  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from llmstack.architectures import build  # noqa: E402
from llmstack.config import ModelConfig  # noqa: E402
from llmstack.execution.finetune import prepare  # noqa: E402
from llmstack.execution.objectives import next_token  # noqa: E402
from llmstack.execution.optimizers import adamw  # noqa: E402
from llmstack.intensity import params  # noqa: E402

CONFIG = ModelConfig("bench", d_model=512, n_layers=6, n_heads=8, vocab_size=512, d_ff=1408, max_seq_len=128)
RANK, BATCH, LENGTH = 8, 2, 64
METHODS = {"full": {}, "lora": dict(targets="all", r=RANK), "qlora": dict(targets="all", r=RANK)}


def ledger(method: str, config: ModelConfig, r: int, activations: int) -> dict[str, int]:
    D, F = config.d_model, config.d_ff
    G = config.n_kv_heads * config.d_head
    shapes = [(D, D), (G, D), (G, D), (D, D), (F, D), (F, D), (D, F)] * config.n_layers
    sizes = [a * b for a, b in shapes]
    rest, thin = params(config).total - sum(sizes), [r * n for shape in shapes for n in shape]
    packed = lambda n: n // 2 + n // 64 + 4 * -(-n // 64 // 256) + 4
    trained = [*sizes, config.vocab_size * D] if method == "full" else thin
    t = params(config).total if method == "full" else sum(thin)
    parts = {
        "base": sum(map(packed, sizes)) if method == "qlora" else 4 * sum(sizes),
        "rest": 4 * (rest + (0 if method == "full" else t)),
        "moments": 8 * t,
        "activations": activations,
        "made anew": 6 * max(sizes) if method == "qlora" else 0,
        "gradients": 4 * t,
        "optimizer's arrays": 4 * 4 * max(trained),
    }
    begins = parts["activations"] + parts["made anew"]
    steps = parts["gradients"] + parts["optimizer's arrays"]
    return parts | {"peak": parts["base"] + parts["rest"] + parts["moments"] + max(begins, steps)}


def held(tensors) -> int:
    """Bytes of the storages behind some tensors, each once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def measure(method: str) -> dict:
    model = build(CONFIG)
    tuned = prepare(model, method, **METHODS[method])
    ids = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = {"ids": ids[:, :-1], "targets": ids[:, 1:]}
    optimizer = adamw(tuned.trainable, lr=1e-3)

    def step() -> None:
        s, n = next_token(model, batch)
        (s / n).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    own = list(model.state_dict().values())
    before = held([*own, *(a for state in optimizer.state.values() for a in state.values())])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)

    saved, mine = {}, {t.untyped_storage().data_ptr() for t in own}

    def note(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in mine:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss, _ = next_token(model, batch)
    parts = ledger(method, CONFIG, RANK, sum(saved.values()))
    return {"trained": tuned.count, "measured_bytes": before + top, "held_bytes": before, "ledger_bytes": parts}


def main() -> None:
    torch.set_num_threads(int(THREADS))
    results = {method: measure(method) for method in METHODS}
    for method, found in results.items():
        found["ledger / measured"] = found["ledger_bytes"]["peak"] / found["measured_bytes"]
        parts = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in found["ledger_bytes"].items())
        print(f"{method:>6}: measured {found['measured_bytes'] / 1e6:.2f} MB, ledger / measured ", end="")
        print(f"{found['ledger / measured']:.3f}: {parts}")
    full = results["full"]["measured_bytes"]
    print("of full tuning's: " + ", ".join(f"{m} {f['measured_bytes'] / full:.2f}" for m, f in results.items()))
    write("bench_finetune_memory", results)
    if off := {m: f["ledger / measured"] for m, f in results.items() if abs(f["ledger / measured"] - 1) > 0.05}:
        sys.exit(f"the ledger and what was measured differ by more than 5 %: {off}")


if __name__ == "__main__":
    main()
