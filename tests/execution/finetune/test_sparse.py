"""Sparse tuning: which k weights move, that no other one does, and that the gates close as their formula says."""

import numpy as np
import pytest
import torch
from scipy.stats import logistic
from torch.func import functional_call, grad, vmap

from llmstack.architectures import build, decoder
from llmstack.config import ModelConfig
from llmstack.execution.finetune import linears, prepare, sparse
from llmstack.execution.finetune.sparse import BETA, HIGH, LOW, added, expected_share, fisher, pick, project
from llmstack.execution.optimizers import adamw
from llmstack.execution.trainer import Trainer

SHAPE = ModelConfig("small", 16, 2, 2, 31, d_ff=24, max_seq_len=16)
DRAW = torch.Generator().manual_seed(3)
IDS = torch.randint(31, (2, 8, 11), generator=DRAW)  # two tasks


def data(task=0):
    at = lambda step: torch.arange(4 * step, 4 * step + 4) % 8
    return lambda step: dict(ids=IDS[task][at(step), :-1], targets=IDS[task][at(step), 1:])


def make(method=None, **settings):
    model = build(SHAPE, 0)
    return prepare(model, method, **settings) if method else model


def flat(model):
    """The blocks' matrices as one vector of NumPy's, in the order of linears."""
    return torch.cat([linear.weight.detach().flatten() for *_, linear in linears(model, "all")]).numpy()


def train(tuned, steps, task=0, lr=0.01):
    optimizer = adamw(tuned.trainable, lr=lr, weight_decay=0.1)
    Trainer(tuned.model, data(task), optimizer, after_backward=tuned.after_backward).run(steps)
    return tuned


def frozen(tuned):
    return {n: p.detach().clone() for n, p in tuned.model.named_parameters() if not p.requires_grad}


def test_pafi_takes_the_smallest_weights_whatever_the_task():
    before = flat(make())
    k = round(0.02 * len(before))
    smallest = np.sort(np.argsort(np.abs(before), kind="stable")[:k])
    for task in (0, 1):
        tuned = make("pafi", share=0.02)
        assert tuned.count == k
        moved = np.flatnonzero(flat(train(tuned, 4, task).merge()) != before)
        np.testing.assert_array_equal(moved, smallest)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap over attention
def test_fisher_is_the_mean_of_per_sample_squared_gradients(monkeypatch):
    model = make()
    ours = fisher(model, data(), samples=6)  # one and a half batches
    one = fisher(make(), data(), samples=1)
    monkeypatch.setattr(decoder, "check_ids", lambda *a, **k: None)  # it looks at values, which vmap cannot
    params = {n: p.detach() for n, p in model.named_parameters()}

    def log_probability(params, ids, targets):
        logits = functional_call(model, params, (ids[None],))[0]
        return logits.log_softmax(-1).gather(-1, targets[:, None]).sum()

    rows = IDS[0][:6]
    each = vmap(grad(log_probability), (None, 0, 0))(params, rows[:, :-1], rows[:, 1:])
    for name, diagonal in ours.items():
        torch.testing.assert_close(diagonal, each[f"{name}.weight"].square().mean(0), rtol=1e-4, atol=1e-7)
    for name, diagonal in one.items():
        torch.testing.assert_close(diagonal, each[f"{name}.weight"][0].square(), rtol=1e-4, atol=1e-7)


def test_fish_trains_the_top_of_fisher_and_its_mask_stays():
    diagonal = torch.cat([f.flatten() for f in fisher(make(), data(), samples=8).values()]).numpy()
    before, tuned = flat(make()), make("fish", data=data(), share=0.02, samples=8)
    k = round(0.02 * len(before))
    places, base = {n: at.clone() for n, at in tuned.fixed().items()}, frozen(tuned)
    train(tuned, 5, task=1)
    assert all(torch.equal(at, places[n]) for n, at in tuned.fixed().items())
    assert all(torch.equal(p, base[n]) for n, p in frozen(tuned).items())
    moved = np.flatnonzero(flat(tuned.merge()) != before)
    np.testing.assert_array_equal(moved, np.sort(np.argsort(diagonal, kind="stable")[-k:]))


@pytest.mark.parametrize("alpha", [-2.0, 0.5, 5.0])
@pytest.mark.parametrize("low, high, beta", [(LOW, HIGH, BETA), (-0.1, 1.1, 2 / 3)], ids=["diff", "louizos"])
def test_gates_open_as_often_as_the_hard_concrete_distribution_says(alpha, low, high, beta, monkeypatch):
    for name, value in (("LOW", low), ("HIGH", high), ("BETA", beta)):
        monkeypatch.setattr(sparse, name, value)
    torch.manual_seed(0)
    gates = sparse.Gates(torch.zeros(200, 200), alpha, speed=1.0)
    z, p = gates.gates(), logistic.sf(beta * np.log(-low / high) - alpha)
    assert z.min() >= 0 and z.max() <= 1
    assert abs((z > 0).double().mean() - p) < 4 * (p * (1 - p) / z.numel()) ** 0.5 + 1e-6
    np.testing.assert_allclose(gates.open().detach().numpy(), p, rtol=1e-5)


def test_diff_closes_its_gates_down_to_the_share_and_projects_to_it():
    tuned, before = make("diff", share=0.005, penalty=1e-3), flat(make())
    base, n = frozen(tuned), len(before)
    assert expected_share(tuned) > 0.99
    seen = [expected_share(train(tuned, steps)) for steps in (10, 20)]  # a new optimizer each
    train(tuned, 60)
    assert 0.99 > seen[0] > seen[1] > expected_share(tuned)
    assert abs(expected_share(tuned) - 0.005) < 0.0005  # and no further
    assert all(torch.equal(p, base[name]) for name, p in frozen(tuned).items())
    wanted = torch.cat([(g.eval().gates() * g.delta).detach().flatten() for g in added(tuned.model).values()])
    project(tuned, 0.005)
    assert tuned.count == round(0.005 * n)
    shown = torch.cat([linear.weight.detach().flatten() for *_, linear in linears(tuned.model, "all")]).numpy()
    top = np.sort(wanted.abs().topk(tuned.count).indices.numpy())
    moved = np.flatnonzero(shown != before)
    np.testing.assert_allclose(shown[top], before[top] + wanted.numpy()[top], rtol=1e-6)
    assert set(moved) <= set(top)
    after = flat(train(tuned, 5).merge())
    assert set(np.flatnonzero(after != before)) <= set(top) and (after != shown).any()


@pytest.mark.parametrize("method", ["pafi", "fish", "diff"])
def test_merged_is_unmerged_and_a_state_carries_values_and_places(method):
    settings = dict(share=0.05) | ({"data": data()} if method == "fish" else {})
    tuned, other = train(make(method, **settings), 3), make(method, **settings)
    tuned.model.eval()
    out = tuned.model(IDS[0])
    for at in other.fixed().values():
        at.zero_()
    other.load(tuned.state())
    assert torch.equal(other.model.eval()(IDS[0]), out)
    assert torch.equal(tuned.merge()(IDS[0]), out)
    assert not any("parametrizations" in n for n, _ in tuned.model.named_parameters())


def test_bad_shares_and_foreign_states_are_refused():
    for share in (0, 1.5, 1e-9):
        with pytest.raises(ValueError, match="at least one, and at most all"):
            make("pafi", share=share)
    tuned = make("pafi", share=0.05)
    with pytest.raises(ValueError, match="another method, model or setting"):
        tuned.load(make("pafi", share=0.1).state())
    assert sum(len(at) for at in pick({"a": torch.ones(10), "b": torch.ones(7)}, 1.0).values()) == 17
