"""Tokens a second of Trainer against a plain PyTorch loop of the same model, and against transformers' GPT-2.

A GPT-2 of 4 layers and width 256 with the same weights, fp32, one thread, batches of 4 x 128 tokens; AdamW, clipping, a
rate that falls, the loss read at each step. Trainer takes our optimizer and our loss and keeps a log; the loops take
torch's own. The contestants take turns, so that a machine that slows down slows all, and CPU seconds are counted, so
that what else runs on it does not. Writes results/bench_trainer.json.
"""

import os

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from side_by_side import write  # noqa: E402

from llmstack import architectures, preset  # noqa: E402
from llmstack.execution.data import windows  # noqa: E402
from llmstack.execution.optimizers import adamw  # noqa: E402
from llmstack.execution.schedules import cosine  # noqa: E402
from llmstack.execution.trainer import Trainer  # noqa: E402

SHAPE = preset("gpt2").with_(d_model=256, n_layers=4, n_heads=8, vocab_size=2048, max_seq_len=128)
LEAST, B, T, LR, STEPS, PIECE = 0.95, 4, 128, 1e-3, 10_000, 2
SCHEDULE = cosine(STEPS, warmup=10)
DATA = windows(torch.randint(0, SHAPE.vocab_size, (50_000,), generator=torch.Generator().manual_seed(0)), T, B)


class Plain:
    """The loop that one writes without a Trainer, step after step."""

    def __init__(self, model, logits):
        self.model, self.logits, self.done, self.losses = model.train(), logits, 0, []
        self.optimizer = torch.optim.AdamW(model.parameters(), LR)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, SCHEDULE)

    def run(self, steps):
        for step in range(self.done, steps):
            batch = DATA(step)
            loss = F.cross_entropy(self.logits(batch["ids"]).flatten(0, 1), batch["targets"].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.losses.append(loss.item())
        self.done = steps


def main(runs: int) -> None:
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(int(THREADS))
    ours, same = architectures.build(SHAPE), architectures.build(SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        architectures.save(ours, folder)
        peer = GPT2LMHeadModel.from_pretrained(folder, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    trainer = Trainer(ours, DATA, adamw(dict(ours.named_parameters()), LR), SCHEDULE, clip=1.0)
    loop, transformers = Plain(same, same), Plain(peer, lambda ids: peer(ids, use_cache=False).logits)
    contestants = {"trainer": trainer.run, "plain loop": loop.run, "transformers": transformers.run}
    seconds = {name: [] for name in contestants}
    for run in range(runs + 1):  # the first warms up
        for name in [*list(contestants)[run % 3 :], *list(contestants)[: run % 3]]:
            start = time.process_time()
            contestants[name]((run + 1) * PIECE)
            if run:
                seconds[name].append((time.process_time() - start) / PIECE)
    for step, (a, b, c) in enumerate(zip((r["loss"] for r in trainer.records), loop.losses, transformers.losses)):
        assert max(abs(a - b), abs(a - c)) < 1e-3 * a, f"step {step}: losses {a}, {b} and {c} are not of one training"
    median = {name: statistics.median(s) for name, s in seconds.items()}
    ratios = {name: median[name] / median["trainer"] for name in ("plain loop", "transformers")}
    speed = {name: B * T / s for name, s in median.items()}
    for name, ratio in ratios.items():
        print(f"training: {name} / Trainer = {ratio:.2f} (at least {LEAST}); Trainer {speed['trainer']:.0f} tokens/s")
    told = {"threads": int(THREADS), "median_s": median, "tokens_per_s": speed, "theirs / ours": ratios}
    write("bench_trainer", told)
    if failed := [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio < LEAST]:
        sys.exit("below what it must be: " + "; ".join(failed))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
