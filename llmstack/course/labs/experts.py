"""The lab of mixtures of experts: the same tokens under every router."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from llmstack.architectures import routers
from llmstack.architectures.routers import Routing, top_k
from llmstack.course import plots
from llmstack.course.panels import Lab, lab

TOKENS, EXPERTS = 512, 8


def tokens(skew: float, seed: int = 0) -> Tensor:
    """Logits [1, N, E] of tokens that like the last expert best and the first least: `skew` apart in the mean."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(1, TOKENS, EXPERTS, generator=rng) + torch.linspace(0, skew, EXPERTS)


def selections(factor: float) -> dict[str, Callable[[Tensor], Routing]]:
    """The routers by name; `factor` is the capacity of those that have one, in even shares."""
    one, two = (routers.capacity_for(TOKENS, EXPERTS, k, factor) for k in (1, 2))
    rank = (1 / torch.arange(1, 1001)).cumsum(0)  # words as frequent as Zipf's law has them
    ids = torch.searchsorted(rank, torch.rand(1, TOKENS, generator=torch.Generator().manual_seed(1)) * rank[-1])
    table = routers.balanced_table(1 / torch.arange(1, 1001), EXPERTS)
    return {
        "Switch: top 1": partial(top_k, k=1, normalise=False, capacity=one),
        "V-MoE: top 1 by score": partial(top_k, k=1, normalise=False, capacity=one, by_score=True),
        "GShard: top 2": partial(routers.gshard, capacity=two),
        "Mixtral: top 2, no capacity": partial(top_k, k=2),
        "DeepSeek-V3: top 2, corrected": corrected,
        "expert choice": partial(routers.expert_choice, capacity=one),
        "BASE: best even assignment": routers.base,
        "hash of the word": partial(routers.hashed, ids=ids, table=table),
    }


def corrected(logits: Tensor, steps: int = 300) -> Routing:
    """Top 2 with the correction that DeepSeek-V3's rule has reached after some steps on these tokens."""
    bias, route = torch.zeros(EXPERTS), partial(top_k, logits, 2, score="sigmoid")
    for _ in range(steps):
        routers.rebalance(bias, route(bias=bias).load, speed=5e-3)
    return route(bias=bias)


def routing() -> Lab:
    """Load, tokens that nobody computes, and the balance loss, under a router and beside all others."""

    def draw(router: str, capacity: float, skew: float):
        found = {name: select(tokens(skew)) for name, select in selections(capacity).items()}
        fig, (left, middle, right) = plots.axes("", "", size=(12, 4.4), panels=3)
        r = found[router]
        load = {"wanted": dict(enumerate(r.asked.tolist())), "computed": dict(enumerate(r.load.tolist()))}
        plots.bars(load, ylabel="tokens", xlabel="expert", title=router, ax=left)
        missed = {name: 100 * (1 - len(other.token.unique()) / TOKENS) for name, other in found.items()}
        plots.bars(missed, ylabel="tokens without an expert (%)", ax=middle)
        losses = {name: float(routers.balance_loss(other)) for name, other in found.items()}
        plots.bars(losses, ylabel="balance loss, 1 when even", ax=right)
        right.set_yticklabels([])
        right.xaxis.set_major_formatter("{x:g}")
        return fig, (
            f"{router}: the fullest expert computes {r.load.max() / r.load.float().mean():.2f} times the mean, "
            f"{missed[router]:.1f} % of the tokens get no expert, the balance loss is {losses[router]:.3f}."
        )

    names = list(selections(1.0))
    return lab(
        draw, "One crowd, many routers", router=names, capacity=(0.25, 3.0, 0.25, 1.25), skew=(0.0, 3.0, 0.25, 1.5)
    )
