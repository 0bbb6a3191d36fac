"""What the survey claims about tuning on few bits, recomputed."""

import torch
from torch import nn

from llmstack.architectures import build, pretrained
from llmstack.config import preset
from llmstack.execution.finetune import linears, prepare
from llmstack.execution.finetune.lq_lora import stored_bits
from llmstack.facts import Computed
from llmstack.ops.packed import NFLinear

TARGETS = ("q", "k", "v", "o")


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
