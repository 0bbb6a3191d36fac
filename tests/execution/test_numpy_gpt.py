"""The NumPy GPT is the torch decoder: each gradient, and the loss curve of a training run on real text."""

import numpy as np
import pytest
import torch

from llmstack import preset
from llmstack.architectures import build
from llmstack.architectures.decoder_np import weights_of
from llmstack.config import ConfigError
from llmstack.execution import corpus
from llmstack.execution.autograd import Tensor
from llmstack.execution.numpy_gpt import Counted, backward, forward, init, loss_and_gradients, train, windows
from llmstack.execution.optimizers import adamw
from llmstack.execution.schedules import cosine

SMALL = preset("gpt2").with_(d_model=32, n_layers=2, n_heads=4, d_ff=64, vocab_size=256, max_seq_len=24)
CONFIGS = [SMALL, SMALL.with_(tied=False, activation="relu", n_layers=1)]
IDS = [f"tied {c.tied}, {c.activation}" for c in CONFIGS]


@pytest.fixture(scope="module")
def text():
    words = "".join(d.text for d in corpus.manual())
    return np.frombuffer(words.encode()[:200_000], np.uint8).astype(np.int64)


def copies(config, dtype=torch.float32):
    """A torch decoder and its weights as arrays of their own, every tied weight once."""
    model = build(config, seed=1, dtype=dtype)
    own = dict(model.named_parameters())
    return model, {name: a.copy() for name, a in weights_of(model).items() if name in own}


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_every_gradient_is_torchs(config, text):
    model, w = copies(config, torch.float64)
    for name, p in model.named_parameters():  # biases away from zero, norms from one
        with torch.no_grad():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
        w[name] = p.detach().numpy().copy()
    batch = next(windows(text, 3, 17, 1))
    loss, grads = loss_and_gradients(batch[:, :-1], batch[:, 1:], w, config)
    ids = torch.tensor(batch)
    peer = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    peer.backward()
    assert loss == pytest.approx(peer.item(), rel=1e-12)
    assert set(grads) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        np.testing.assert_allclose(grads[name], p.grad, rtol=1e-8, atol=1e-12, err_msg=name)


def test_the_loss_curve_on_real_text_is_torchs(text):
    """40 steps from the same weights on the same batches; the gradients of the last step still agree one by one."""
    model, w = copies(SMALL)
    batches = list(windows(text, 4, 24, 40, seed=5))
    ours = train(w, SMALL, batches, adamw(w, lr=3e-3), cosine(40, warmup=5), max_norm=1.0)
    peer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.LambdaLR(peer, cosine(40, warmup=5))
    theirs = []
    for batch in map(torch.tensor, batches):
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        peer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        peer.step()
        rate.step()
        theirs.append(loss.item())
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    assert ours[-1] < ours[0] - 1.5
    _, grads = loss_and_gradients(batches[0][:, :-1], batches[0][:, 1:], w, SMALL)
    peer.zero_grad()
    ids = torch.tensor(batches[0])
    torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, p in model.named_parameters():
        far = np.linalg.norm(grads[name] - p.grad.numpy()) / np.linalg.norm(p.grad)
        assert far < 2e-2 or "k.bias" in name, f"{name}: {far:.1e}"  # a key's bias has no gradient: rounding alone


def test_by_hand_is_what_the_engine_finds(text):
    """The same block written with Tensors: two ways to a gradient, neither of them torch's."""
    config = SMALL.with_(n_layers=1)
    w = init(config, dtype=np.float64)
    batch = next(windows(text, 2, 9, 1))
    t = {name: Tensor(a) for name, a in w.items()}
    linear = lambda x, at: x.linear(t[f"{at}.weight"], t[f"{at}.bias"])
    norm = lambda x, at: x.layernorm(t[f"{at}.weight"], t[f"{at}.bias"])
    split = lambda x: x.reshape(shape=(2, 9, 4, 8)).transpose(axes=(0, 2, 1, 3))
    x = Tensor(batch[:, :-1]).embedding(t["embed.tokens.weight"])
    x = x + Tensor(np.arange(9)).embedding(t["embed.positions.weight"])
    n = norm(x, "blocks.0.norm1")
    q, k, v = (split(linear(n, f"blocks.0.attention.{name}")) for name in "qkv")
    mixed = q.attention(k, v, mask=np.tri(9, dtype=bool)).transpose(axes=(0, 2, 1, 3)).reshape(shape=(2, 9, 32))
    x = x + linear(mixed, "blocks.0.attention.o")
    x = x + linear(linear(norm(x, "blocks.0.norm2"), "blocks.0.ffn.up").gelu_tanh(), "blocks.0.ffn.down")
    loss = norm(x, "norm").linear(t["embed.tokens.weight"]).cross_entropy(Tensor(batch[:, 1:]))
    loss.backward()
    value, grads = loss_and_gradients(batch[:, :-1], batch[:, 1:], w, config)
    assert loss.data == pytest.approx(value, rel=1e-12)
    for name in w:
        np.testing.assert_allclose(grads[name], t[name].grad, rtol=1e-8, atol=1e-12, err_msg=name)


def test_backward_multiplies_twice_as_much_as_forward():
    """Counted, not derived: without the T² terms exactly 2 N a token and 4 N, with them what ops/attention.py says."""
    config, T = SMALL.with_(max_seq_len=16), 16
    ids = np.zeros((1, T), int)
    w = init(config)
    matrices = sum(a.size for name, a in w.items() if a.ndim == 2 and "positions" not in name)
    counted = Counted.of(w)
    logits, saved = forward(ids, counted, config)
    there = Counted.operations
    grads = backward(np.ones_like(logits), counted, saved, config)
    back = Counted.operations - there
    scores = config.n_layers * 4 * config.n_heads * T * T * config.d_head
    assert there == 2 * matrices * T + scores
    assert back == 4 * matrices * T + 2.5 * scores
    assert set(grads) == set(w)


def test_init_is_gpt2s():
    w = init(SMALL.with_(d_model=64, n_layers=8), seed=3)
    model = build(SMALL.with_(d_model=64, n_layers=8))
    assert {n: a.shape for n, a in w.items()} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert w["blocks.0.attention.q.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert w["blocks.7.ffn.down.weight"].std() == pytest.approx(0.02 / 4, rel=0.1)
    assert all((w[n] == float(n.endswith("weight"))).all() for n in w if "norm" in n)


def test_other_models_and_texts_are_refused():
    with pytest.raises(ConfigError, match="norm = 'rmsnorm'"):
        init(preset("llama3-8b"))
    with pytest.raises(ValueError, match="max_seq_len = 24"):
        forward(np.zeros((1, 25), int), init(SMALL), SMALL)
    with pytest.raises(ValueError, match="no window"):
        next(windows(np.arange(5), 1, 8, 1))
