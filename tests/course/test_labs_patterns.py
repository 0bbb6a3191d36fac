"""The lab on patterns says what counting pairs and attending by hand say."""

import re

import torch

from llmstack.course import labs

T = 64


def drifting():
    """Values, and vectors each of which is nine tenths the one before, with a variance of 0.9² + 0.44² ≈ 1."""
    noise, v = torch.randn(2, 1, 1, T, 16, generator=torch.Generator().manual_seed(0))[:, 0, 0].double()
    rows = [noise[0]]
    for row in noise[1:]:
        rows.append(0.9 * rows[-1] + 0.44 * row)
    return torch.stack(rows), v


def test_a_window_of_vectors_that_drift():
    x, v = drifting()
    past = torch.ones(T, T).tril().bool()
    for width, sharpness in ((8, 1.0), (3, 2.5)):
        panel = labs.attention_patterns().set(pattern="window", width=width, sharpness=sharpness)
        seen = past & ~torch.ones(T, T).tril(-width).bool()
        weights = [(sharpness * x @ x.T / 4).masked_fill(~mask, -torch.inf).softmax(-1) for mask in (past, seen)]
        kept = weights[0][seen].sum() / T
        dense, sparse = (w @ v for w in weights)
        error = (sparse - dense).norm() / dense.norm()
        said = re.findall(r"\d+", panel.caption)
        pairs = sum(min(i + 1, width) for i in range(T))
        assert said[:3] == [str(pairs), str(T * (T + 1) // 2), "100"]
        assert said[3] == str(-(-(T - 1) // (width - 1)))  # layers until the first token reaches the last
        assert [float(n) for n in said[-2:]] == [round(100 * float(kept)), round(100 * float(error))]
