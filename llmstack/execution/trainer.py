"""One training loop for every model, objective and method of fine-tuning. One step:

    for i in 0 … accumulate − 1:    s, n ← loss(model, data(step · accumulate + i)),   gradient += ∂s
    gradient ← gradient / Σ n       the mean over all targets, however they lie over the micro-batches
    gradient ← clip(gradient)       by the norm of all of it
    weights  ← optimizer(gradient, lr = optimizer.lr · schedule(step))

A step depends on the weights, the optimizer's memory, the loss scale and its number: data and schedule are functions
of that number, and so is the seed of torch's generator, from which dropout draws. A checkpoint is one safetensors file
with all of it, so no part can be older than another. It is written under a temporary name, forced to disk, renamed, and
the folder's entry forced to disk: killed anywhere in between, training goes on from the one before, with the same
numbers bit for bit.

    folder/step-00000200.safetensors     model/…, optimizer/…; in its header step, loss scale and config as JSON
    folder/log.jsonl                     a record a line; `resume` cuts off what came after its checkpoint
    folder/diverged-00000234.safetensors the batches of a step whose loss or gradient was not finite
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, field, is_dataclass
from math import inf, isfinite
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from llmstack.architectures.hf import CheckpointError
from llmstack.execution.data import Batch, Data, whole
from llmstack.execution.objectives import next_token
from llmstack.execution.optimizers import Optimizer, clip_

LOG = "log.jsonl"


class TrainingDiverged(ArithmeticError):
    """A loss or gradient is not finite. `step` says where, `batch` which file has the step's batches (None: no folder).

    The weights are those from before the step. The file's tensors are named by data's argument: "234/ids" is data(234).
    """

    def __init__(self, step: int, loss: float, norm: float, batch: Path | None):
        told = f"step {step}: loss {loss:.4g}, gradient's norm {norm:.4g}; batches: {batch or 'no folder for them'}. "
        super().__init__(told + "Often: no warm-up, no clipping, fp16 without loss scaling, a broken batch")
        self.step, self.batch = step, batch


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains `model` in place, on whatever device and in whatever dtype its weights are.

    data: step -> batch, a pure function; a batch's tensors are moved to the model's device.
    optimizer: one of optimizers.py, or anything with .params (name -> weight), .lr, .step(lr=), .state_dict() (flat),
        .load_state_dict().
    schedule: step -> factor of optimizer.lr, as in schedules.py.
    loss: (model, batch) -> (summed nats, number of targets), as in objectives.py.
    accumulate: micro-batches a step: data(step · accumulate) and the ones after it.
    clip: the largest global norm of the gradient, above 0; None or infinity leaves it.
    precision: one of precision.py; None computes in the weights' dtype.
    folder, every, keep: a checkpoint after every so many steps (0: none) and when `run` ends; the last few stay.
    told: of what else a resumed run must have in common, ready for JSON; it is in the checkpoints' config.
    seed: seed · 1,000,003 + step seeds torch's generator at each step; the caller's is left as it is.
    after_backward(): before clipping, such as a mask on gradients. on_step(record): after each step.

    Raises TypeError or ValueError on arguments that cannot be.
    """

    model: nn.Module
    data: Data | None
    optimizer: Optimizer
    schedule: Callable[[int], float] | None = None
    loss: Callable[[nn.Module, Batch], tuple[Tensor, int]] = next_token
    _: KW_ONLY
    accumulate: int = 1
    clip: float = inf
    precision: object | None = None
    folder: str | Path | None = None
    every: int = 0
    keep: int = 2
    told: Mapping = field(default_factory=dict)
    seed: int = 0
    after_backward: Callable[[], None] | None = None
    on_step: Callable[[dict], None] | None = None

    def __post_init__(self):
        for name in ("data", "loss", "schedule", "after_backward", "on_step"):
            if not callable(value := getattr(self, name)) and (value is not None or name == "loss"):
                raise TypeError(f"{name} must be a function, as data of the step is, but it is {value!r}")
        if not hasattr(self.precision, "forward") and self.precision is not None:
            raise TypeError(f"precision = {self.precision!r}, but it is an object: Precision('bf16'), or None")
        whole(accumulate=self.accumulate, keep=self.keep)
        whole(0, every=self.every, seed=self.seed)
        mine = {id(p) for p in self.model.parameters()}
        params = getattr(self.optimizer, "params", {"nothing by name": None})
        if strange := [name for name, p in params.items() if id(p) not in mine]:
            raise ValueError(f"the optimizer holds {strange[0]}, none of the model's weights: make it after the model")
        self.device = next(self.model.parameters()).device
        self.folder = None if self.folder is None else Path(self.folder)
        self.step, self.records, self.begun = 0, [], False

    def run(self, steps: int) -> list[dict]:
        """Train until `steps` steps are done in all, and give the records of all of them, those before a resume too:

        {"step": from 0, as data and schedule have it, "loss": nats a target, "lr", "grad_norm": before clipping,
        "tokens": targets, "seconds"}; with a precision also "scale" and "skipped": a step whose gradient overflowed
        under loss scaling changes no weight, and has no grad_norm. Raises TrainingDiverged.
        """
        whole(0, steps=steps)
        if self.data is None and steps > self.step:
            raise TypeError("data = None is enough to resume() and look; to run, give a function of the step")
        if (self.folder or self.every) and not self.begun and (self.checkpoints() or (self.folder / LOG).is_file()):
            raise ValueError(f"{self.folder} holds a run already: call resume() first, or take another folder")
        self.begun, mode = True, self.model.training
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            while self.step < steps:
                began = time.perf_counter()
                self.model.train()  # at each step, as a hook that evaluates may have left it in eval mode
                record = self._step() | {"seconds": time.perf_counter() - began}
                self.step += 1
                self.records.append(record)
                if self.folder:
                    with (self.folder / LOG).open("a", encoding="utf-8") as log:
                        log.write(json.dumps(record) + "\n")
                    if self.step == steps or (self.every and self.step % self.every == 0):
                        self.save()
                if self.on_step:
                    self.on_step(record)
        self.model.train(mode)
        return self.records

    def _step(self) -> dict:
        batches, means, counts, first = {}, [], [], 1
        torch.manual_seed(self.seed * 1_000_003 + self.step)
        self.model.zero_grad()
        for i in range(self.step * self.accumulate, (self.step + 1) * self.accumulate):
            if not isinstance(batch := self.data(i), Mapping):
                raise TypeError(f"data({i}) is {type(batch).__name__}, and a batch is a dict, such as ids and targets")
            batches[i] = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            with self.precision.forward(self.model) if self.precision else nullcontext():
                total, count = self.loss(self.model, batches[i])
            first = first if counts else max(1, int(count))  # the others' counts are not known yet
            mean = total / first
            (mean * self.precision.scale if self.precision else mean).backward()
            means, counts = [*means, mean.detach()], [*counts, int(count)]
        if not sum(counts):
            raise ValueError(f"step {self.step} has no target: every one of data({i}) is -100")
        share = first / sum(counts)
        loss = sum(mean.item() for mean in means) * share
        lr = self.optimizer.lr * (self.schedule(self.step) if self.schedule else 1.0)
        record = {"step": self.step, "loss": loss, "lr": lr, "grad_norm": None, "tokens": sum(counts)}
        if self.precision:
            record |= {"scale": self.precision.scale, "skipped": not self.precision.unscale_(self._grads())}
            record["skipped"] &= self.precision.dynamic and self.precision.scale > 2**-24 and isfinite(loss)
        if not record.get("skipped"):
            for grad in self._grads() if share != 1 else ():
                grad *= share
            if self.after_backward:
                self.after_backward()
            record["grad_norm"] = norm = clip_(self._grads(), inf if self.clip is None else self.clip)
            if not isfinite(loss + norm):
                raise TrainingDiverged(self.step, loss, norm, self._keep(batches))
            self.optimizer.step(lr=lr)
        self.model.zero_grad()
        return record

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self.optimizer.params.values() if p.grad is not None]

    def _keep(self, batches: dict[int, Batch]) -> Path | None:
        flat = {f"{i}/{k}": v.clone() for i, b in batches.items() for k, v in b.items() if isinstance(v, Tensor)}
        return self.folder and _write(self.folder / f"diverged-{self.step:08}.safetensors", flat, {})

    def save(self) -> Path:
        """Write a checkpoint of this moment; older ones than the last `keep` go. Gives its path."""
        older, log = self.checkpoints(), self.folder / LOG
        _sync(log)
        memory, told = self.optimizer.state_dict(), {"step": self.step, "log_bytes": log.stat().st_size}
        told["optimizer"] = {name: v for name, v in memory.items() if not isinstance(v, Tensor)}
        told |= {"precision": self.precision and self.precision.state(), "config": self._config()}
        state = {f"model/{name}": t for name, t in self._tensors().items()}
        state |= {f"optimizer/{name}": t for name, t in memory.items() if isinstance(t, Tensor)}
        path = _write(self.folder / f"step-{self.step:08}.safetensors", state, told)
        for old in sorted({*older, path})[: -self.keep]:
            old.unlink()
        return path

    def checkpoints(self) -> list[Path]:
        """The folder's checkpoints, oldest first."""
        if self.folder is None:
            raise ValueError("this trainer keeps nothing: give it a folder, Trainer(…, folder=…)")
        self.folder.mkdir(parents=True, exist_ok=True)
        return sorted(self.folder.glob("step-*.safetensors"))

    def resume(self) -> int:
        """Take up the newest checkpoint of the folder, and cut the log where it was. Gives its step; 0 where none is.

        Raises CheckpointError when it is of another config or other weights, or damaged.
        """
        if found := self.checkpoints():
            self._load(found[-1])
        else:
            (self.folder / LOG).unlink(missing_ok=True)
        self.records, self.begun = read_log(self.folder), True
        return self.step

    def _load(self, path: Path) -> None:
        try:
            with safe_open(path, "pt", device=str(self.device)) as file:
                told, state = json.loads(file.metadata()["trainer"]), {n: file.get_tensor(n) for n in file.keys()}
        except (SafetensorError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; delete it, and the one before it is taken") from None
        part = lambda prefix: {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        shapes = lambda tensors: {f"the shape of {name}": f"{list(t.shape)} {t.dtype}" for name, t in tensors.items()}
        theirs = told["config"] | shapes(part("model/"))
        ours = self._config() | shapes(mine := self._tensors())
        if differ := [k for k in theirs | ours if theirs.get(k) != ours.get(k)]:
            some = ", ".join(f"{k} is {theirs.get(k)} there and {ours.get(k)} here" for k in differ[:6])
            raise CheckpointError(f"{path} is of another run: {some}; give what it was made with, or another folder")
        if (os.path.getsize(log) if (log := path.with_name(LOG)).is_file() else 0) < told["log_bytes"]:
            raise CheckpointError(f"{log} lacks lines from before step {told['step']}: put it back, or start anew")
        self.optimizer.load_state_dict(part("optimizer/") | told["optimizer"])
        for name, tensor in mine.items():
            tensor.data.copy_(state[f"model/{name}"])
        if self.precision:
            self.precision.load(told["precision"])
        os.truncate(log, told["log_bytes"])
        self.step = told["step"]

    def _tensors(self) -> dict[str, Tensor]:
        """Weights and buffers, tied ones once."""
        return dict({id(t): (name, t) for name, t in self.model.state_dict(keep_vars=True).items()}.values())

    def _config(self) -> dict:
        dials = asdict(config) if is_dataclass(config := getattr(self.model, "config", None)) else {}
        own = {"name": type(self.model).__name__, "accumulate": self.accumulate, "seed": self.seed, "source": ""}
        own |= {"optimizer": getattr(self.optimizer, "direction", type(self.optimizer)).__name__} | dict(self.told)
        return json.loads(json.dumps(dials | own | {"precision": self.precision and self.precision.kind}))


def read_log(folder: str | Path) -> list[dict]:
    """The records of a run so far; a line that is just being written is left out."""
    path = Path(folder) / LOG
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} has a line that is no record, take it out: {error}") from None


def _write(path: Path, tensors: dict[str, Tensor], told: dict) -> Path:
    """The whole file or none of it, whenever the process dies or the power fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(plain, temporary, metadata={"trainer": json.dumps(told)})
    _sync(temporary)
    os.replace(temporary, path)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _sync(path.parent)
    return path


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
    os.fsync(handle)
    os.close(handle)
