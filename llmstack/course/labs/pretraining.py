"""The lab of section 2.2: which gradients a narrow format can hold, and what a loss scale does for them."""

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from llmstack.architectures import pretrained
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.execution.objectives import next_token
from llmstack.execution.precision import FORMATS, rounded

TEXT = "And God said, Let there be light: and there was light. And God saw the light, that it was good."


@cache
def sampled_gradients() -> Tensor:
    """What comes to every linear's output in llama-2m on a line of the Bible, of the summed loss."""
    model, tokenizer = pretrained("llama-2m")
    found, ids = [], torch.tensor([tokenizer.encode(TEXT)])
    note = lambda module, x, y: y.register_hook(lambda dy: found.append(dy.flatten())) and None
    handles = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]
    next_token(model, {"ids": ids[:, :-1], "targets": ids[:, 1:]})[0].backward()
    for handle in handles:
        handle.remove()
    every = torch.cat(found)
    return every[every != 0]


def loss_scaling() -> Lab:
    """A histogram by powers of two: a mean over more tokens moves it left, a loss scale moves it right."""

    def draw(format: str, log2_of_tokens: int, log2_of_scale: int):
        shift = log2_of_scale - log2_of_tokens
        g, info = sampled_gradients() * 2.0**shift, torch.finfo(FORMATS[format])
        kept = rounded(g, format)
        lost, over = float((kept == 0).float().mean()), float((~kept.isfinite()).float().mean())
        least = np.log2(info.smallest_normal * info.eps)  # the smallest subnormal
        fig, ax = plots.axes("log₂ of a gradient's size", "share of gradients")
        sizes, edges = g.abs().log2().numpy(), np.arange(-60, 40)
        ax.hist(sizes, edges, weights=np.full(len(sizes), 1 / len(sizes)), color=plots.COLOURS[0])
        ax.axvspan(least, np.log2(info.max), color="#e8e8e8", zorder=0)
        middle = np.clip((least + np.log2(info.max)) / 2, -10, 20)
        ax.text(middle, 0.97, f"what {format} can hold", ha="center", va="top", transform=ax.get_xaxis_transform())
        ax.set_xlim(-60, 40)
        says = f"{format}, loss scale 2^{log2_of_scale}, a mean over 2^{log2_of_tokens}"
        return fig, f"{says} tokens: {lost:.1%} of the gradients become zero, {over:.1%} infinite."

    powers = dict(log2_of_tokens=(0, 24, 1, 20), log2_of_scale=(0, 40, 1, 0))
    return lab(draw, "A loss scale", format=list(FORMATS), **powers)
