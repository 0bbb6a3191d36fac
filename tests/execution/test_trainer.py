"""The Trainer against plain PyTorch loops, against itself after a resume, and against bad input."""

import json
import math
import os
from collections import Counter
from functools import partial

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from llmstack import execution, facts
from llmstack.architectures import build, pretrained
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.hf import CheckpointError
from llmstack.config import ModelConfig
from llmstack.execution import generate, trainer
from llmstack.execution.data import windows
from llmstack.execution.objectives import next_token
from llmstack.execution.optimizers import adafactor, adamw, clip_, sgd
from llmstack.execution.precision import Precision
from llmstack.execution.schedules import linear
from llmstack.execution.trainer import Trainer, TrainingDiverged, read_log
from llmstack.ops.cross_entropy import cross_entropy_torch

CONFIG = ModelConfig("tiny", 32, 2, 4, 50, n_kv_heads=2, max_seq_len=32)
STREAM = torch.randint(0, 50, (3000,), generator=torch.Generator().manual_seed(0))


class Dropped(nn.Module):
    """A model that draws from torch's generator, has a buffer that changes, and a tied weight."""

    def __init__(self, V=50, D=16):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embed, self.head, self.drop = nn.Embedding(V, D), nn.Linear(D, V, bias=False), nn.Dropout(0.3)
        self.embed.weight.data = torch.randn(V, D, generator=draw) * 0.1
        self.head.weight = self.embed.weight
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, ids, padding=None):
        self.passes += self.training
        return self.head(self.drop(self.embed(ids)))


def ragged(step, B=4, T=16):
    """Batches in which a share of the targets, another one in each, does not count."""
    draw = torch.Generator().manual_seed(step)
    ids, lost = (torch.randint(0, 50, (B, T + 1), generator=draw) for _ in range(2))
    return {"ids": ids[:, :-1], "targets": ids[:, 1:].masked_fill(lost[:, 1:] < 10 * (step % 4), -100)}


def setup(model=None, make=adamw, data=ragged, lr=0.01, **how):
    model = model or Dropped()
    return Trainer(model, data, make(dict(model.named_parameters()), lr), **how)


def told(records):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- the loop


@pytest.mark.parametrize("make", [lambda: build(CONFIG), Dropped], ids=["decoder", "dropout"])
def test_losses_and_weights_are_those_of_a_plain_loop_bit_for_bit(make):
    data, schedule = windows(STREAM, 16, 4), linear(12, warmup=3)
    model, plain = make(), make()
    records = setup(model, data=data, schedule=schedule, clip=0.05, seed=7).run(12)
    optimizer, losses, norms = adamw(dict(plain.named_parameters()), 0.01), [], []
    for step in range(12):
        torch.manual_seed(7 * 1_000_003 + step)
        batch = data(step)
        loss = cross_entropy_torch(plain(batch["ids"]), batch["targets"])
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item())
        clip_([p.grad for p in plain.parameters()], 0.05)
        optimizer.step(lr=0.01 * schedule(step))
        losses.append(loss.item())
    assert losses[0] != losses[-1]
    assert [r["loss"] for r in records] == losses
    assert [r["step"] for r in records] == list(range(12))
    assert [r["lr"] for r in records] == [0.01 * schedule(i) for i in range(12)]
    assert [r["grad_norm"] for r in records] == pytest.approx(norms, rel=1e-6)
    assert all(r["tokens"] == 64 for r in records) and max(norms) > 0.05
    assert same(model, plain)


def test_losses_are_those_of_torchs_own_optimizer_and_loss():
    data, model, plain = windows(STREAM, 16, 4), build(CONFIG), build(CONFIG)
    records = setup(model, data=data).run(15)
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01)
    for step in range(15):
        loss = F.cross_entropy(plain(data(step)["ids"]).flatten(0, 1), data(step)["targets"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert records[step]["loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_accumulation_is_the_large_batch_also_with_unequal_counts():
    merged = lambda step: {
        name: torch.cat([ragged(i)[name] for i in range(4 * step, 4 * step + 4)]) for name in ("ids", "targets")
    }
    models = [build(CONFIG).double() for _ in range(2)]
    parts = setup(models[0], accumulate=4, clip=0.1).run(5)
    whole = setup(models[1], data=merged, clip=0.1).run(5)
    for a, b in zip(parts, whole):
        assert a["tokens"] == b["tokens"] < 256
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-13)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-11)
    for a, b in zip(*(m.parameters() for m in models)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_micro_batches_without_targets_count_for_nothing():
    empty = lambda i: ragged(i) | ({"targets": torch.full((4, 16), -100)} if i % 2 == 0 else {})
    halves, alone = build(CONFIG), build(CONFIG)
    a = setup(halves, data=empty, accumulate=2).run(3)
    b = setup(alone, data=lambda i: ragged(2 * i + 1)).run(3)
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], rel=1e-6)


def test_only_the_optimizers_weights_change_and_the_callers_generator_and_mode_stay():
    model = build(CONFIG).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    chosen = {name: p for name, p in model.named_parameters() if ".q." in name}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Trainer(model, ragged, sgd(chosen, 0.1)).run(2)
    assert torch.equal(torch.rand(3), expected) and not model.training
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == set(chosen)
    assert all(p.grad is None for p in model.parameters())


def test_hooks_see_gradients_and_records_and_do_not_disturb_training():
    masked, seen = build(CONFIG), []
    first = next(iter(masked.parameters()))
    before = first.clone()
    hook = lambda: first.grad.zero_()
    look = lambda record: seen.append((record["step"], torch.rand(1), masked.eval()))
    records = setup(masked, make=sgd, after_backward=hook, on_step=look).run(3)
    assert torch.equal(first, before) and [s[0] for s in seen] == [0, 1, 2]
    quiet = setup(Dropped())
    loud = setup(model := Dropped(), on_step=lambda record: (torch.rand(9), model.eval()))
    assert told(quiet.run(4)) == told(loud.run(4))
    assert records[0]["grad_norm"] > 0


# --- checkpoints


@pytest.mark.parametrize("make", [adamw, adafactor, partial(sgd, momentum=0.9)], ids=["adamw", "adafactor", "momentum"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, make):
    """With dropout, accumulation, clipping and a schedule; the process stops three steps after its last checkpoint."""
    how = dict(make=make, accumulate=3, clip=0.1, schedule=linear(20, warmup=2), seed=3)
    whole = setup(**how)
    expected = told(whole.run(14))

    class Stop(Exception):
        pass

    def stop(record):
        if record["step"] == 7:
            raise Stop

    with pytest.raises(Stop):
        setup(folder=tmp_path, every=5, on_step=stop, **how).run(14)
    assert [r["step"] for r in read_log(tmp_path)] == list(range(8))
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 8, "lo')  # killed in the middle of a line
    torch.manual_seed(99)
    again = setup(folder=tmp_path, every=5, **how)
    assert again.resume() == 5 and len(again.records) == 5
    assert told(again.run(14)) == expected
    assert told(read_log(tmp_path)) == expected
    assert same(again.model, whole.model)
    assert again.model.passes == 14 * 3


def test_running_in_two_parts_is_running_once(tmp_path):
    once, parts = setup(), setup(folder=tmp_path)
    parts.run(3)
    torch.manual_seed(1)
    assert told(parts.run(8)) == told(once.run(8)) and same(parts.model, once.model)
    assert [p.name for p in parts.checkpoints()] == ["step-00000003.safetensors", "step-00000008.safetensors"]


def test_the_small_checkpoints_script_resumes_its_own_optimizer_and_order(tmp_path, monkeypatch):
    """data/checkpoints/train.py: Muon's memory is saved, and its data is a function of the step over epochs."""
    monkeypatch.syspath_prepend(facts.data_path() / "checkpoints")
    train = pytest.importorskip("train")
    stream = torch.arange(256 * 4 + 100)
    order, later = train.windows(stream, 2, seed=1), train.windows(stream, 2, seed=1)
    assert torch.equal(later(7)["ids"], [order(i) for i in range(8)][7]["ids"])  # an epoch is 3 windows
    assert torch.equal(order(0)["targets"][:, :-1], order(0)["ids"][:, 1:])

    def run(folder=None):
        model = build(CONFIG)
        schedule = lambda step: train.share(step, 10)
        return Trainer(model, windows(STREAM, 16, 4), train.Muon(model), schedule, folder=folder, seed=0)

    whole = run()
    expected = told(whole.run(8))
    run(tmp_path).run(5)
    again = run(tmp_path)
    assert again.resume() == 5 and told(again.run(8)) == expected and same(again.model, whole.model)


def test_the_last_few_checkpoints_stay_and_are_plain_safetensors(tmp_path):
    run = setup(folder=tmp_path, every=2, keep=3)
    run.run(11)
    assert sorted(os.listdir(tmp_path)) == ["log.jsonl", *(f"step-{i:08}.safetensors" for i in (8, 10, 11))]
    with safe_open(run.checkpoints()[-1], "pt") as file:
        assert set(file.keys()) == {"model/passes"} | {
            f"{part}/{name}"
            for part, name in [("model", "head.weight")] + [("optimizer", f"embed.weight/{x}") for x in "mv"]
        }
        assert json.loads(file.metadata()["trainer"])["step"] == 11


def test_a_checkpoint_is_written_synced_renamed_and_the_folder_synced_in_this_order(tmp_path, monkeypatch):
    events, run = [], setup(folder=tmp_path)
    name = lambda fd: os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) if os.path.isdir("/proc/self/fd") else fd
    for module, call, what in ((os, "fsync", name), (os, "replace", lambda a, b: b.name), (trainer, "save_file", None)):
        true = getattr(module, call)
        note = lambda *args, call=call, what=what, true=true, **how: (
            events.append((call, what(*args) if what else args[1].name)),
            true(*args, **how),
        )[1]
        monkeypatch.setattr(module, call, note)
    run.run(1)
    file, temporary = "step-00000001.safetensors", ".step-00000001.safetensors.tmp"
    want = [("fsync", "log.jsonl"), ("save_file", temporary), ("fsync", temporary), ("replace", file)]
    assert [e[0] for e in events] == [*(e[0] for e in want), "fsync"]
    if os.path.isdir("/proc/self/fd"):
        assert events == [*want, ("fsync", tmp_path.name)]


def test_loss_scaling_skips_overflow_and_resumes_with_its_scale(tmp_path):
    how = dict(model=build(CONFIG), precision=Precision("fp16", scale=2.0**40, dynamic=True, every=4))
    before = {k: v.clone() for k, v in how["model"].state_dict().items()}
    first = setup(folder=tmp_path / "a", **how).run(1)[0]
    assert first["skipped"] and first["grad_norm"] is None and first["scale"] == 2.0**40
    assert all(torch.equal(v, before[k]) for k, v in how["model"].state_dict().items())

    fresh = lambda: dict(model=build(CONFIG), precision=Precision("fp16", scale=2.0**40, dynamic=True, every=4))
    expected = setup(**fresh()).run(30)
    setup(folder=tmp_path / "b", **fresh()).run(26)
    again = setup(folder=tmp_path / "b", **fresh())
    again.resume()
    assert told(again.run(30)) == told(expected)
    assert not expected[-1]["skipped"] and len({r["scale"] for r in expected}) > 5


# --- the two modes (the survey's claims about them)


def test_a_parallel_masked_loss_is_the_mean_of_the_stepwise_losses():
    """Teacher forcing: with the true past given, T positions at once are T steps with a cache."""
    model, batch = build(CONFIG).double(), windows(STREAM, 24, 3)(0)
    total, count = next_token(model, batch)
    cache, losses = ContiguousCache(CONFIG, 3, 24, dtype=torch.float64), []
    with torch.no_grad():
        for t in range(24):
            logits = model(batch["ids"][:, t : t + 1], cache=cache)  # [B, 1, V]
            losses.append(F.cross_entropy(logits[:, 0], batch["targets"][:, t]).item())
    assert count == 72
    assert total.item() / count == pytest.approx(sum(losses) / 24, abs=1e-6)


def test_backward_is_twice_forward_and_a_step_six_operations_a_weight_and_token():
    config = CONFIG.with_(d_model=128, vocab_size=500, d_ff=512)
    model, data = build(config), windows(STREAM % 500, 16, 2)
    batch = data(0)
    with FlopCounterMode(display=False) as forward:
        total, _ = next_token(model, batch)
    with FlopCounterMode(display=False) as backward:
        total.backward()
    assert backward.get_total_flops() == pytest.approx(2 * forward.get_total_flops(), rel=0.01)
    with FlopCounterMode(display=False) as step:
        setup(model, data=data).run(1)
    assert step.get_total_flops() == forward.get_total_flops() + backward.get_total_flops()
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    assert step.get_total_flops() == pytest.approx(6 * matrices * 32, rel=0.05)  # attention's T x T is the rest


def test_generating_leaves_no_gradients_and_no_graph():
    model = build(CONFIG)
    setup(model, data=windows(STREAM, 16, 2)).run(1)
    out = generate(model, STREAM[None, :4], 5)
    assert out.shape == (1, 9) and not out.requires_grad
    assert all(p.grad is None for p in model.parameters())


class Operations(TorchDispatchMode):
    """Notes every operation that PyTorch runs, with the shapes it gets."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        shapes = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
        self.seen[str(fn), shapes] += 1
        return fn(*args, **(kwargs or {}))


def test_fine_tuning_is_the_same_computation_on_other_data_and_improves_on_it():
    """Pre-training from random weights on noise, and llama-2m on a language that it never saw: tables in TOML."""
    model, tokenizer = pretrained("llama-2m")
    text = (facts.data_path() / "models.toml").read_text(encoding="utf-8")[:24_000]
    ids = torch.tensor(tokenizer.encode(text))
    train, held_out = windows(ids[:-1000], 64, 4), windows(ids[-1000:], 64, 15)(0)
    noise = windows(torch.randint(0, 2048, (len(ids) - 1000,)), 64, 4)
    counted = []
    for each, data in ((build(model.config), noise), (model, train)):
        run = setup(each, data=data, lr=1e-3)
        run.run(1)  # the optimizer makes its memory
        with Operations() as operations, FlopCounterMode(display=False) as flops:
            run.run(2)
        counted.append((operations.seen, flops.get_flop_counts()["Global"]))
    assert counted[0] == counted[1] and sum(counted[0][0].values()) > 1000

    @torch.no_grad()
    def loss():
        total, count = next_token(model, held_out)
        return total.item() / count

    before, optimizer = loss(), adamw(dict(model.named_parameters()), 3e-3)
    Trainer(model, train, optimizer, clip=1.0).run(8)
    assert loss() < 0.9 * before


# --- bad input


@pytest.mark.parametrize("bad", ["target", "weight", "learning rate"])
def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_batches(tmp_path, bad):
    model = Dropped()
    data = lambda i: ragged(i) | ({"bias": torch.full((), math.nan)} if bad == "target" and i == 5 else {})
    loss = lambda m, b: (lambda s, n: (s + b.get("bias", 0.0), n))(
        *next_token(m, {"ids": b["ids"], "targets": b["targets"]})
    )
    how = dict(lr=1e30, make=sgd) if bad == "learning rate" else {}
    run = setup(model, data=data, loss=loss, accumulate=2, folder=tmp_path, every=1, **how)
    if bad == "weight":
        run.on_step = lambda record: model.embed.weight.data.fill_(math.inf) if record["step"] == 1 else None
    at = 1 if bad == "learning rate" else 2
    with pytest.raises(TrainingDiverged, match=f"step {at}: .*diverged-0000000{at}") as error:
        run.run(9)
    assert error.value.step == at
    kept = load_file(error.value.batch)
    assert {name.split("/")[0] for name in kept} == {str(2 * at), str(2 * at + 1)}
    assert torch.equal(kept[f"{2 * at + 1}/ids"], data(2 * at + 1)["ids"])
    assert [r["step"] for r in read_log(tmp_path)] == list(range(at))
    if bad == "target":
        assert all(p.isfinite().all() for p in model.parameters())


def test_a_checkpoint_of_another_config_is_refused_and_the_difference_named(tmp_path):
    setup(build(CONFIG), folder=tmp_path).run(1)
    for other, difference in (
        (dict(model=build(CONFIG.with_(d_ff=48))), "d_ff is 128 there and 48 here"),
        (dict(model=build(CONFIG), accumulate=2), "accumulate is 1 there and 2 here"),
        (dict(model=build(CONFIG), precision=Precision("bf16")), "precision is None there and bf16 here"),
        (dict(), "name is Decoder there and Dropped here"),
    ):
        run = setup(folder=tmp_path, **other)
        before = {k: v.clone() for k, v in run.model.state_dict().items()}
        with pytest.raises(CheckpointError, match=difference):
            run.resume()
        assert run.step == 0 and all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    with pytest.raises(CheckpointError, match="optimizer is adam_direction there and momentum_direction here"):
        setup(build(CONFIG), folder=tmp_path, make=sgd).resume()
    with pytest.raises(CheckpointError, match=r"torch.float32 there and \[.*\] torch.float64 here"):
        setup(build(CONFIG).double(), folder=tmp_path).resume()
    smaller = Dropped(D=8)
    setup(Dropped(), folder=tmp_path / "b").run(1)
    with pytest.raises(CheckpointError, match=r"head.weight is \[50, 16\] .* there and \[50, 8\] .* here"):
        setup(smaller, folder=tmp_path / "b").resume()
    assert setup(build(CONFIG), folder=tmp_path).resume() == 1


def test_a_damaged_checkpoint_is_named(tmp_path):
    run = setup(folder=tmp_path, every=1)
    run.run(2)
    last = run.checkpoints()[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="step-00000002.safetensors is damaged.*delete it"):
        setup(folder=tmp_path).resume()
    safetensors.torch.save_file({"model/x": torch.ones(1)}, last)  # whole, but no trainer wrote it
    with pytest.raises(CheckpointError, match="step-00000002.safetensors is damaged.*delete it"):
        setup(folder=tmp_path).resume()
    last.unlink()
    assert setup(folder=tmp_path).resume() == 1


def test_a_log_that_lost_lines_is_named(tmp_path):
    """Neither filled up with nothing nor found out after the weights have changed."""
    setup(folder=tmp_path).run(2)
    log, run = tmp_path / "log.jsonl", setup(folder=tmp_path)
    whole, before = log.read_bytes(), {k: v.clone() for k, v in run.model.state_dict().items()}
    for spoil in (lambda: log.write_bytes(whole[:-9]), log.unlink):
        spoil()
        with pytest.raises(CheckpointError, match="log.jsonl lacks lines from before step 2"):
            run.resume()
        assert run.step == 0 and all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    log.write_bytes(b"{no record}\n" + whole)
    with pytest.raises(ValueError, match="log.jsonl has a line that is no record"):
        read_log(tmp_path)


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    setup(folder=tmp_path).run(1)
    with pytest.raises(ValueError, match="holds a run already: call resume"):
        setup(folder=tmp_path).run(2)
    fresh = setup(folder=tmp_path / "new")
    assert fresh.resume() == 0 and len(fresh.run(2)) == 2


@pytest.mark.parametrize(
    "how, message",
    [
        (dict(data=[1, 2]), "data must be a function"),
        (dict(schedule=0.1), "schedule must be a function"),
        (dict(loss=None), "loss must be a function"),
        (dict(accumulate=0), "accumulate = 0, but it must be a whole number, 1 or more"),
        (dict(every=2.5), "every = 2.5"),
        (dict(keep=0), "keep = 0"),
        (dict(seed=-1), "seed = -1"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_wrong_arguments_are_refused(how, message):
    with pytest.raises((TypeError, ValueError), match=message):
        setup(**how)


def test_wrong_optimizers_data_and_folders_are_refused():
    model = Dropped()
    with pytest.raises(ValueError, match="holds embed.weight, none of the model's weights"):
        Trainer(model, ragged, adamw(dict(Dropped().named_parameters()), 0.1))
    with pytest.raises(ValueError, match="nothing by name"):
        Trainer(model, ragged, torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match=r"data\(0\) is tuple, and a batch is a dict"):
        setup(data=lambda step: (1, 2)).run(1)
    with pytest.raises(ValueError, match="no target"):
        setup(data=lambda step: {"ids": STREAM[None], "targets": STREAM[None] * 0 - 100}).run(1)
    for steps in (2.5, "3", -1):
        with pytest.raises(ValueError, match=f"steps = {steps!r}, but it must be a whole number, 0 or more"):
            setup().run(steps)
    with pytest.raises(TypeError, match="precision = 'bf16', but it is an object: Precision"):
        setup(precision="bf16")
    with pytest.raises(ValueError, match="max_norm = 0"):
        setup(clip=0).run(1)
    for act in (lambda run: run.resume(), lambda run: run.save(), lambda run: run.run(1)):
        with pytest.raises(ValueError, match="give it a folder"):
            act(setup(every=5))


def test_the_front_door_opens():
    assert execution.Trainer is Trainer


def test_a_run_can_be_looked_at_without_its_data(tmp_path):
    model, again = build(CONFIG), build(CONFIG)
    setup(model, folder=tmp_path).run(2)
    torch.nn.init.zeros_(next(again.parameters()))
    trainer = setup(again, data=None, folder=tmp_path)
    assert trainer.resume() == 2 and same(model, again)
    with pytest.raises(TypeError, match="data = None is enough to resume"):
        trainer.run(3)
