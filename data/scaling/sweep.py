"""Twenty small language models at four budgets of operations, for the scaling laws: runs.json beside this file.

    OMP_NUM_THREADS=1 python data/scaling/sweep.py
    python data/scaling/sweep.py --again nehalem-1     two runs of the least budget once more, into again.json

Each run is a decoder over bytes of Shakespeare's plays: a width and a depth, and as many tokens as its budget pays for
(training operations of a token as `intensity.flops` counts them, with the attention scores). Its learning rate falls
along a cosine to the end of its own run, as it must (Hoffmann et al. 2022, arXiv:2203.15556, appendix B). A run keeps
its size, tokens, operations, held-out loss in nats a byte, and the mean training loss of each tenth.

A processor sums in an order of its own, and training amplifies the difference, the more the nearer its rate is to
where training breaks down. again.json says how far two of the runs come apart, by the setting of tests/portable.py
under which they were made (its environment variables make the libraries choose an older processor's kernels).
"""

import json
import sys
import time
from pathlib import Path

import torch

from llmstack.architectures import build
from llmstack.config import ModelConfig
from llmstack.execution import corpus, optimizers, schedules
from llmstack.execution.data import windows
from llmstack.execution.objectives import next_token
from llmstack.execution.trainer import Trainer
from llmstack.intensity import flops, params

LENGTH, BATCH, SEED = 64, 8, 0
BUDGETS = {1e10: (4, 6, 8, 12, 16), 3e10: (6, 8, 12, 16, 24), 1e11: (8, 12, 16, 24, 32), 3e11: (12, 16, 24, 32, 48)}


def config(width: int) -> ModelConfig:
    """Two to five layers, a head for each 16 channels or fewer."""
    layers = 2 + width // 32
    dials = dict(n_heads=max(1, width // 16), d_ff=3 * width, tied=True, max_seq_len=LENGTH)
    return ModelConfig(f"d{width}", width, layers, vocab_size=256, **dials)


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the plays: to train on, and held out."""
    sides = corpus.split(corpus.documents(["plays"]))
    return tuple(torch.tensor(list("\n".join(d.text for d in side).encode())) for side in sides)


def steps(width: int, budget: float) -> int:
    """As many steps as a budget pays for."""
    return max(1, round(budget / flops(config(width), BATCH, LENGTH, "train")))


@torch.no_grad()
def held_out_loss(model, stream: torch.Tensor, batches: int = 40) -> float:
    data = windows(stream, LENGTH, 32, seed=1)
    model.eval()
    sums = [next_token(model, data(i)) for i in range(batches)]
    return sum(float(s) for s, _ in sums) / sum(n for _, n in sums)


def run(width: int, budget: float, streams: tuple[torch.Tensor, torch.Tensor], seed: int = SEED) -> dict:
    """One model at one budget. The same numbers each time, on one processor and one thread."""
    c, n = config(width), steps(width, budget)
    model = build(c, seed)
    optimizer = optimizers.adamw(dict(model.named_parameters()), 0.02 * (8 / width) ** 0.5, (0.9, 0.95))
    schedule = schedules.cosine(n, warmup=max(1, n // 20), floor=0.1)
    records = Trainer(model, windows(streams[0], LENGTH, BATCH, seed), optimizer, schedule, clip=1.0).run(n)
    tenth = [records[i * n // 10 : max(i * n // 10 + 1, (i + 1) * n // 10)] for i in range(10)]
    return {
        "width": width,
        "budget": budget,
        "parameters": params(c).total,
        "tokens": n * BATCH * LENGTH,
        "flops": n * flops(c, BATCH, LENGTH, "train"),
        "loss": round(held_out_loss(model, streams[1]), 4),
        "training": [round(sum(r["loss"] for r in part) / len(part), 4) for part in tenth],
    }


def again(setting: str) -> None:
    """Two runs of the least budget once more; their losses by width go under the setting's name."""
    out, budget = Path(__file__).with_name("again.json"), min(BUDGETS)
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    streams = text()
    found[setting] = {str(width): run(width, budget, streams)["loss"] for width in (12, 16)}
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(setting, found[setting])


def main() -> None:
    torch.set_num_threads(1)
    out, streams = Path(__file__).with_name("runs.json"), text()
    runs = []
    for budget, widths in BUDGETS.items():
        for width in widths:
            began = time.perf_counter()
            runs.append(run(width, budget, streams))
            seconds = time.perf_counter() - began
            print(
                f"{budget:.0e} d={width:3d} {runs[-1]['tokens']:9,} tokens  {runs[-1]['loss']:.3f}  {seconds:.0f} s",
                flush=True,
            )
            out.write_text(json.dumps({"length": LENGTH, "batch": BATCH, "seed": SEED, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--again"]:
        again(sys.argv[2])
    else:
        main()
