"""The smallest world: its moves, its skill and its values against what can be counted on squares by hand."""

import pytest
import torch

from llmstack.architectures.grid_world import MOVES, ValueNetwork, skill, train


class Always:
    """A network of a world of n × n squares that prefers one move."""

    def __init__(self, n, move):
        self.n, self.move = n, move

    def __call__(self, agent, goal):
        return torch.nn.functional.one_hot(torch.full((len(agent),), self.move), 4).float()


class Nearest(Always):
    def __call__(self, agent, goal):
        there = agent[:, None] + MOVES  # [B, 4, 2]
        return -(there - goal[:, None]).abs().sum(-1)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_skill_is_the_share_of_positions_that_a_move_improves(n):
    """Up helps where the goal is in a row above: n² pairs of columns for each of n (n − 1) / 2 pairs of rows."""
    pairs = n**2 * (n**2 - 1)
    for move in range(4):
        assert skill(Always(n, move)) == pytest.approx(n**2 * n * (n - 1) / 2 / pairs)
    assert skill(Nearest(n, 0)) == 1


def test_values_are_rewards_discounted_by_the_distance():
    """Q of the best move at a distance of d moves is 0.9^(d − 1)."""
    network = ValueNetwork(2, experts=2)
    train(network, steps=250)
    agent = torch.tensor([[0, 0], [0, 0], [1, 0]])
    goal = torch.tensor([[0, 1], [1, 1], [0, 1]])
    best = network(agent, goal).max(1).values
    assert best.tolist() == pytest.approx([1, 0.9, 0.9], abs=0.04)


def test_each_pair_of_squares_has_its_own_values():
    network = ValueNetwork(3, experts=2)
    squares = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    agent, goal = squares.repeat_interleave(9, 0), squares.repeat(9, 1)
    q = network(agent, goal)
    assert q.shape == (81, 4) and len(q.unique(dim=0)) == 81


def test_slots_are_as_many_as_tokens_or_a_few_more():
    sizes = {experts: tuple(ValueNetwork(3, experts, tokens=8).middle.phi.shape) for experts in (1, 3, 8)}
    assert sizes == {1: (8, 1, 8), 3: (8, 3, 3), 8: (8, 8, 1)}


def test_without_experts_a_dense_layer_stands_there():
    network = ValueNetwork(3, experts=0, width=4, tokens=5)
    agent = goal = torch.tensor([[0, 2]])
    assert network(agent, goal).shape == (1, 4) and network.agent.weight.shape == (9, 20)
    assert [tuple(p.shape) for p in network.middle.parameters()] == [(16, 4), (16,), (4, 16), (4,)]
    assert torch.equal(network(agent, goal), ValueNetwork(3, 0, width=4, tokens=5)(agent, goal))  # drawn from the seed
