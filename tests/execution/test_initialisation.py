"""Spreads are torch.nn.init's; activations stay level over 64 layers, and over the width with the paper's table."""

import pytest
import torch
from torch import nn

from llmstack.architectures import build
from llmstack.config import ModelConfig
from llmstack.execution.data import windows
from llmstack.execution.initialisation import SCHEMES, initialise, mup, spreads, stack
from llmstack.execution.objectives import next_token
from llmstack.execution.optimizers import adam

X = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
DEEP = ModelConfig("deep", 32, 64, 2, 100, max_seq_len=16)


@pytest.mark.parametrize("fan_in, fan_out", [(300, 200), (128, 512)])
def test_spreads_are_torchs(fan_in, fan_out):
    peer = torch.empty(fan_out, fan_in)
    for scheme, draw in (
        ("xavier", nn.init.xavier_normal_),
        ("he", lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu")),
        ("normal", lambda w: nn.init.normal_(w, std=0.02)),
    ):
        torch.manual_seed(0)
        ours, theirs = initialise(nn.Linear(fan_in, fan_out), scheme, seed=2), draw(peer)
        assert ours.weight.std().item() == pytest.approx(theirs.std().item(), rel=0.02)  # of 60,000 draws: 0.3 %
        assert abs(ours.weight.mean()) < 0.02 * ours.weight.std() and not ours.bias.any()
        assert torch.equal(initialise(nn.Linear(fan_in, fan_out), scheme, seed=2).weight, ours.weight)


def test_gpt2_divides_what_writes_to_the_residual_stream():
    """By √(2L) = 4, whichever way the model was built: as `build` starts its weights, drawn by other code."""
    model = build(ModelConfig("gpt2", 96, 8, 2, 90, max_seq_len=8, activation="gelu_tanh"))
    spread = lambda: [
        getattr(getattr(model.blocks[3], part), w).weight.std().item()
        for part, w in (("attention", "q"), ("attention", "o"), ("ffn", "up"), ("ffn", "down"))
    ]
    theirs = spread()
    initialise(model, "gpt2", seed=5)
    for found in (theirs, spread()):
        assert found == pytest.approx([0.02, 0.005, 0.02, 0.005], rel=0.05)


def test_activations_stay_level_over_64_layers_or_die():
    """A plain stack of ReLU: He keeps the spread, Xavier loses half the variance a layer."""
    found = {scheme: spreads(initialise(stack(64, 256), scheme), X) for scheme in SCHEMES}
    assert all(len(s) == 65 and s[0] == pytest.approx(1, abs=0.01) for s in found.values())
    assert 0.4 < min(found["he"]) and max(found["he"]) < 2
    assert found["xavier"][64] == pytest.approx(found["he"][64] * 2**-32, rel=1e-3)
    assert found["normal"][16] < 1e-10
    tanh = spreads(initialise(stack(64, 256, nn.Tanh), "xavier"), X)
    assert tanh[64] > 0.3 * tanh[8]


def test_the_residual_stream_of_64_blocks_grows_by_the_square_root_or_stays():
    """Each block adds twice; GPT-2's 1 / √(2L) makes their sum as large as one block's."""
    ids, grown = torch.arange(16)[None], {}
    for scheme in ("normal", "gpt2"):
        model = initialise(build(DEEP), scheme)
        norm = model.norm
        found = spreads(model, ids)
        assert len(found) == 65 and model.norm is norm
        grown[scheme] = [s / found[0] for s in found]
    assert max(grown["gpt2"]) < 1.5 and grown["normal"][64] > 3


def test_mup_is_the_papers_table():
    """arXiv:2203.03466, table 3: what doubling the width does to variances and to Adam's learning rates."""
    table = {"embed.tokens": (1, 1), "blocks.0.ffn.up": (1 / 2, 1 / 2), "blocks.1.attention.o": (1 / 2, 1 / 2)}
    table |= {"out.head": (1 / 4, 1 / 2)}
    models = {width: build(ModelConfig("wide", width, 2, 2, 500, positions="none")) for width in (64, 128)}
    factors = {width: mup(model, 64, seed=1) for width, model in models.items()}
    weights = {width: dict(model.named_parameters()) for width, model in models.items()}
    assert set(factors[64].values()) == {1.0} and factors[64].keys() == weights[64].keys()
    for name, (variance, rate) in table.items():
        name += ".weight"
        assert factors[128][name] == rate
        assert weights[128][name].var().item() / weights[64][name].var().item() == pytest.approx(variance, rel=0.06)
    assert all(factors[128][name] == 1 for name, w in weights[128].items() if w.ndim == 1)
    assert weights[64]["out.head.weight"].var().item() == pytest.approx(
        1 / 64, rel=0.05
    )  # at the base, the standard rule


def test_a_step_changes_activations_alike_at_every_width():
    """Three steps of Adam: with one rate for all weights hidden states move ever further, with mup's they do not."""
    batch, moved = windows(torch.arange(200) * 7 % 64, 16, 4)(0), {"mup": [], "standard": []}
    for kind, found in moved.items():
        for width in (32, 64, 128):
            model = build(ModelConfig("wide", width, 2, width // 16, 64))
            factors, params = mup(model, 32), dict(model.named_parameters())
            groups = {f: {n: params[n] for n in params if factors[n] == f} for f in set(factors.values())}
            rates = [adam(group, lr=0.01 * (f if kind == "mup" else 1)) for f, group in groups.items()]
            with torch.no_grad():
                before = list(model.states(batch["ids"]))[-2]
            for _ in range(3):
                model.zero_grad()
                total, count = next_token(model, batch)
                (total / count).backward()
                for optimizer in rates:
                    optimizer.step()
            with torch.no_grad():
                found.append((list(model.states(batch["ids"]))[-2] - before).square().mean() ** 0.5)
    assert max(moved["mup"]) < 1.3 * min(moved["mup"])
    assert moved["standard"][2] > 1.7 * moved["standard"][0] and moved["standard"] == sorted(moved["standard"])


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="scheme = 'zeros', but it must be one of xavier, he, normal, gpt2"):
        initialise(nn.Linear(2, 2), "zeros")
    with pytest.raises(ValueError, match="deep is tied, but input and output differ in mup"):
        mup(build(DEEP.with_(tied=True, n_layers=1)), 32)
