"""What each method of fine-tuning learns of a new domain and forgets of the old ones: writes sweep.json.

    python data/finetune/sweep.py            all runs, ten minutes of one core; those that are there already stay
    python data/finetune/sweep.py lora-4     one run, made again

llama-2m has read Shakespeare, the King James Bible, Python's manual and Python source. The new domain is C++: the
headers c10/ that PyTorch's wheel carries, one in eight held out by a checksum of its name. Every run sees the same
batches with a rate that is level after a warm-up and falls to zero over the second half. Peak rates come from runs of
100 steps at two or three rates (full, lora-4, lora-64, adapter, fish, pafi, prompt-16), by the new domain's loss; the
others follow their neighbours. Losses are nats a token, on 24 windows of 256 tokens of held-out headers and on as many
of the four old sources' held-out documents.
"""

from __future__ import annotations

import json
import sys
import zlib
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from llmstack.architectures import pretrained
from llmstack.execution import corpus
from llmstack.execution.data import windows
from llmstack.execution.finetune import linears, prepare
from llmstack.execution.finetune.sparse import expected_share, project
from llmstack.execution.objectives import next_token
from llmstack.execution.optimizers import adamw
from llmstack.execution.schedules import wsd
from llmstack.execution.trainer import Trainer

HERE, NAME, SEED = Path(__file__).parent, "llama-2m", 0
STEPS, EVERY, LENGTH, BATCH, SHOWN, CONTEXT = 200, 50, 128, 4, 24, 256
RANKS = {1: 1e-2, 4: 1e-2, 16: 5e-3, 64: 3e-3}
RUNS = {  # name: (method, settings, peak rate)
    "full": ("full", {}, 2e-3),
    **{f"lora-{r}": ("lora", dict(r=r, alpha=r, targets="all"), lr) for r, lr in RANKS.items()},
    "adapter": ("adapter", {}, 1e-2),
    "fish": ("fish", dict(share=0.01), 1e-2),
    "pafi": ("pafi", dict(share=0.01), 3e-2),
    "diff": ("diff", dict(share=0.01, penalty=1e-4, speed=30.0), 5e-3),
    "prefix-16": ("p-tuning-v2", dict(length=16), 3e-2),
    **{f"prompt-{n}": ("prompt", dict(length=n), 2e-1) for n in (1, 16, 64)},
}


def headers() -> tuple[list[str], list[str]]:
    """Texts of training and of held-out headers."""
    root = Path(torch.__file__).parent / "include" / "c10"
    sides = ([], [])
    for path in sorted(root.rglob("*.h")):
        name = path.relative_to(root).as_posix()
        sides[zlib.crc32(name.encode()) % 8 == 0].append(path.read_text(encoding="utf-8"))
    return sides


@cache
def texts() -> tuple[Tensor, dict[str, dict]]:
    """The stream of training headers, and a batch of held-out windows of the new domain and of the old ones."""
    tokenizer = pretrained(NAME)[1]
    encode = lambda docs: torch.tensor([i for text in docs for i in tokenizer.encode(text)])
    train, held_out = headers()
    sources = [[d.text for d in corpus.split(corpus.documents(name))[1]] for name in corpus.SOURCES]
    old = [cut(encode(docs), SHOWN // len(sources)) for docs in sources]
    batch = lambda rows: dict(ids=rows[:, :-1], targets=rows[:, 1:])
    return encode(train), {"new": batch(cut(encode(held_out), SHOWN)), "old": batch(torch.cat(old))}


def cut(stream: Tensor, rows: int) -> Tensor:
    """Evenly spaced windows [rows, CONTEXT + 1]."""
    starts = torch.linspace(0, len(stream) - CONTEXT - 1, rows).long()
    return torch.stack([stream[s : s + CONTEXT + 1] for s in starts])


@torch.no_grad()
def measure(model) -> dict[str, float]:
    mode = model.training
    model.eval()
    out = {}
    for name, batch in texts()[1].items():
        nats, count = next_token(model, batch)
        out[name] = round(nats.item() / count, 4)
    model.train(mode)
    return out


def run(name: str, steps: int = STEPS, lr: float | None = None) -> tuple[dict, nn.Module]:
    """The first `steps` of a run: losses before and after every EVERY steps, how many values were trained; the model.

    diff learns its mask in the first half, is projected, and trains the values that are left in the second.
    """
    method, settings, peak = RUNS[name]
    torch.manual_seed(SEED)
    model, _ = pretrained(NAME)
    data = windows(texts()[0], LENGTH, BATCH, SEED)
    tuned = prepare(model, method, **settings | ({"data": data} if method == "fish" else {}))
    record = dict(trained=tuned.count, lr=lr or peak, curve=[dict(step=0, **measure(model))])

    def look(step: dict) -> None:
        if (step["step"] + 1) % EVERY == 0:
            record["curve"].append(dict(step=step["step"] + 1, **measure(model)))
            if method == "diff" and tuned.after_backward:
                record["curve"][-1]["gates"] = round(expected_share(tuned), 4)

    def train(start: int, end: int) -> None:
        optimizer = adamw(tuned.trainable, lr=lr or peak, weight_decay=0.0)
        how = dict(clip=1.0, seed=SEED, after_backward=tuned.after_backward)
        later = lambda f: lambda t: f(t + start)
        told = lambda r: look(r | {"step": r["step"] + start})
        Trainer(model, later(data), optimizer, later(schedule), on_step=told, **how).run(end - start)

    schedule, half = wsd(STEPS, warmup=20, decay=STEPS // 2), STEPS // 2
    train(0, min(steps, half) if method == "diff" else steps)
    if method == "diff" and steps > half:
        project(tuned, settings["share"])
        record["trained"] = tuned.count
        train(half, steps)
    return record, model


def spectra(model: nn.Module) -> dict[str, list[float]]:
    """Singular values of what tuning added to three matrices of block 1, and of one of them before."""
    before, after = ({n: m.weight for n, _, _, m in linears(x, "all")} for x in (pretrained(NAME)[0], model))
    values = lambda w: [float(f"{v:.3g}") for v in torch.linalg.svdvals(w.detach().double())]
    names = [f"blocks.1.{n}" for n in ("attention.q", "attention.o", "ffn.up")]
    return {"W of blocks.1.ffn.up": values(before[names[-1]])} | {n: values(after[n] - before[n]) for n in names}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    path = HERE / "sweep.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in names or [n for n in RUNS if n not in kept]:
        kept[name], model = run(name)
        if name == "full":
            kept[name]["spectra"] = spectra(model)
        print(name, kept[name]["trained"], kept[name]["curve"][-1], flush=True)
        ordered = {n: kept[n] for n in RUNS if n in kept}
        lines = [f"{json.dumps(n)}: {json.dumps(record)}" for n, record in ordered.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
