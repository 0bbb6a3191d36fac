"""GNMT's LSTM is torch's, VGG-16 has the published parameters and operations, and its convolutions are torch's."""

import pytest
import torch
from torch import nn

from llmstack.architectures.workloads import GNMT, LSTM, VGG, VGG16, conv2d, vgg_gemms


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("T", [1, 9])
def test_our_lstm_is_torchs(T):
    theirs, ours, x = nn.LSTM(5, 7, batch_first=True), LSTM(5, 7), random(3, T, 5).requires_grad_()
    ours.load_state_dict(theirs.state_dict())
    state = random(2, 3, 7, seed=1)
    for start in (None, tuple(state)):
        want, (h, c) = theirs(x, None if start is None else (start[0][None], start[1][None]))
        got, (mine_h, mine_c) = ours(x, start)
        for a, b in ((got, want), (mine_h, h[0]), (mine_c, c[0])):
            torch.testing.assert_close(a, b)
    leaves = lambda model: [x, *(model.get_parameter(n) for n, _ in theirs.named_parameters())]
    for a, b in zip(torch.autograd.grad(got.sum(), leaves(ours)), torch.autograd.grad(want.sum(), leaves(theirs))):
        torch.testing.assert_close(a, b)


def test_gnmt_reads_both_ways_and_writes_forward():
    torch.manual_seed(0)
    model, source, target = GNMT(20, 12, n_layers=3), torch.randint(20, (2, 6)), torch.randint(20, (2, 5))
    logits = model(source, target)
    assert logits.shape == (2, 5, 20)
    later = target.clone()
    later[:, 3] = (later[:, 3] + 1) % 20
    assert torch.equal(model(source, later)[:, :3], logits[:, :3]) and not torch.equal(model(source, later), logits)
    other = source.clone()
    other[:, -1] = (other[:, -1] + 1) % 20
    assert not torch.equal(model(other, target)[:, 0], logits[:, 0])


def test_gnmt_attention_is_additive():
    model, h, memory = GNMT(9, 6), random(2, 6), random(2, 4, 6, seed=1)
    scores = torch.tanh(h @ model.query.weight.T + model.query.bias)[:, None] * 0
    scores = torch.tanh((model.query(h))[:, None] + model.key(memory)) @ model.score.weight[0]  # [B, S]
    want = torch.einsum("bs,bsd->bd", scores.softmax(-1), memory)
    torch.testing.assert_close(model.attend(h, memory, model.key(memory)), want)


def test_gnmt_learns_to_reverse():
    """Only attention can reach the end of the source at the first word."""
    torch.manual_seed(0)
    model, rng = GNMT(8, 24), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(120):
        source = torch.randint(1, 8, (48, 4), generator=rng)
        target = torch.cat([torch.zeros(48, 1, dtype=torch.long), source.flip(1)], 1)
        loss = nn.functional.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.7, "guessing is log 7 = 1.95"


@pytest.mark.parametrize(
    "size, k, stride, padding", [((7, 9), 3, 1, 1), ((8, 8), 3, 2, 0), ((5, 5), 1, 1, 0), ((11, 6), 5, 2, 2)]
)
def test_im2col_is_torchs_convolution(size, k, stride, padding):
    x, w, b = random(2, 3, *size), random(4, 3, k, k, seed=1), random(4, seed=2)
    torch.testing.assert_close(
        conv2d(x, w, b, stride, padding), nn.functional.conv2d(x, w, b, stride, padding), rtol=1e-4, atol=1e-5
    )


def test_vgg16_has_the_published_size():
    gemms = vgg_gemms()
    with torch.device("meta"):
        model = VGG()
    assert sum(g.params for g in gemms) == sum(p.numel() for p in model.parameters()) == 138_357_544
    assert len(gemms) == 16 and gemms[0][1:] == (224 * 224, 64, 27) and gemms[13][1:] == (1, 4096, 25088)
    macs = sum(g.macs for g in gemms)
    assert macs == 15_470_264_320
    biases = sum(g.M * g.N for g in gemms)
    assert 2 * (macs + biases) == pytest.approx(30.96e9, rel=3e-4), "a bias counted as a MAC: 15.48 GMAC"


def test_vgg_is_the_same_network_in_torch():
    layers = (4, 0, 6, 6, 0)
    model = VGG(layers, image=8, classes=5, width=10)
    modules, convs = [], iter(model.convs)
    for n in layers:
        conv = next(convs) if n else None
        modules += [nn.Conv2d(conv.in_channels, n, 3, padding=1), nn.ReLU()] if n else [nn.MaxPool2d(2)]
        if n:
            modules[-2].load_state_dict(conv.state_dict())
    peer = nn.Sequential(*modules, nn.Flatten(), model.fc1, nn.ReLU(), model.fc2, nn.ReLU(), model.fc3)
    x = random(2, 3, 8, 8)
    torch.testing.assert_close(model(x), peer(x))
    with pytest.raises(ValueError, match="image = 100 does not halve 5 times: take a multiple of 32"):
        vgg_gemms(VGG16, image=100)


def test_vgg_does_more_with_a_byte_than_bert_but_for_its_last_layers():
    """Operations over bytes of weights, inputs and outputs, one picture against one sentence of 128 tokens, fp32."""
    from llmstack import preset

    intensity = lambda products: (
        sum(2 * m * n * k for m, n, k in products) / sum(4 * (m * k + k * n + m * n) for m, n, k in products)
    )
    c = preset("bert-base-uncased")
    D, F, T = c.d_model, c.d_ff, 128
    bert = [(T, D, D)] * 4 + [(T, F, D), (T, D, F)]
    convs, linears = [g[1:] for g in vgg_gemms()[:13]], [g[1:] for g in vgg_gemms()[13:]]
    assert intensity(linears) == pytest.approx(0.5, rel=0.01), "each weight is read for one multiply-add"
    assert intensity(convs) > intensity(bert) > 100 * intensity(linears)
    whole = [g[1:] for g in vgg_gemms()]
    assert intensity(whole) < intensity(bert), "three layers of 124 M weights cost VGG its lead"
