"""LoRA on quantised bases: what is stored, where gradients go, what merging does, what it costs in loss."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from scipy.optimize import linprog
from torch import nn

from llmstack.architectures import build, pretrained
from llmstack.config import ModelConfig
from llmstack.execution.data import windows
from llmstack.execution.finetune import prepare
from llmstack.execution.finetune.lora import LoRA
from llmstack.execution.finetune.lq_lora import CHOICES, allocate, decompose, low_rank, stored_bits
from llmstack.execution.objectives import next_token
from llmstack.execution.optimizers import adamw
from llmstack.ops.packed import IntLinear, NFLinear, Packed

SMALL = ModelConfig("small", d_model=64, n_layers=2, n_heads=4, vocab_size=50, d_ff=128, max_seq_len=32)
randn = lambda *shape, seed=0: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
ids = torch.arange(24).view(2, 12) % 50


def small(method, seed=0, **settings):
    model = build(SMALL, seed=1)
    tuned = prepare(model, method, **settings)
    for p in tuned.trainable.values():  # as after some training
        p.data += 0.05 * randn(*p.shape, seed=seed)
    return tuned


def bases(model):
    return [m for m in model.modules() if isinstance(m, Packed)]


@pytest.fixture(scope="module")
def text():
    from llmstack.execution.corpus import documents

    model, tokenizer = pretrained("llama-2m")
    stream = tokenizer.encode(max((d.text for d in documents(("manual",))), key=len)[:40_000])
    return model, windows(stream[:4000], 64, 4), windows(stream[4000:8000], 64, 16)


@torch.no_grad()
def held_out(model, data):
    s, n = next_token(model, data(0))
    return float(s / n)


@pytest.mark.parametrize("method, bits", [("qlora", 4.15), ("qa-lora", 6.0), ("lq-lora", 2.8)])
def test_the_base_is_stored_in_few_bits_and_nothing_else_of_it(method, bits):
    tuned = small(method)
    held = {n: t for n, t in tuned.model.state_dict().items() if "blocks." in n and "norm" not in n}
    codes = sum(t.numel() for n, t in held.items() if n.endswith("codes"))
    weights = sum(m.in_features * m.out_features for m in bases(tuned.model))
    assert all(t.dtype == torch.uint8 for n, t in held.items() if n.endswith("codes"))
    floats = [n for n, t in held.items() if t.is_floating_point() and t.numel() > weights / len(bases(tuned.model)) / 8]
    assert all(n.endswith((".a", ".b")) for n in floats), floats
    assert len(bases(tuned.model)) == 14 and codes <= weights / 2
    average = sum(m.bits * m.in_features * m.out_features for m in bases(tuned.model)) / weights
    assert 2 < average <= bits


@pytest.mark.parametrize("method", ["qlora", "qa-lora", "lq-lora"])
def test_gradients_go_to_a_and_b_alone_and_are_those_of_the_dequantised_weights(method):
    tuned = small(method)
    dense = copy.deepcopy(tuned.model)
    for m in dense.modules():
        if isinstance(m, LoRA):
            group = getattr(m.base, "group", 1)
            plain = nn.Linear(m.base.in_features, m.base.out_features, bias=False)
            plain.weight = nn.Parameter(m.base.dequantise(), requires_grad=False)
            m.base = plain
            m.base.group = group
    for model in (tuned.model, dense):
        model(ids).pow(2).mean().backward()
    mine = {n: p.grad for n, p in tuned.model.named_parameters() if p.grad is not None}
    assert set(mine) == set(tuned.trainable) and all(n.endswith((".a", ".b")) for n in mine)
    for name, p in dense.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(mine[name], p.grad, rtol=1e-4, atol=1e-6)


def test_nothing_of_the_weight_s_size_is_kept_for_backward():
    layer, kept = NFLinear(nn.Linear(256, 128)), []
    x = randn(2, 256).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        y = layer(x)
    assert sum(kept) == 0
    y.sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantise().sum(0).expand(2, -1))


@pytest.mark.parametrize("method", ["qlora", "qa-lora", "lq-lora"])
def test_state_is_saved_and_loaded(method):
    one, other = small(method), small(method, seed=7)
    want = one.model(ids)
    assert not torch.allclose(other.model(ids), want)
    other.load(load(save(one.state())))
    assert torch.equal(other.model(ids), want)
    other = small(method, seed=7).model
    other.load_state_dict(load(save(one.model.state_dict() | {"out.linear.weight": torch.empty(0)})), strict=False)
    assert torch.equal(other(ids), want)


def test_merged_qlora_is_dense_and_equal():
    tuned = small("qlora", targets=("q", "down"), double=False)
    want = tuned.model(ids)
    model = tuned.merge()
    assert not bases(model)
    torch.testing.assert_close(model(ids), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits, group", [(4, 32), (4, 16), (8, 0)])
def test_qa_lora_merges_into_zero_points_exactly(bits, group):
    """In double, where only the rounding of sums is left; codes and scales are bit for bit what they were."""
    tuned = small("qa-lora", bits=bits, group=group)
    model = tuned.model.double()
    want, before = model(ids), [(m.codes.clone(), m.scale.clone(), m.zero.clone()) for m in bases(model)]
    merged = tuned.merge()
    assert not [m for m in merged.modules() if isinstance(m, LoRA)] and all(
        isinstance(m, IntLinear) for m in bases(merged)
    )
    torch.testing.assert_close(merged(ids), want, rtol=1e-11, atol=1e-12)
    for m, (codes, scale, zero) in zip(bases(merged), before):
        assert torch.equal(m.codes, codes) and torch.equal(m.scale, scale) and not torch.equal(m.zero, zero)


def test_the_loss_of_qlora_is_within_one_percent_of_lora(text):
    """Both from llama-2m, 10 steps on one text, measured on what follows. (0.5 % was seen, after 40 steps too.)"""
    base, data, held = text
    losses = {"none": held_out(base, held)}
    for method in ("lora", "qlora"):
        model = copy.deepcopy(base)
        tuned = prepare(model, method, targets="all")
        optimizer = adamw(tuned.trainable, lr=2e-3)
        for step in range(10):
            optimizer.zero_grad()
            s, n = next_token(model, data(step))
            (s / n).backward()
            optimizer.step()
        losses[method] = held_out(model, held)
    assert losses["lora"] < losses["none"]
    assert abs(losses["qlora"] / losses["lora"] - 1) < 0.01, losses


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "fisher"])
def test_the_alternation_never_errs_more_and_beats_quantising_first(weighted):
    w = randn(96, 64) * torch.linspace(0.2, 2, 64) + randn(96, 4, seed=1) @ randn(4, 64, seed=2)
    fisher = randn(96, 1, seed=3).exp() * randn(1, 64, seed=4).exp() if weighted else None
    layer = nn.Linear(64, 96)
    stored = lambda of: NFLinear(layer, 2, 32, weight=of).dequantise()
    rest, b, a, errors = decompose(w, 8, stored, 10, fisher)
    assert b.shape == (96, 8) and a.shape == (8, 64)
    assert len(errors) > 1 and (np.diff(errors) < 0).all()
    f = torch.ones_like(w) if fisher is None else fisher
    error = lambda approximation: float((f.sqrt() * (w - approximation)).norm())
    assert error(stored(rest) + b @ a) == pytest.approx(errors[-1], rel=1e-4)
    q = stored(w)
    b, a = low_rank(w - q, 8, fisher)
    assert errors[-1] < 0.9 * error(q + b @ a) < 0.9 * error(q)


def test_low_rank_is_the_best_in_the_weighted_metric():
    """With a fisher of rank one, minimising by gradient finds nothing better."""
    w, fisher = randn(12, 10), randn(12, 1, seed=3).exp() * randn(1, 10, seed=4).exp()
    error = lambda b, a: (fisher * (w - b @ a) ** 2).sum()
    best = error(*low_rank(w, 3, fisher))
    leaves = [randn(12, 3, seed=5).requires_grad_(), randn(3, 10, seed=6).requires_grad_()]
    search = torch.optim.LBFGS(leaves, max_iter=300, line_search_fn="strong_wolfe")

    def closure():
        search.zero_grad()
        loss = error(*leaves)
        loss.backward()
        return loss

    search.step(closure)
    assert best.item() == pytest.approx(error(*leaves).item(), rel=1e-3)


def test_the_programme_keeps_the_budget_and_beats_one_choice_for_all():
    """On matrices of llama-2m's kinds, at the published 2.75 bits and at budgets that a uniform choice spends whole."""
    rng = np.random.default_rng(0)
    sizes = np.array([192 * 192, 64 * 192, 192 * 384, 384 * 192])[np.arange(28) % 4]
    bits = np.array([[stored_bits(n, *c) for c in CHOICES] for n in sizes])
    scale = sizes * np.exp(rng.normal(size=28))
    errors = scale[:, None] * np.array([4.0**-b * (1 + 0.1 * np.log2(block)) for b, block in CHOICES])
    for budget in (2.75, 3.13, 4.13):
        chosen = allocate(errors, bits, budget * sizes.sum())
        take = lambda table: table[np.arange(28), chosen].sum()
        assert take(bits) <= budget * sizes.sum()
        affordable = bits.sum(0) <= budget * sizes.sum()
        assert take(errors) < (0.8 if budget == 2.75 else 1) * errors.sum(0)[affordable].min()
        relaxed = linprog(  # what fractions could reach: nothing whole is below it
            errors.ravel(), bits.reshape(1, -1), budget * sizes.sum(), np.kron(np.eye(28), np.ones(12)), np.ones(28)
        )
        assert relaxed.fun <= take(errors) * (1 + 1e-9) and take(errors) < 1.02 * relaxed.fun
    with pytest.raises(ValueError, match="is below the least that is possible"):
        allocate(errors, bits, 2.0 * sizes.sum())


def test_lq_lora_stays_below_the_budget_and_starts_nearer_than_qlora_at_the_same_bits():
    weights = {n: m.weight.detach() for n, m in build(SMALL, seed=1).named_modules() if isinstance(m, nn.Linear)}

    def state(tuned):
        layers = {n: m for n, m in tuned.model.named_modules() if isinstance(m, LoRA)}
        size = sum(weights[n].numel() for n in layers)
        error = sum((m.base.dequantise() + m.delta() - weights[n]).pow(2).sum() for n, m in layers.items())
        return sum(m.base.bits * weights[n].numel() for n, m in layers.items()) / size, error.item()

    fisher = {n: randn(*w.shape, seed=5).abs() + 0.1 for n, w in weights.items()}
    for budget, how in ((2.75, {"fisher": fisher}), (4.2, {})):
        bits, error = state(prepare(build(SMALL, seed=1), "lq-lora", budget=budget, **how))
        assert budget - 0.2 < bits <= budget
    plain = state(prepare(build(SMALL, seed=1), "qlora"))
    assert error < plain[1] and bits < plain[0] + 0.1
    budget = 3.2  # the programme may mix, or take 3 bits for all
    mixed, uniform = (
        state(prepare(build(SMALL, seed=1), "lq-lora", budget=budget, rounds=1, **how))
        for how in ({}, {"choices": [(3, 64)]})
    )
    assert max(mixed[0], uniform[0]) <= budget and mixed[1] < uniform[1]


@pytest.mark.parametrize(
    "method, settings, says",
    [
        ("qlora", dict(r=0), "r = 0"),
        ("qlora", dict(block=0), "block = 0"),
        ("qa-lora", dict(group=48), "in divides by group"),
        ("lq-lora", dict(budget=1.5), "below the least"),
        ("qlora", dict(bits=4), "has no setting bits"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_model_stays(method, settings, says):
    model = build(SMALL)
    with pytest.raises(ValueError, match=says):
        prepare(model, method, **settings)
    assert not bases(model) and all(p.requires_grad for p in model.parameters())
