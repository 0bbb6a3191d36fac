"""DeepNorm: the operation against layer_norm, the constants against the paper, the bound on updates at depth."""

import pytest
import torch
from op_checks import check_backward, check_forward, randn
from torch.nn.functional import layer_norm

from llmstack.ops.deepnorm import BACKWARDS, IMPLS, deepnorm_constants, deepnorm_torch

SHAPES = [(1, 1), (3, 5, 63), (0, 16)]
reference = lambda x, fx, g, b: layer_norm(1.7 * x + fx, g.shape, g, b)
inputs = lambda shape: (randn(*shape), randn(*shape, seed=1), randn(shape[-1], seed=2), randn(shape[-1], seed=3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl, shape):
    check_forward(IMPLS[impl], impl, reference, *inputs(shape), alpha=1.7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape):
    x, fx, g, b = inputs(shape)
    dy = randn(*shape, seed=4)
    check_backward(BACKWARDS["numpy"], "numpy", reference, [x, fx, g, b], dy, x, fx, g, alpha=1.7)


@pytest.mark.parametrize(
    "arguments, alpha, beta",
    [
        ((8, "encoder"), 2.0, 64**-0.25),
        ((8, "decoder"), 2.0, 64**-0.25),
        ((16, "encoder-decoder", "encoder", 1), 0.81 * 2, 0.87 / 2),
        ((100, "encoder-decoder", "decoder", 27), 3.0, 324**-0.25),
        ((6, "encoder-decoder", "encoder"), 0.81 * 6**0.3125, 0.87 * 6**-0.3125),
        ((500, "decoder"), 5.6234, 0.12574),  # 1,000 sublayers: 1000^(1/4), 4000^(-1/4)
    ],
)
def test_constants_are_the_papers(arguments, alpha, beta):
    assert deepnorm_constants(*arguments) == pytest.approx((alpha, beta), rel=1e-4)


@pytest.mark.parametrize("arguments", [(0,), (4, "perceiver"), (4, "encoder-decoder", "both")])
def test_constants_of_no_such_stack_are_refused(arguments):
    with pytest.raises(ValueError, match="deepnorm"):
        deepnorm_constants(*arguments)


def test_one_update_moves_the_output_no_further_at_depth():
    """Sublayers of two matrices, one step, how far the output moves: arXiv:2203.00555, section 3."""

    def update(sublayers, alpha, beta, draw=0, d=16):
        unit = torch.ones(d, dtype=torch.float64)
        start = [beta * d**-0.5 * randn(2, d, d, seed=2000 * draw + i, dtype=torch.float64) for i in range(sublayers)]
        weights = [w.requires_grad_() for w in start]
        x, target = randn(2, 4, d, seed=99 + draw, dtype=torch.float64)

        def stack(weights, h=x):
            for up, down in weights:
                h = deepnorm_torch(h, torch.relu(h @ up) @ down, unit, None, alpha)
            return h

        y = stack(weights)
        gradient = torch.autograd.grad((y * target).sum(-1).mean(), weights)
        moved = stack([w.detach() - 1e-5 * g for w, g in zip(weights, gradient)])
        return (moved - y).norm(dim=-1).mean().item() / 1e-5

    deep = {n: update(n, *deepnorm_constants(n // 2)) for n in (10, 100, 1000)}
    post = {n: sum(update(n, 1.0, 1.0, draw) for draw in range(4)) / 4 for n in (10, 100)}
    assert max(deep.values()) < 1.5 * min(deep.values())
    assert post[100] > 5 * post[10] > 25 * deep[10]
