"""What the surveys claim about fine-tuning, recomputed; data/finetune/sweep.json has the runs that take minutes."""

import json
from functools import cache

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from llmstack.architectures import build, pretrained
from llmstack.config import preset
from llmstack.execution.finetune import linears, prepare
from llmstack.execution.finetune.lq_lora import stored_bits
from llmstack.facts import Computed, data_path
from llmstack.ops.packed import NFLinear

TARGETS = ("q", "k", "v", "o")


@cache
def runs() -> dict[str, dict]:
    """Of each method: `trained` values, peak `lr`, and the `curve` of losses on the new domain and on the old ones."""
    return json.loads((data_path() / "finetune" / "sweep.json").read_text(encoding="utf-8"))


def moved_by(name: str) -> tuple[float, float]:
    """By how much a run lowers the new domain's loss, and raises the old ones', from the base model's."""
    first, last = runs()["full"]["curve"][0], runs()[name]["curve"][-1]
    return round(first["new"] - last["new"], 4), round(last["old"] - first["old"], 4)


def backward_skips_frozen_weights() -> Computed:
    """AC-18: matrix operations of a step over N D, for full tuning and for LoRA."""
    config, found = preset("llama2-7b").with_(d_model=256, n_layers=8, n_heads=4, d_ff=512, vocab_size=512), {}
    for method, settings in (("full", {}), ("lora", dict(r=1, targets="all"))):
        model, ids = build(config), torch.zeros(1, 16, dtype=torch.long)
        N = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
        prepare(model, method, **settings)
        with FlopCounterMode(display=False) as counter:
            model(ids).sum().backward()
        found[method] = counter.get_total_flops() / (N * ids.numel())
    says = f"full tuning {found['full']:.2f} N D, LoRA {found['lora']:.2f} N D: dW of the frozen matrices is not formed"
    return Computed([round(f, 2) for f in found.values()], "operations / N D", says)


def full_tuning_forgets() -> Computed:
    """BC-10: the old domains' rise in loss under full tuning."""
    learnt, forgotten = moved_by("full")
    says = f"C++ {learnt:.2f} nats a token better, what it knew before {forgotten:.2f} worse"
    return Computed(forgotten, "nats a token", says)


def lora_learns_less() -> Computed:
    """BC-11: what LoRA of each rank learns and forgets, as shares of full tuning's."""
    full, shares = moved_by("full"), {}
    for r in (1, 4, 16, 64):
        shares[r] = [a / b for a, b in zip(moved_by(f"lora-{r}"), full)]
    shown = "; ".join(f"r = {r}: learns {a:.0%}, forgets {b:.0%}" for r, (a, b) in shares.items())
    return Computed([round(a, 3) for a, _ in shares.values()], "of what full tuning learns, r = 1, 4, 16, 64", shown)


def prompts_fall_short() -> Computed:
    """BC-15: what the best soft prompt learns, as a share of full tuning's."""
    best = max((n for n in runs() if n.startswith("prompt-")), key=lambda n: moved_by(n)[0])
    share = moved_by(best)[0] / moved_by("full")[0]
    says = f"{best}: {share:.0%} of what full tuning learns on a model of 1.7 million weights"
    return Computed(round(share, 3), "of what full tuning learns", says)


def qlora_of_65b() -> Computed:
    """BC-12: GB for LLaMA-65B by QLoRA (r = 64 on every matrix), and at 12 bytes a parameter, without activations."""
    config = preset("llama-65b")
    one = build(config.with_(n_layers=1), device="meta")
    shapes = [m.weight.shape for _, _, _, m in linears(one, "all")] * config.n_layers
    count = lambda module: sum(p.numel() for p in module.parameters())
    everything = count(one) + (config.n_layers - 1) * count(one.blocks[0])
    weights = sum(s.numel() for s in shapes)
    thin = 64 * sum(sum(s) for s in shapes)
    base = sum(stored_bits(shape.numel(), 4, 64) for shape in shapes) / 8
    parts = {"NF4 with double quantisation": base, "embeddings in bf16": 2 * (everything - weights)}
    parts |= {"A and B": 2 * thin, "their gradients": 2 * thin, "Adam's moments in fp32": 8 * thin}
    qlora, full = sum(parts.values()) / 1e9, 12 * everything / 1e9
    shown = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    says = f"{shown}; in 16 bits 2 + 2 + 8 bytes a parameter"
    return Computed([round(qlora, 2), round(full, 1)], "GB, QLoRA and 16-bit", says)


def bits_of_nf4() -> Computed:
    """BC-13: stored bits a weight of one matrix, without and with double quantisation."""
    layer = nn.Linear(1024, 1024)
    once, twice = NFLinear(layer, double=False).bits, NFLinear(layer).bits
    says = f"stored NF4: {once:.3f}, with the constants in FP8 {twice:.3f}; the paged optimizer is about memory's peaks"
    return Computed([round(once, 3), round(twice, 3)], "bits a weight", says)


@torch.no_grad()
def below_three_bits() -> Computed:
    """BC-14: average bits of llama-2m's attention under a budget of 2.75, and the error beside 2 bits for all."""
    found = []
    for choices in ({}, {"choices": [(2, 16)]}):
        model, _ = pretrained("llama-2m")
        before = {name: m.weight.clone() for name, _, _, m in linears(model, TARGETS)}
        prepare(model, "lq-lora", targets=TARGETS, rounds=1, **choices)
        layers = {name: model.get_submodule(name) for name in before}
        error = sum(((m.base.dequantise() + m.delta() - before[n]) ** 2).sum().item() for n, m in layers.items())
        bits = sum(m.base.bits * before[n].numel() for n, m in layers.items()) / sum(w.numel() for w in before.values())
        found.append((bits, error))
    (bits, error), (plain, more) = found
    says = f"{bits:.3f} bits on average under a budget of 2.75; squared error {error / more:.0%} of that of {plain:.2f}"
    return Computed(round(bits, 2), "bits a weight", says)
