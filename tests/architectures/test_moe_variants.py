"""What has been made of the expert layer, each held against its definition: depth, sharing, stages, fusion, order."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llmstack.architectures import build, grid_world, moe_1991, pretrained, routers
from llmstack.architectures.layers import Block, FeedForward, Pass
from llmstack.architectures.moe import Experts, MoE
from llmstack.architectures.moe_variants import (
    Buffer,
    Fusion,
    MixtureOfDepths,
    MoEfied,
    StableRouter,
    TaskMoE,
    balanced_k_means,
    fluctuation,
    share,
)
from llmstack.architectures.routers import top_k
from llmstack.config import ModelConfig
from llmstack.execution import corpus
from llmstack.ops.activations import ACTIVATIONS_TORCH
from llmstack.ops.rope import rope_frequencies, rope_tables

D = 16
CONFIG = ModelConfig("small", D, 2, 2, 40, d_ff=24, n_experts=4, top_k=2, d_expert=12)


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def descend(loss_of, parameters, steps, lr=1e-2):
    optimizer = torch.optim.Adam(list(parameters), lr)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(step).backward()
        optimizer.step()


# ---- Mixture-of-Depths


def depths(capacity, gated=True, T=12):
    torch.manual_seed(0)
    block = Block(CONFIG.with_(n_experts=0, top_k=0))
    now = Pass(causal=True, rotation=rope_tables(torch.arange(T)[None], rope_frequencies(8)))
    return MixtureOfDepths(block, D, capacity, gated), block, now


def test_all_tokens_at_depth_are_the_dense_block():
    mod, block, now = depths(1.0, gated=False)
    x = rand(3, 12, D)
    torch.testing.assert_close(mod(x, now), block(x, now))


def test_half_the_tokens_see_each_other_and_the_rest_pass():
    """Against the whole block with a mask that shows the chosen tokens only."""
    mod, block, now = depths(0.5)
    x = rand(3, 12, D)
    y, score = mod(x, now), mod.router(x)[..., 0]
    for b in range(3):
        chosen = torch.zeros(12, dtype=torch.bool)
        chosen[score[b].topk(6).indices] = True
        mask = (chosen & torch.ones(12, 12, dtype=torch.bool).tril())[None, None]
        whole = block(x[b : b + 1], Pass(mask=mask, rotation=now.rotation))[0]
        want = x[b] + score[b, :, None] * (whole - x[b])
        torch.testing.assert_close(y[b, chosen], want[chosen])
        assert torch.equal(y[b, ~chosen], x[b, ~chosen])
    assert torch.autograd.grad(y.sum(), mod.router.weight)[0].abs().max() > 0, "the gate teaches the router"


@pytest.mark.parametrize("capacity", [0.125, 0.5, 1.0])
def test_operations_follow_the_capacity(capacity):
    """Matrices in proportion to it, scores of the attention to its square."""
    mod, _, now = depths(capacity, T=64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # fused ones are not counted
        mod(rand(1, 64, D), now)
    n, matrices = 64 * capacity, 2 * (4 * D * D + 3 * D * 24)
    assert counter.get_total_flops() == n * matrices + 4 * n * n * D + 64 * 2 * D


def test_depths_at_the_edges():
    x = rand(2, 12, D)
    mod, _, now = depths(0.0)
    assert torch.equal(mod(x, now), x)
    with pytest.raises(ValueError, match=r"capacity = 1.5.*0 to 1"):
        depths(1.5)
    with pytest.raises(ValueError, match="without padding"):
        mod(x, Pass(mask=torch.ones(1, 1, 12, 12, dtype=torch.bool)))


def test_depths_take_whole_texts_only():
    mod, _, now = depths(0.5)
    for hidden in (Pass(bias=torch.zeros(1, 2, 12, 12)), Pass(cache=object())):
        with pytest.raises(ValueError, match="without padding, bias or cache"):
            mod(rand(2, 12, D), hidden)
    assert mod(rand(2, 11, D), Pass(causal=True)).shape == (2, 11, D)  # 6 of 11 tokens, without rotation


# ---- WideNet and V-MoE


def test_shared_experts_make_depth_free():
    """Two blocks or eight: the same matrices, and two norms for each layer more."""
    made = {}
    for depth in (2, 8):
        blocks = nn.ModuleList(Block(CONFIG, layer) for layer in range(depth))
        share(blocks)
        made[depth] = blocks
    count = lambda blocks: sum(p.numel() for p in blocks.parameters())
    assert count(made[8]) - count(made[2]) == 6 * 2 * D
    patches, seen = rand(2, 9, D), []
    for block in made[8]:
        patches = block(patches, Pass())
        seen.append(block.ffn.last.expert)
    patches.sum().backward()
    assert all(p.grad is not None for p in made[8].parameters() if p.requires_grad)
    assert not all(torch.equal(seen[0], other) for other in seen[1:]), "each layer routes in its own way"


def test_batch_priority_keeps_the_patches_that_matter():
    """Pictures of 16 patches: one tells the class, the rest are faint noise. Trained with room for all; with
    room for 4 of them, placing patches by score keeps what placing them in order loses."""
    rng, patterns = torch.Generator().manual_seed(0), rand(8, D, seed=1)

    def pictures(n):
        label = torch.randint(8, (n,), generator=rng)
        x = 0.3 * torch.randn(n, 16, D, generator=rng)
        x[torch.arange(n), torch.randint(16, (n,), generator=rng)] += patterns[label] * 1.5
        return x, label % 2  # which no linear map of the patch gives

    torch.manual_seed(0)
    moe, head = MoE(Experts(4, D, 16, "relu"), lambda h: top_k(h, 1, normalise=False)), nn.Linear(D, 2)
    answer = lambda x: head(moe(x).mean(1) * 4)

    def loss(step):
        x, label = pictures(256)
        return nn.functional.cross_entropy(answer(x), label) + 0.02 * routers.balance_loss(moe.last)

    descend(loss, [*moe.parameters(), *head.parameters()], 200)
    x, label = pictures(512)
    right = {}
    for name, how in {"all": {}, "in order": dict(capacity=1), "by score": dict(capacity=1, by_score=True)}.items():
        moe.select = lambda h, how=how: top_k(h, 1, normalise=False, **how)
        right[name] = float((answer(x).argmax(1) == label).float().mean())
    assert right["all"] > 0.9 and right["by score"] > right["in order"] + 0.1, right


# ---- StableMoE


def test_the_frozen_router_no_longer_moves():
    torch.manual_seed(0)
    words, router = nn.Embedding(30, D), StableRouter(30, 4)
    moe, goal = MoE(Experts(4, D, 12), router), rand(30, D, seed=5)
    ids = router.ids = torch.arange(30)[None]

    def loss(step):
        miss = (moe(words(ids)) - goal[ids]).square().mean() + 0.02 * routers.balance_loss(moe.last)
        return miss if router.frozen else miss + router.distilling

    moved = []

    def train(steps):
        before = None
        for _ in range(4):
            descend(loss, [*words.parameters(), *moe.parameters()], steps // 4, lr=3e-2)
            moe(words(ids))
            moved.append(0.0 if before is None else fluctuation(before, moe.last))
            before = moe.last

    train(120)
    learnt = moe.last
    assert max(moved) > 0
    router.freeze()
    moe(words(ids))
    assert fluctuation(learnt, moe.last) < 0.2, "the small router foretells the large one"
    frozen = moe.last
    moved.clear()
    gate = moe.router.weight.clone()
    train(40)
    assert max(moved) == 0 and fluctuation(frozen, moe.last) == 0
    assert not torch.equal(gate, moe.router.weight), "gates and experts go on learning"


def test_both_stages_of_a_stable_router_by_hand():
    """The best logit's expert, then the small router's; the gate is a sigmoid of that expert's logit."""
    torch.manual_seed(0)
    router, logits = StableRouter(30, 4), rand(1, 6, 4)
    router.ids = torch.tensor([[3, 9, 3, 27, 0, 1]])
    small = router.centres(router.words(router.ids))[0]  # [N, E]
    for stage, expert in (("best", logits[0].argmax(-1)), ("small", small.argmax(-1))):
        matrix = router(logits).matrix().reshape(6, 4)
        want = torch.zeros(6, 4).scatter(1, expert[:, None], logits[0].sigmoid().gather(1, expert[:, None]))
        torch.testing.assert_close(matrix, want, msg=stage)
        miss = nn.functional.cross_entropy(small, logits[0].argmax(-1))
        torch.testing.assert_close(router.distilling, miss)
        router.freeze()
    assert not any(p.requires_grad for p in router.parameters())


# ---- MoEfication


def relu_ffn(bias=True):
    torch.manual_seed(0)
    ffn = FeedForward(ModelConfig("ffn", D, 1, 2, 9, d_ff=40, activation="relu", ffn_bias=bias))
    with torch.no_grad():
        for p in ffn.parameters():
            p += 0.2 * torch.randn_like(p)
    return ffn


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [1, 5, 20])
def test_all_parts_of_an_ffn_are_the_ffn(n, bias):
    ffn, x = relu_ffn(bias), rand(2, 7, D)
    split = MoEfied(ffn, n, k=n)
    torch.testing.assert_close(split(x), ffn(x))
    assert split.last.load.tolist() == [14] * n


def test_the_parts_take_the_place_of_a_blocks_ffn():
    config = ModelConfig("relu", d_model=D, n_layers=1, n_heads=2, vocab_size=9, d_ff=20, activation="relu")
    block, x = Block(config).requires_grad_(False), rand(2, 7, D)
    whole = block(x, Pass(causal=True))
    block.ffn = MoEfied(block.ffn, 5, k=5)
    torch.testing.assert_close(block(x, Pass(causal=True)), whole)


def test_fewer_parts_lose_least_when_the_busiest_are_kept():
    ffn, x = relu_ffn(), rand(2, 50, D)
    error = lambda split: float((split(x) - ffn(x)).norm() / ffn(x).norm())
    errors = []
    for k in (1, 2, 4, 5):
        split = MoEfied(ffn, 5, k)
        errors.append(error(split))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-5
    busiest = MoEfied(ffn, 5, 2)
    random = copy.deepcopy(busiest)
    random.predict = lambda x: rand(*x.shape[:-1], 5, seed=9)
    assert error(busiest) < 0.8 * error(random)


def test_balanced_clusters_are_even_and_tight():
    """Points around four centres are found whatever their order; sizes are equal always."""
    centres, member = rand(4, D) * 3, torch.arange(48) % 4
    label = balanced_k_means(centres[member] + 0.1 * rand(48, D, seed=1), 4)
    assert label.bincount().tolist() == [12] * 4
    assert all(len(set(label[member == c].tolist())) == 1 for c in range(4))
    assert balanced_k_means(rand(30, 2), 5).bincount().tolist() == [6] * 5
    with pytest.raises(ValueError, match="30 neurons do not divide into 4 experts"):
        balanced_k_means(rand(30, 2), 4)


def test_only_relu_is_split():
    gated = FeedForward(CONFIG)
    smooth = FeedForward(CONFIG.with_(activation="gelu"))
    for ffn in (gated, smooth):
        with pytest.raises(ValueError, match="plain ReLU FFN"):
            MoEfied(ffn, 4, 1)


def test_what_an_expert_fires_and_how_many_there_can_be():
    ffn, x = relu_ffn(), rand(2, 7, D)
    split = MoEfied(ffn, 5, 2)
    torch.testing.assert_close(split.activity(x).sum(-1), ffn.up(x).relu().sum(-1))
    split(x)
    busiest = split.activity(x).flatten(0, 1).topk(2).indices
    assert torch.equal((split.last.matrix().reshape(14, 5) != 0).nonzero()[:, 1].view(14, 2), busiest.sort(-1).values)
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"k = {k} experts a token, but there are 5; choose 1 to 5"):
            MoEfied(ffn, 5, k)
    for n, rounds in ((0, 10), (5, 0)):
        with pytest.raises(ValueError, match=f"30 neurons do not divide into {n}"):
            balanced_k_means(rand(30, 2), n, rounds)


@pytest.fixture(scope="module")
def split_relu_2m():
    """relu-2m with each FFN as 160 experts of 4 neurons, a fifth of them for a token: the model, its FFNs before and
    after, what reaches them in training text and in held-out text, and that text's ids."""
    model, tokenizer = pretrained("relu-2m")
    train, held_out = corpus.split(corpus.manual())
    ids_of = lambda docs, n: torch.tensor(tokenizer.encode(" ".join(d.text for d in docs)[: 8 * n])[:n]).view(-1, 256)
    texts, reached = (ids_of(train, 4096), ids_of(held_out, 1024)), ({}, {})
    for ids, into in zip(texts, reached):
        hooks = [
            block.ffn.register_forward_pre_hook(lambda _, args, i=i, into=into: into.update({i: args[0].flatten(0, 1)}))
            for i, block in enumerate(model.blocks)
        ]
        with torch.no_grad():
            model(ids)
        for hook in hooks:
            hook.remove()
    whole = [block.ffn for block in model.blocks]
    parts = [MoEfied(ffn, 160, 32, reached[0][i][:1024]) for i, ffn in enumerate(whole)]
    return model, whole, parts, *reached, texts[1]


@torch.no_grad()
def kept(ffn, split, x):
    """The part of an FFN's output that its split leaves, by squares."""
    lost = (split(x) - ffn(x)).square().sum()
    return 1 - float(lost / (ffn(x) - ffn.down.bias).square().sum())


@torch.no_grad()
def cost_in_a_model(model, parts, ids):
    """Of the words that the model had right, the share that it still has with its layers 1 … in parts, and its loss
    before and after."""
    logits, whole = [model(ids)[:, :-1]], [block.ffn for block in model.blocks]
    for block, part in list(zip(model.blocks, parts))[1:]:
        block.ffn = part
    logits.append(model(ids)[:, :-1])
    for block, ffn in zip(model.blocks, whole):
        block.ffn = ffn
    right = logits[0].argmax(-1) == ids[:, 1:]
    still = float((logits[1].argmax(-1)[right] == ids[:, 1:][right]).float().mean())
    return still, *(float(nn.functional.cross_entropy(x.flatten(0, 1), ids[:, 1:].flatten())) for x in logits)


def test_a_fifth_of_the_neurons_keeps_the_trained_model(split_relu_2m):
    """Where few neurons fire, the ideal fifth keeps over 95 % of each layer's output and of the model's right words,
    and its loss. The first layer, where a third of all neurons fires, is no such layer."""
    model, whole, parts, _, reached, ids = split_relu_2m
    for i, (ffn, split) in enumerate(zip(whole, parts)):
        part, firing = kept(ffn, split, reached[i]), float((ffn.up(reached[i]) > 0).float().mean())
        assert (part > 0.95) == (firing < 0.2) == (i > 0), (i, part, firing)
    still, before, after = cost_in_a_model(model, parts, ids)
    assert still > 0.95 and after < before + 0.02


def test_a_learnt_router_foretells_the_neurons_that_fire(split_relu_2m):
    """With the router, which sees the input alone, 97, 93 and 92 % of three layers' outputs are left, more than with
    the mean neurons that it starts from; a choice by chance keeps about a fifth."""
    model, whole, parts, seen, reached, ids = split_relu_2m
    routed = copy.deepcopy(parts)
    for i, split in list(enumerate(routed))[1:]:
        centre = split.experts.up.mean(1)
        split.predict = lambda x, c=centre: x @ c[:, :-1].T + c[:, -1]
        start = kept(whole[i], split, reached[i])
        split.predict = lambda x: rand(*x.shape[:-1], 160, seed=9)
        chance = kept(whole[i], split, reached[i])
        split.predict = None
        split.learn_router(seen[i])
        learnt = kept(whole[i], split, reached[i])
        assert chance < 0.4 and max(start, 0.88) < learnt < kept(whole[i], parts[i], reached[i]), (i, start, learnt)
    still, before, after = cost_in_a_model(model, routed, ids)
    assert still > 0.88 and after < before + 0.05


@pytest.mark.parametrize("i", range(4))
def test_zeros_of_the_relu_checkpoint(split_relu_2m, i):
    """A trained ReLU leaves exact zeros: two thirds of the values in the first layer and over 80 % in the others, on
    held-out text; the rows of the second matrix that they would meet need not be read."""
    _, whole, _, _, reached, _ = split_relu_2m
    with torch.no_grad():
        inner = ACTIVATIONS_TORCH["relu"](whole[i].up(reached[i]))
        zeros = float((inner == 0).float().mean())
        assert (0.6 if i == 0 else 0.8) < zeros < 1
        for row in inner[:20]:
            fires = row > 0
            unread = whole[i].down.weight[:, fires] @ row[fires] + whole[i].down.bias
            torch.testing.assert_close(unread, whole[i].down(row))


# ---- FoE


def test_fusion_beats_its_best_expert_on_mixed_domains():
    """Three domains, each with a rule of its own and an expert that has seen no other."""
    rng, rules, places = torch.Generator().manual_seed(0), rand(3, 6, seed=3), 2 * rand(3, 6, seed=4)

    def sample(n, domain=None):
        d = torch.randint(3, (n,), generator=rng) if domain is None else torch.full((n,), domain)
        z = torch.randn(n, 6, generator=rng)
        return z + places[d], ((z * rules[d]).sum(1) > 0).long()

    torch.manual_seed(0)
    loss = lambda net, x, y: nn.functional.cross_entropy(net(x), y)
    experts = [nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2)) for _ in range(3)]
    for domain, expert in enumerate(experts):
        descend(lambda step, e=expert, d=domain: loss(e, *sample(128, d)), expert.parameters(), 150)
    fused = Fusion(experts, classes=2)
    assert {id(p) for p in fused.parameters()} == {id(p) for p in fused.fuser.parameters()}, "experts stay as they are"
    descend(lambda step: loss(fused, *sample(128)), fused.parameters(), 300)
    x, y = sample(3000)
    right = [float((net(x).argmax(1) == y).float().mean()) for net in (*experts, fused)]
    assert right[-1] > max(right[:-1]) + 0.03, right


# ---- M³ViT


@pytest.mark.parametrize("room", [1, 2])
def test_experts_one_after_the_other_give_the_same(room):
    """Token by token a chip with room for one or two experts fetches most of them again and again; expert by expert,
    each once."""
    torch.manual_seed(0)
    moe = TaskMoE(Experts(6, D, 12), lambda h: top_k(h, 2), tasks=2)
    x, seen = rand(1, 40, D), []
    for task in (0, 1):
        moe.task = task
        want = moe(x)[0]
        seen.append(moe.last.matrix())
        by_token, by_expert = Buffer(moe.experts, room), Buffer(moe.experts, room)
        torch.testing.assert_close(by_token.compute(x[0], moe.last, "token"), want)
        torch.testing.assert_close(by_expert.compute(x[0], moe.last, "expert"), want)
        assert by_expert.loads == 6 and by_expert.peak == room and by_token.peak == room
        held, fetched = [], 0
        for e in moe.last.expert[moe.last.token.argsort(stable=True)].tolist():
            fetched += e not in held
            held = [*(other for other in held if other != e), e][-room:]
        assert by_token.loads == fetched > 30
    assert not torch.equal(*seen), "each task has its router"


# ---- 1991 and 1994


@pytest.mark.parametrize("branches, experts", [(1, 1), (1, 4), (2, 2), (3, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_em_never_lowers_the_likelihood(branches, experts, seed):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, 200)
    y = np.abs(x) + np.where(x > 1, 2.0, 0.0) + 0.1 * rng.normal(size=200)
    tree, history = moe_1991.fit(np.stack([x, np.ones(200)], 1), y, branches, experts, steps=25, seed=seed)
    assert (np.diff(history) >= -1e-6 * np.abs(history[:-1])).all()
    assert np.isfinite(history).all() and (branches * experts == 1 or history[-1] > history[0] + 20)


def test_one_expert_is_least_squares_and_more_find_the_pieces():
    rng = np.random.default_rng(0)
    x = np.stack([rng.uniform(-2, 2, 300), np.ones(300)], 1)
    y = np.where(x[:, 0] > 0, 2 * x[:, 0], -x[:, 0]) + 0.05 * rng.normal(size=300)
    one, _ = moe_1991.fit(x, y, 1, 1, steps=3)
    np.testing.assert_allclose(one.weights[0, 0], np.linalg.lstsq(x, y, rcond=None)[0], rtol=1e-6)
    best = max((moe_1991.fit(x, y, 1, 2, steps=60, seed=s) for s in range(3)), key=lambda fit: fit[1][-1])[0]
    assert sorted(best.weights[0, :, 0].round(1)) == [-1.0, 2.0]
    assert np.sqrt(np.mean((best.predict(x) - y) ** 2)) < 0.15
    shares, _ = best.expect(x, y)
    np.testing.assert_allclose(shares.sum((1, 2)), 1)


# ---- a value network


def test_soft_experts_in_a_value_network():
    """On a 3 × 3 world the network learns to go to the goal, with a dense layer, with one expert and with four."""
    for experts in (0, 1, 4):
        network = grid_world.ValueNetwork(3, experts)
        before = grid_world.skill(network)
        grid_world.train(network)
        assert before < 0.6 < 0.95 < grid_world.skill(network), experts


def test_a_wide_dense_layer_has_as_many_parameters_as_its_experts():
    count = lambda network: sum(p.numel() for p in network.middle.parameters())
    wide, sparse = (grid_world.ValueNetwork(4, *shape) for shape in ((0, 8, 8, 512), (16,)))
    assert 1 < count(wide) / count(sparse) < 1.05


@pytest.mark.slow
def test_more_experts_do_not_collapse():
    """4 × 4 squares, four seeds each: from one expert to 16 the network learns better with more parameters. A dense
    layer that is widened to as many, in place of experts, learns worse than a narrow one."""
    found = {}
    for name, shape in {"narrow": (0,), "wide": (0, 8, 8, 512), "one": (1,), "sixteen": (16,)}.items():
        skills = []
        for seed in range(4):
            network = grid_world.ValueNetwork(4, *shape, seed=seed)
            grid_world.train(network, steps=200, seed=seed)
            skills.append(grid_world.skill(network))
        found[name] = np.mean(skills)
    assert found["sixteen"] > found["one"] + 0.1, found
    assert found["wide"] < found["narrow"] - 0.1 and found["wide"] < found["sixteen"] - 0.15, found


def test_a_decoder_with_experts_trains_through_its_losses():
    """All that a training step of a Mixtral touches: logits, balance and z-loss, gradients everywhere."""
    model = build(CONFIG)
    ids = torch.randint(40, (2, 10), generator=torch.Generator().manual_seed(0))
    loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    for layer in (m for m in model.modules() if isinstance(m, MoE)):
        loss = loss + 0.01 * routers.balance_loss(layer.last)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
