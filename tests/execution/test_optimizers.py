"""Each optimizer is torch.optim's after 100 steps, in torch and in NumPy, and has the property it is named for."""

import copy

import numpy as np
import pytest
import torch

from llmstack.execution.optimizers import (
    OPTIMIZERS,
    ForTorch,
    adafactor,
    adam,
    adamw,
    clip_,
    global_norm,
    lamb,
    lars,
    matrices,
    norm,
    rms,
    sgd,
)

SHAPES = {"a": (7, 5), "b": (5,), "c": (3, 4, 6), "d": (1, 1)}
PEERS = {
    "sgd": (sgd, torch.optim.SGD, dict(lr=0.1)),
    "momentum": (sgd, torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.05)),
    "nesterov": (sgd, torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    "adam": (adam, torch.optim.Adam, dict(lr=0.01, betas=(0.8, 0.98))),
    "adam + L2": (adam, torch.optim.Adam, dict(lr=0.01, weight_decay=0.1)),
    "adamw": (adamw, torch.optim.AdamW, dict(lr=0.01, weight_decay=0.1)),
    "adafactor": (adafactor, torch.optim.Adafactor, dict(lr=0.02, eps=(1e-30, 1e-3), weight_decay=0.1)),
}


def weights(seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=dtype) for name, shape in SHAPES.items()}


def gradient(w, t):
    """A loss with curvature and noise: the gradient depends on where the weight has come to."""
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(t), dtype=w.dtype)
    return torch.tanh(w) * 2 + 0.3 * noise


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("name", PEERS)
def test_equals_torch_after_100_steps(name, library):
    ours, theirs, settings = PEERS[name]
    peer_weights = weights()
    peer = theirs(list(peer_weights.values()), **settings)
    own = {n: w if library == "torch" else w.numpy() for n, w in weights().items()}
    optimizer = ours(own, **settings)
    for t in range(100):
        for w in peer_weights.values():
            w.grad = gradient(w, t)
        grads = {n: gradient(torch.as_tensor(w), t) for n, w in own.items()}
        optimizer.step(grads if library == "torch" else {n: g.numpy() for n, g in grads.items()})
        peer.step()
    for n, w in own.items():
        torch.testing.assert_close(torch.as_tensor(w), peer_weights[n], rtol=1e-9, atol=1e-11)


def test_torch_parameters_are_changed_by_their_own_gradients():
    layer, peer = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    peer.load_state_dict(layer.state_dict())
    for model, optimizer in (
        (layer, adamw(dict(layer.named_parameters()), 0.1)),
        (peer, torch.optim.AdamW(peer.parameters(), 0.1)),
    ):
        for _ in range(3):
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(layer.weight, peer.weight)
    assert layer.weight.grad is None


def test_adams_first_step_is_the_sign_of_the_gradient():
    w, g = np.zeros(5), np.array([1e-3, -5.0, 2e2, -1e-1, 7.0])
    adam({"w": w}, lr=0.1, eps=1e-12).step({"w": g})
    np.testing.assert_allclose(w, -0.1 * np.sign(g), rtol=1e-6)


def test_weight_decay_without_gradients_shrinks_by_one_factor():
    for make in (sgd, adamw, adafactor):
        w = np.array([[3.0, -4.0]])
        make({"w": w}, lr=0.1, weight_decay=0.5).step({"w": np.zeros((1, 2))})
        np.testing.assert_allclose(w, np.array([[3.0, -4.0]]) * (1 - 0.1 * 0.5), rtol=1e-12)


def test_adamw_is_not_adam_with_l2():
    """Two weights alike but for the size of their gradients: AdamW decays both alike, Adam + L2 the quiet one more."""
    kept = {}
    for name, make in (("L2", adam), ("decoupled", adamw)):
        with_decay, without = (np.ones(2) * 5 for _ in range(2))
        for w, decay in ((with_decay, 0.1), (without, 0.0)):
            optimizer = make({"w": w}, lr=0.01, weight_decay=decay)
            for t in range(50):
                optimizer.step({"w": np.array([100.0, 0.1]) * (-1) ** t})
        kept[name] = without - with_decay
    assert kept["decoupled"][0] == pytest.approx(kept["decoupled"][1], rel=0.01)
    assert kept["L2"][1] > 20 * kept["L2"][0]


def test_lars_moves_every_layer_by_eta_of_its_norm():
    own = {n: w.numpy() * 10.0**i for i, (n, w) in enumerate(weights().items())}
    before = {n: w.copy() for n, w in own.items()}
    grads = {n: np.random.default_rng(1).normal(size=w.shape) * 10.0 ** (3 - i) for i, (n, w) in enumerate(own.items())}
    lars(own, lr=1.0, eta=0.01).step(grads)
    for n, w in own.items():
        assert norm(w - before[n]) / norm(before[n]) == pytest.approx(0.01, rel=1e-9), n


def test_lars_follows_its_algorithm():
    """You et al. 2017, algorithm 1, written out, with decay and momentum."""
    own = {"w": weights()["a"].numpy()}
    w, v, optimizer = own["w"].copy(), 0, lars(own, lr=0.5, momentum=0.9, weight_decay=0.1, eta=0.02)
    for t in range(20):
        g = gradient(torch.tensor(w), t).numpy()
        rate = 0.5 * 0.02 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.1 * np.linalg.norm(w))
        v = 0.9 * v + rate * (g + 0.1 * w)
        w = w - v
        optimizer.step({"w": gradient(torch.tensor(own["w"]), t).numpy()})
    np.testing.assert_allclose(own["w"], w, rtol=1e-9)


def test_lamb_moves_by_the_norm_and_is_adam_at_ratio_one():
    own, other = ({n: w.numpy() for n, w in weights().items()} for _ in range(2))
    before = {n: w.copy() for n, w in own.items()}
    grads = {n: gradient(w, 0).numpy() for n, w in weights().items()}
    lamb(own, lr=0.01).step(grads)
    assert all(norm(own[n] - w) / norm(w) == pytest.approx(0.01, rel=1e-9) for n, w in before.items())
    own = {n: w.copy() for n, w in before.items()}
    ones = lamb(own, lr=0.01, scale=lambda w, u: 1.0, weight_decay=0.1)
    peer = adamw(other, lr=0.01, eps=1e-6, weight_decay=0.1)
    for t in range(20):
        grads = {n: gradient(torch.tensor(w), t).numpy() for n, w in own.items()}
        ones.step(grads)
        peer.step(grads)
    assert all(np.allclose(own[n], other[n], rtol=1e-10) for n in own)


def run(make, lr, steps=40):
    """Four matrices learn the product that a fifth one is, all 256 examples in each batch."""
    draw = torch.Generator().manual_seed(0)
    x, target = torch.randn(256, 64, generator=draw), torch.randn(64, 64, generator=draw) / 8
    w = {str(i): (torch.randn(64, 64, generator=draw) / 8).requires_grad_() for i in range(4)}
    optimizer, losses = make(w, lr=lr), []
    for _ in range(steps):
        y = x
        for layer in w.values():
            y = y @ layer
        loss = (y - x @ target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_with_the_whole_batch_at_a_large_rate_lamb_converges_and_adam_diverges():
    ours, adams, slower = run(lamb, 0.1), run(adam, 0.1), run(adam, 0.01)
    assert max(ours) == ours[0] and ours[-1] < 0.4 * ours[0]
    assert max(adams) > 100 * adams[0] and min(adams[1:]) > adams[0]
    assert slower[-1] < 0.4 * slower[0]  # the rate was wrong, not the optimizer


def test_adafactor_is_exact_when_the_squares_are_a_product():
    row, column = np.random.default_rng(0).uniform(0.5, 2, (7, 1)), np.random.default_rng(1).uniform(0.5, 2, (1, 5))
    w = np.ones((7, 5))
    optimizer = adafactor({"w": w}, lr=1.0)
    for t in range(1, 4):
        optimizer.step({"w": (row * column) ** 0.5 * (-1) ** t})
    r, c = optimizer.state["w"]["r"], optimizer.state["w"]["c"]
    np.testing.assert_allclose(r @ c / r.mean(), row * column, rtol=1e-12)


def test_adafactors_state_grows_with_rows_plus_columns():
    w = {"w": torch.zeros(300, 200)}
    sizes = {}
    for name, make in OPTIMIZERS.items():
        optimizer = make(w, lr=0.1)
        optimizer.step({"w": torch.ones(300, 200)})
        sizes[name] = sum(a.nbytes for key, a in optimizer.state_dict().items() if key != "t")
    n = 300 * 200 * 4
    assert sizes == {"sgd": 0, "lars": n, "adam": 2 * n, "adamw": 2 * n, "lamb": 2 * n, "adafactor": (300 + 200) * 4}
    assert rms(torch.ones(3, 4)) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_out_and_comes_back(name):
    own = weights()
    first = OPTIMIZERS[name](own, lr=0.01)
    for t in range(3):
        first.step({n: gradient(w, t) for n, w in own.items()})
    copies = {n: w.clone() for n, w in own.items()}
    second = OPTIMIZERS[name](copies, lr=0.01)
    second.load_state_dict({k: v.clone() if k != "t" else v for k, v in first.state_dict().items()})
    for optimizer, params in ((first, own), (second, copies)):
        optimizer.step({n: gradient(w, 9) for n, w in params.items()})
    assert all(torch.equal(own[n], copies[n]) for n in own)
    with pytest.raises(KeyError, match="another model"):
        second.load_state_dict({"t": 1, "other/m": torch.zeros(1)})


def test_only_matrices_decay_when_told_so():
    own = {"w": np.ones((2, 2)), "b": np.ones(2)}
    adamw(own, lr=0.1, weight_decay=1.0, decays=matrices).step({n: np.zeros_like(w) for n, w in own.items()})
    assert (own["w"] == 0.9).all() and (own["b"] == 1).all()


@pytest.mark.parametrize("max_norm", [0.5, 1e3, float("inf")])
def test_clipping_is_torchs(max_norm):
    ours, theirs = weights(3), [w.clone().requires_grad_() for w in weights(3).values()]
    for p in theirs:
        p.grad = p.detach().clone()
    total = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert clip_(ours, max_norm) == pytest.approx(total.item(), rel=1e-12)
    for g, p in zip(ours.values(), theirs):
        torch.testing.assert_close(g, p.grad)


def test_the_norm_of_shards_is_the_norm_of_the_whole():
    whole = torch.cat([w.flatten() for w in weights(4).values()])
    shards = whole.tensor_split(4)  # uneven, as of 4 ranks
    squares = [float((s * s).sum()) for s in shards]
    reduced = lambda own: sum(squares) if own in squares else pytest.fail("not this rank's squares")
    assert all(global_norm([s], reduced) == pytest.approx(whole.norm().item(), rel=1e-12) for s in shards)
    parts = [s.clone() for s in shards]
    for part in parts:
        clip_([part], 0.1, reduced)
    assert torch.cat(parts).norm().item() == pytest.approx(0.1, rel=1e-4)


def test_wrong_use_is_refused_with_its_reason():
    with pytest.raises(ValueError, match="lr = -1"):
        sgd({"w": np.ones(1)}, lr=-1)
    with pytest.raises(ValueError, match="got nothing"):
        adam([])
    with pytest.raises(ValueError, match="dict.model.named_parameters.*got str"):
        adam(["weight"])
    with pytest.raises(ValueError, match="positive"):
        clip_([np.ones(1)], 0)


def test_clipping_a_models_parameters_scales_their_gradients():
    """As users of PyTorch call it: the weights, and what has no gradient, stay."""
    layer = torch.nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    before = [p.detach().clone() for p in layer.parameters()]
    layer(torch.full((2, 3), 9.0)).sum().backward()
    gradient = layer.weight.grad.clone()
    assert clip_(layer.parameters(), 1.0) == pytest.approx(gradient.norm().item())
    torch.testing.assert_close(layer.weight.grad, gradient / gradient.norm())
    assert all(torch.equal(p, w) for p, w in zip(layer.parameters(), before))


@pytest.mark.parametrize("make", [lambda x: torch.tensor(x, dtype=torch.float16), lambda x: np.array(x, np.float16)])
def test_a_norm_of_sixteen_bits_does_not_overflow(make):
    gradient = make([300.0, 400.0])
    assert clip_([gradient], 5.0) == pytest.approx(500.0)
    assert [float(g) for g in gradient] == pytest.approx([3.0, 4.0], rel=1e-3)


def test_a_loaded_state_is_a_copy():
    ours, theirs = weights(5), weights(5)
    first, second = adam(ours, 0.1), adam(theirs, 0.1)
    first.step(weights(6))
    second.load_state_dict(first.state_dict())
    kept = {key: copy.deepcopy(value) for key, value in first.state_dict().items()}
    second.step(weights(7))
    assert all(np.array_equal(first.state_dict()[key], value) for key, value in kept.items())


def test_pytorchs_schedulers_move_the_rate():
    """The same model under PyTorch's AdamW and ours, both under its one-cycle and its cosine schedule."""
    for schedule in (
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    ):
        layers = [torch.nn.Linear(4, 2).double() for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        optimizers = [ForTorch(adamw(layers[0].parameters(), 0.1)), torch.optim.AdamW(layers[1].parameters(), 0.1)]
        schedules = [schedule(optimizer) for optimizer in optimizers]
        for step in range(6):
            for layer, optimizer, scheduler in zip(layers, optimizers, schedules):
                layer(torch.full((3, 4), 1.0 + step).double()).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
            torch.testing.assert_close(layers[0].weight, layers[1].weight, rtol=1e-12, atol=0)
