"""A soft mixture of experts in a value network (Obando-Ceron et al. 2024, arXiv:2402.08609), on the smallest of worlds.

An agent and a goal stand on n × n squares; four moves, reward 1 on arrival, γ = 0.9. An encoder makes a few tokens of
the two places, as the paper's convolutions do of a screen; the mixture stands before the last layer.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from llmstack.architectures.moe import Experts, SoftMoE

MOVES = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])


class ValueNetwork(nn.Module):
    """Q [B, 4] of agent and goal [B, 2]. experts = 0: a dense layer in place of the mixture, `hidden` wide inside
    (4 · width where 0): at 32 · experts it has the parameters of as many experts."""

    def __init__(self, n: int, experts: int, width: int = 8, tokens: int = 8, hidden: int = 0, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.n, self.width = n, width
        self.agent, self.goal = nn.Embedding(n * n, tokens * width), nn.Embedding(n * n, tokens * width)
        if experts:
            self.middle = SoftMoE(Experts(experts, width, 4 * width, "relu"), slots=-(-tokens // experts))
        else:
            hidden = hidden or 4 * width
            self.middle = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(tokens * width, 4))

    def forward(self, agent: Tensor, goal: Tensor) -> Tensor:
        number = lambda square: square @ torch.tensor([self.n, 1])
        seen = (self.agent(number(agent)) + self.goal(number(goal))).relu()  # [B, tokens · width]
        return self.head(self.middle(seen.unflatten(1, (-1, self.width))).flatten(1))


def train(network: ValueNetwork, steps: int = 200, batch: int = 128, seed: int = 0, lr: float = 1e-2) -> None:
    """Q-learning on random moves from random squares, with a copy of the network for the targets."""
    rng, n = torch.Generator().manual_seed(seed), network.n
    optimizer = torch.optim.Adam(network.parameters(), lr)
    for step in range(steps):
        if step % 25 == 0:
            target = copy.deepcopy(network)
        agent, goal = torch.randint(n, (2, batch, 2), generator=rng)
        move = torch.randint(4, (batch,), generator=rng)
        there = (agent + MOVES[move]).clamp(0, n - 1)
        arrived = (there == goal).all(1)
        with torch.no_grad():
            value = torch.where(arrived, 1.0, 0.9 * target(there, goal).max(1).values)
        q = network(agent, goal).gather(1, move[:, None])[:, 0]
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(q, value).backward()
        optimizer.step()


@torch.no_grad()
def skill(network: ValueNetwork) -> float:
    """The share of all positions in which the move with the largest Q comes nearer to the goal."""
    squares = torch.cartesian_prod(torch.arange(network.n), torch.arange(network.n))  # [n², 2]
    i, j = torch.cartesian_prod(torch.arange(len(squares)), torch.arange(len(squares))).unbind(1)
    agent, goal = squares[i[i != j]], squares[j[i != j]]
    there = (agent + MOVES[network(agent, goal).argmax(1)]).clamp(0, network.n - 1)
    distance = lambda square: (square - goal).abs().sum(1)
    return float((distance(there) < distance(agent)).float().mean())
