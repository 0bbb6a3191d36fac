"""Training that is killed twenty times, ten of them inside a checkpoint, is the training that never was."""

import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from llmstack.execution import trainer
from llmstack.execution.optimizers import adamw
from llmstack.execution.schedules import cosine
from llmstack.execution.trainer import Trainer, read_log

STEPS, EVERY = 150, 3
INSIDE = [  # the call of a process's n-th checkpoint (log, file and folder are each forced to disk) and when it dies
    ("fsync", 1, "before"),
    ("save_file", 1, "half"),
    ("fsync", 2, "before"),
    ("replace", 1, "before"),
    ("save_file", 2, "half"),
    ("save_file", 2, "after"),
    ("fsync", 5, "after"),
    ("replace", 2, "before"),
    ("replace", 1, "after"),
    ("fsync", 6, "after"),
]


class Dropped(nn.Module):
    """A next-token model of two weights, and dropout between them."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embed, self.head, self.drop = nn.Embedding(40, 24), nn.Linear(24, 40), nn.Dropout(0.2)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=draw) * 0.1

    def forward(self, ids, padding=None):
        return self.head(self.drop(self.embed(ids)))


def data(step):
    ids = torch.randint(0, 40, (4, 13), generator=torch.Generator().manual_seed(step)).sort(1).values
    return {"ids": ids[:, :-1], "targets": ids[:, 1:]}


def run_of(folder=None, on_step=None):
    model = Dropped()
    how = dict(accumulate=2, clip=1.0, folder=folder, every=EVERY if folder else 0, on_step=on_step)
    return Trainer(model, data, adamw(dict(model.named_parameters()), 0.01), cosine(STEPS, warmup=10), **how)


def child(folder, dies=None):
    torch.set_num_threads(1)
    if dies:
        inject(*dies)
    run = run_of(folder)
    run.resume()
    run.run(STEPS)


def inject(call, nth, moment):
    """The n-th call from now on ends this process: before it, after it, or when half of the file is written."""
    module = trainer if call == "save_file" else os
    true, calls = getattr(module, call), itertools.count(1)

    def patched(*args, **how):
        last = next(calls) == nth
        if not (last and moment == "before"):
            true(*args, **how)
        if last and moment == "half":
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, call, patched)


def digest(weights, memory):
    parts = {f"model/{n}": t for n, t in weights.items()} | {f"optimizer/{n}": t for n, t in memory.items() if n != "t"}
    return hashlib.sha256(b"".join(parts[n].detach().numpy().tobytes() for n in sorted(parts))).hexdigest()


def told(records):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL and a forkserver")
def test_twenty_kills_change_nothing(tmp_path):
    states = []
    whole = run_of(on_step=lambda record: states.append(digest(whole.model.state_dict(), whole.optimizer.state_dict())))
    expected = told(whole.run(STEPS))
    assert expected[-1]["loss"] < 0.8 * expected[0]["loss"]

    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["pytest", "llmstack.execution.trainer"])
    draw, halves = random.Random(0), 0
    kills = list(itertools.chain(*zip(INSIDE, [None] * 10)))
    for dies in kills:
        before = len(read_log(tmp_path))
        process = processes.Process(target=child, args=(tmp_path, dies))
        process.start()
        if dies is None:  # at any moment: some steps on, and then some
            enough, deadline = before + draw.randint(2, 8), time.monotonic() + 60
            while len(read_log(tmp_path)) < enough and process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(draw.random() * 0.005)
            process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        saved = sorted(tmp_path.glob("step-*.safetensors"))
        halves += any(tmp_path.glob(".step-*.tmp"))
        if saved:
            assert len(saved) <= 3
            assert digest(*parts(load_file(saved[-1]))) == states[int(saved[-1].stem.split("-")[1]) - 1]
    assert halves >= 5 and len(saved) >= 2

    process = processes.Process(target=child, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert told(read_log(tmp_path)) == expected
    last = load_file(sorted(tmp_path.glob("step-*.safetensors"))[-1])
    assert digest(*parts(last)) == states[-1]


def parts(tensors):
    of = lambda part: {n.removeprefix(part): t for n, t in tensors.items() if n.startswith(part)}
    return of("model/"), of("optimizer/")
