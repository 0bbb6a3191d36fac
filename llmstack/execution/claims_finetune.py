"""What the surveys claim about fine-tuning, recomputed; data/finetune/sweep.json has the runs that take minutes."""

import json
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from llmstack.architectures import build
from llmstack.config import preset
from llmstack.execution.finetune import prepare
from llmstack.facts import Computed, data_path

NATS = "nats a token"


@cache
def runs() -> dict[str, dict]:
    """Of each method: `trained` values, peak `lr`, and the `curve` of losses on the new domain and on the old ones."""
    return json.loads((data_path() / "finetune" / "sweep.json").read_text(encoding="utf-8"))


def change(name: str) -> tuple[float, float]:
    """By how much a run lowers the new domain's loss, and raises the old ones', from the base model's."""
    first, last = runs()["full"]["curve"][0], runs()[name]["curve"][-1]
    return round(first["new"] - last["new"], 4), round(last["old"] - first["old"], 4)


def backward_skips_frozen_weights() -> Computed:
    """AC-18: matrix operations of a step over N D, for full tuning and for LoRA."""
    config, found = preset("llama2-7b").with_(d_model=256, n_layers=8, n_heads=4, d_ff=512, vocab_size=512), {}
    for method, settings in (("full", {}), ("lora", dict(r=1, targets="all"))):
        model, ids = build(config), torch.zeros(1, 16, dtype=torch.long)
        N = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        prepare(model, method, **settings)
        with FlopCounterMode(display=False) as counter:
            model(ids).sum().backward()
        found[method] = counter.get_total_flops() / (N * ids.numel())
    says = f"full tuning {found['full']:.2f} N D, LoRA {found['lora']:.2f} N D: dW of the frozen matrices is not formed"
    return Computed([round(f, 2) for f in found.values()], "operations / N D", says)


def full_tuning_forgets() -> Computed:
    """BC-10: the old domains' rise in loss under full tuning."""
    learnt, forgotten = change("full")
    return Computed(forgotten, NATS, f"C++ {learnt:.2f} nats a token better, what it knew before {forgotten:.2f} worse")


def lora_learns_less() -> Computed:
    """BC-11: what LoRA of each rank learns and forgets, as shares of full tuning's."""
    full, shares = change("full"), {}
    for r in (1, 4, 16, 64):
        shares[r] = [a / b for a, b in zip(change(f"lora-{r}"), full)]
    shown = "; ".join(f"r = {r}: learns {a:.0%}, forgets {b:.0%}" for r, (a, b) in shares.items())
    return Computed([round(a, 3) for a, _ in shares.values()], "of what full tuning learns, r = 1, 4, 16, 64", shown)


def prompts_fall_short() -> Computed:
    """BC-15: what the best soft prompt learns, as a share of full tuning's."""
    best = max((n for n in runs() if n.startswith("prompt-")), key=lambda n: change(n)[0])
    share = change(best)[0] / change("full")[0]
    says = f"{best}: {share:.0%} of what full tuning learns on a model of 1.7 million weights"
    return Computed(round(share, 3), "of what full tuning learns", says)
