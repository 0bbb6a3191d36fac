"""Mixtures in small vision models on MNIST digits: WideNet's shared layers and M³ViT's routers, one for each task.

Pictures of 14 × 14 in 49 patches, a ViT of width 32. The slow lane trains; what needs no training is in the quick one.
"""

from functools import partial

import pytest
import torch
from torch import nn

from llmstack.architectures.moe import Experts
from llmstack.architectures.moe_variants import Buffer, TaskMoE, share
from llmstack.architectures.routers import balance_loss, top_k
from llmstack.architectures.vision import ViT, tower
from llmstack.execution.pictures import digits

WIDTH, PATCHES = 32, 49
EXPERTS = dict(n_experts=4, top_k=2, d_expert=64)


@pytest.fixture(scope="module")
def pictures():
    """5,000 digits [5000, 1, 14, 14] and their labels."""
    try:
        images, labels = digits()
    except ModuleNotFoundError as absent:
        pytest.skip(str(absent))
    return nn.functional.avg_pool2d(images, 2), labels


def vit(depth, shared=False, **experts):
    """A ViT of so many layers; `shared`: all use the first one's attention and FFN or experts."""
    model = ViT(tower("small", WIDTH, depth, 4, 1 + PATCHES, d_ff=64, **experts), patch=2, channels=1)
    if shared:
        share(model.blocks)
    return model


def count(model):
    return sum(p.numel() for p in model.parameters())


def train(model, heads, loss, steps, seed=0, batch=64, lr=3e-3):
    rng = torch.Generator().manual_seed(seed)
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(torch.randint(4000, (batch,), generator=rng)).backward()
        optimizer.step()
        schedule.step()


# ---- WideNet


def test_depth_of_a_shared_vision_model_costs_two_norms_a_layer():
    """Xue et al. 2021, arXiv:2107.11817, section 2.3: attention, router and experts once, norms for each layer."""
    shallow, deep = vit(2, True, **EXPERTS), vit(8, True, **EXPERTS)
    assert count(deep) - count(shallow) == 6 * 2 * 2 * WIDTH
    assert count(vit(8, **EXPERTS)) > 5 * count(deep)


@pytest.mark.slow
def test_shared_layers_with_experts_do_as_well_as_layers_apart(pictures):
    """Four layers: apart (36,000 parameters), shared (11,000), and shared with four experts (23,000). On 1,000 digits
    not seen all three are within a few in a hundred; without training it would be a tenth."""
    images, labels = pictures
    found, sizes = {}, {}
    for name, how in {"apart": {}, "shared": dict(shared=True), "experts": dict(shared=True, **EXPERTS)}.items():
        torch.manual_seed(0)
        model, head = vit(4, **how), nn.Linear(WIDTH, 10)

        def loss(rows, model=model, head=head):
            value = nn.functional.cross_entropy(head(model.pooled(images[rows])), labels[rows])
            if not model.config.n_experts:
                return value
            return value + 0.01 * balance_loss(model.blocks[0].ffn.last)

        train(model, head, loss, 200)
        with torch.no_grad():
            right = (head(model.pooled(images[4000:])).argmax(-1) == labels[4000:]).float().mean()
        found[name] = float(right)
        sizes[name] = count(model)
    assert sizes["shared"] < 0.35 * sizes["apart"] and sizes["experts"] < 0.7 * sizes["apart"]
    assert min(found.values()) > 0.5 and found["experts"] > found["apart"] - 0.1, found


# ---- M³ViT


class TwoTasks(nn.Module):
    """A ViT whose second layer's FFN is a mixture with a router for each task, and a head for each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = vit(2)
        self.moe = TaskMoE(Experts(6, WIDTH, 64, "gelu"), partial(top_k, k=2), tasks=2)
        self.body.blocks[1].ffn = self.moe
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 4)])

    def forward(self, images, task):
        self.moe.task = task
        return self.heads[task](self.body.pooled(images))


@pytest.mark.slow
def test_two_tasks_on_one_chip(pictures):
    """Which digit, and by how many quarters was it turned? One set of experts, two routers. Both tasks are learnt, the
    routers send the patches of a picture to other experts, and expert by expert each is fetched once a picture."""
    images, labels = pictures
    quarters = torch.randint(4, (len(images),), generator=torch.Generator().manual_seed(1))
    turned = torch.stack([torch.rot90(x, int(q), (1, 2)) for x, q in zip(images, quarters)])
    model, targets = TwoTasks(), (labels, quarters)

    def loss(rows):
        total = 0.0
        for task, target in enumerate(targets):
            total = total + nn.functional.cross_entropy(model(turned[rows], task), target[rows])
            total = total + 0.01 * balance_loss(model.moe.last)
        return total

    train(model, nn.ModuleList(), loss, 200)
    reached = {}
    model.moe.register_forward_pre_hook(lambda _, args: reached.update(x=args[0]))
    seen, right = [], []
    with torch.no_grad():
        for task, target in enumerate(targets):
            right.append(float((model(turned[4000:], task).argmax(-1) == target[4000:]).float().mean()))
            model(turned[4000:4001], task)  # one picture
            x, routing = reached["x"][0], model.moe.last
            want = model.moe(x[None])[0]
            chips = {by: Buffer(model.moe.experts, room=2) for by in ("token", "expert")}
            for by, chip in chips.items():
                torch.testing.assert_close(chip.compute(x, routing, by), want)
            assert chips["expert"].loads == len(set(routing.expert.tolist())) <= 6 and chips["expert"].peak <= 2
            assert chips["token"].loads > 2 * chips["expert"].loads
            seen.append(routing.matrix() != 0)
    assert right[0] > 0.3 and right[1] > 0.55, f"{right}; chance is 0.1 and 0.25"
    assert float((seen[0] != seen[1]).any(-1).float().mean()) > 0.5, "each task has its router"
