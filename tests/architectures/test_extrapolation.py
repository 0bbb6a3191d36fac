"""Train short, test long (Press et al. 2022, arXiv:2108.12409): ALiBi keeps its loss past the trained length."""

import pytest
import torch

from llmstack.architectures import build
from llmstack.config import ModelConfig
from llmstack.execution import corpus
from llmstack.ops.cross_entropy import cross_entropy_torch

SHORT, LONG = 48, 192


@pytest.fixture(scope="module")
def data():
    parts = corpus.split(corpus.documents(["bible"]))
    train, held_out = (torch.tensor(list("\n".join(d.text for d in part[:40]).encode())) for part in parts)
    return train, held_out


def loss_at_the_end(model, ids, length, keep=16):
    """The mean loss of the last `keep` bytes of windows of `length`, which end at the same bytes for every length."""
    ends = torch.arange(400, 400 + 97 * 64, 97)  # [64]
    windows = torch.stack([ids[e - length : e + 1] for e in ends])  # [64, length + 1]
    with torch.no_grad():
        logits = model(windows[:, :-1])[:, -keep:]
    return cross_entropy_torch(logits, windows[:, -keep:]).item()


@pytest.mark.slow
def test_alibi_extrapolates_and_sinusoids_do_not(data):
    train, held_out = data
    rise = {}
    for positions in ("alibi", "sinusoidal"):
        dials = dict(d_model=64, n_layers=2, n_heads=4, vocab_size=256, max_seq_len=LONG, activation="gelu", tied=True)
        model = build(ModelConfig("short", positions=positions, **dials))
        optimiser = torch.optim.AdamW(model.parameters(), 5e-3)
        draw = torch.Generator().manual_seed(0)
        for _ in range(500):
            starts = torch.randint(len(train) - SHORT - 1, (32, 1), generator=draw)
            windows = train[starts + torch.arange(SHORT + 1)]  # [32, SHORT + 1]
            optimiser.zero_grad()
            cross_entropy_torch(model(windows[:, :-1]), windows[:, 1:]).backward()
            optimiser.step()
        short, long = (loss_at_the_end(model.eval(), held_out, n) for n in (SHORT, LONG))
        assert short < 2.7  # it has learnt: a uniform guess costs 5.5 nats
        rise[positions] = long - short
    assert rise["alibi"] < 0.05 and rise["sinusoidal"] > 0.2
