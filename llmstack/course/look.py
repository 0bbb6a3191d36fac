"""What a model's positions see, measured on the model itself.

    look.next_words(model, tokenizer, text)   the likeliest next tokens and their probabilities
look.reach(model, ids)                    gradients: which inputs an output depends on
look.cross_attention(model, source, ids)  where an encoder-decoder's target reads its source
with look.passes(model) as count: …       how often each side of a model ran
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmstack.architectures.encoder_decoder import FrontEnd
from llmstack.architectures.ends import Embedding
from llmstack.architectures.layers import Attention, Block
from llmstack.course import plots
from llmstack.ops.attention import attention_weights


def reach(model: nn.Module, ids: Tensor, source: Tensor | None = None, seed: int = 0) -> Tensor:
    """|d (r · output t) / d (embedding s)| for a fixed random r: zero where output t cannot depend on input s.

    ids [1, T] -> [T, T] for a decoder (outputs are logits) and an encoder (hidden states). With a `source` of S
    positions, for an encoder-decoder, inputs and outputs are the source's and then the target's: [S + T, S + T]. An
    input is what enters the first block: a token's embedding, or what Whisper's convolutions make of four frames.
    """
    seen: list[Tensor] = []
    embeddings = [m for m in model.modules() if isinstance(m, Embedding | FrontEnd)]
    hooks = [m.register_forward_hook(lambda m, args, x: seen.append(x)) for m in embeddings]
    try:
        with torch.enable_grad():
            if source is None:
                outputs = [model(ids)]
            else:
                outputs = [model.encode(source)]
                outputs.append(model.decode(ids, outputs[0]))
    finally:
        for hook in hooks:
            hook.remove()
    rng, rows = torch.Generator().manual_seed(seed), []
    for output in outputs:
        r = torch.randn(output.shape[-1], generator=rng)
        for t in range(output.shape[1]):
            grads = torch.autograd.grad(output[0, t] @ r, seen, retain_graph=True, allow_unused=True)
            parts = [torch.zeros(x.shape[1]) if g is None else g[0].norm(dim=-1) for g, x in zip(grads, seen)]
            rows.append(torch.cat(parts))
    return torch.stack(rows)


@torch.no_grad()
def apart(model: nn.Module, tokenizer, one: str, other: str) -> dict[str, float]:
    """For each token of the beginning that two texts share: |a - b| / |a| of its vectors in the last layer, in %.

    model: a decoder or an encoder. A token that occurs twice is named once, by its last place.
    """
    a, b = (tokenizer.encode(text) for text in (one, other))
    shared = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    before, after = (model.hidden_states(torch.tensor([ids]))[-1][0, :shared] for ids in (a, b))  # [shared, D]
    moved = 100 * (before - after).norm(dim=-1) / before.norm(dim=-1)
    names = [token.replace("Ġ", "").lower() or "·" for token in tokenizer.tokens(a[:shared])]
    return {name: round(float(x), 1) for name, x in zip(names, moved) if name[0] not in "[<"}  # no [CLS], no <|marks|>


@torch.no_grad()
def next_words(model: nn.Module, tokenizer, text: str, n: int = 6) -> dict[str, float]:
    """The n likeliest next tokens of a decoder after `text`, each with its probability."""
    chance = model(torch.tensor([tokenizer.encode(text)]), keep=1)[0, -1].softmax(-1)  # [V]
    return {f"“{tokenizer.decode([i])}”": float(chance[i]) for i in chance.topk(n).indices}


@torch.no_grad()
def cross_attention(model: nn.Module, source: Tensor, ids: Tensor) -> Tensor:
    """Weights with which target tokens read source positions: ids [1, T], source as `encode` takes it ->
    [L, H, T, S], each row summing to one."""
    found: list[Tensor] = []

    def keep(layer: Attention, args: tuple, out: Tensor) -> None:
        x, now = args
        split = lambda y: y.unflatten(-1, (-1, layer.config.d_head)).transpose(1, 2)  # [1, H, T, Dh]
        q, k = split(layer.q(x)), split(layer.k(now.memory))
        found.append(attention_weights(q, k, now.memory_mask, scale=layer.config.attention_scale)[0])

    hooks = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, Attention) and m.cross]
    if not hooks:
        raise ValueError(f"{model.config.name} has no cross-attention: it is a {model.config.kind}")
    try:
        model.decode(ids, model.encode(source))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def panels(maps: Mapping[str, Any], *, xlabel: str, ylabel: str, alt: str) -> None:
    """Matrices with values from 0 to 1, side by side under their titles."""
    fig, axes = plots.axes("", "", size=(3.2 * len(maps), 3.6), panels=len(maps))
    axes = axes if len(maps) > 1 else [axes]
    for ax, (title, matrix) in zip(axes, maps.items()):
        plots.heatmap(matrix, xlabel=xlabel, ylabel=ylabel if ax is axes[0] else "", title=title, ax=ax)
        ax.images[0].set_clim(0, 1)
    plots.show(fig, alt)


@contextmanager
def passes(model: nn.Module) -> Iterator[dict[str, int]]:
    """Counts the passes through the first block of each stack of a model: {"encoder": 1, "decoder": 12}."""
    count: dict[str, int] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, Block) and name.endswith("blocks.0"):
            side = name.partition(".")[0] if name != "blocks.0" else model.config.kind

            def add(*_, side=side):
                count[side] = count.get(side, 0) + 1

            hooks.append(module.register_forward_hook(add))
    try:
        yield count
    finally:
        for hook in hooks:
            hook.remove()
