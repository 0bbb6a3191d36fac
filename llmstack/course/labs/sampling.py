"""Labs of chapter 2 on inference token by token."""

import torch

from llmstack.architectures import pretrained
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.execution.sampling import filtered

SHOWN = 24
PROMPTS = ("And the LORD spake unto", "And he went into the", "KING HENRY V:\nMy")


def next_token() -> Lab:
    """The next token's distribution of a small trained model: what temperature does to it, and what each cut keeps."""
    model, tokenizer = pretrained("llama-2m")
    with torch.no_grad():
        logits = {p: model(torch.tensor([tokenizer.encode(p)]), keep=1)[0, -1].double() for p in PROMPTS}  # [V]
    bits = lambda p: float(torch.special.entr(p).sum()) / torch.log(torch.tensor(2.0)).item()

    def draw(temperature: float, top_k: int, top_p: float, min_p: float, after: str):
        before = logits[after].softmax(-1)
        left = filtered(logits[after] / temperature, top_k, top_p, min_p).softmax(-1)  # [V]
        first = before.argsort(descending=True)[:SHOWN]
        fig, ax = plots.axes(f"the {SHOWN} likeliest next tokens", "probability", size=(7.6, 3.8))
        ax.bar(range(SHOWN), left[first].numpy(), color=plots.COLOURS[0], label="drawn from")
        ax.step(range(SHOWN), before[first].numpy(), where="mid", color="#111111", label="the model's own")
        names = [repr(tokenizer.decode([i]))[1:-1].replace(" ", "␣") for i in first.tolist()]
        ax.set_xticks(range(SHOWN), names, rotation=60, ha="right", fontsize=8)
        for tick, kept in zip(ax.get_xticklabels(), left[first] > 0):
            tick.set_color("#111111" if kept else "#aaaaaa")
        ax.legend(frameon=False)
        kept, lost = int((left > 0).sum()), float(before[left == 0].sum())
        return fig, (
            f"After “{after.strip()}”: {kept} of {len(left)} tokens can be drawn, {lost:.0%} of the model's own mass "
            f"is cut. Entropy {bits(before):.1f} bits before, {bits(left):.1f} now: like {2 ** bits(left):.0f} equal "
            f"choices. Likeliest: {left.max():.0%}."
        )

    cuts = dict(top_k=(0, 10, 1, 0), top_p=(0.05, 1.0, 0.05, 0.9), min_p=(0.0, 0.9, 0.02, 0.0))
    after = {p.replace("\n", " "): p for p in PROMPTS}
    return lab(draw, "What may be drawn", temperature=(0.1, 3.0, 0.1, 1.0), **cuts, after=after)
