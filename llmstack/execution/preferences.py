"""Learning from preferences: of two answers to one prompt a person prefers one, and says no more than that.

    reward model     −log σ(r(x, y⁺) − r(x, y⁻))                      Bradley and Terry 1952; Christiano et al. 2017,
                                                                      arXiv:1706.03741; Ouyang et al. 2022, 2203.02155
    PPO              raises r − β KL(π ‖ π_ref)                        ppo.py
    DPO              −log σ(r̂(y⁺) − r̂(y⁻)), r̂ = β log π / π_ref       Rafailov et al. 2023, arXiv:2305.18290, eq. 7

DPO is the reward model's loss with a reward that the policy itself implies: no model of rewards, no sampling.

The task here can be checked by a program. Prompts name an animal, answers are sentences about it, and the reader
whose preferences are asked likes colours: `gold` counts the different ones of a well-formed sentence.

A batch of pairs holds the preferred answers at [0] and the others at [1]: `ids`, `padding` (True: real) [2, B, T], and
`response` [2, B, T - 1], True where the token predicted belongs to the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from llmstack.execution.data import Batch, Data
from llmstack.execution.generation import generate

ANIMALS, VERBS = "cat dog bird fox fish".split(), "sees likes chases finds".split()
COLOURS = "red blue green gold grey pink".split()
WORDS = ["<pad>", "<s>", ".", "the", "a", *ANIMALS, *VERBS, *COLOURS]
PAD, START, END = 0, 1, 2
ANSWER = 14  # tokens that an answer may have; a well-formed sentence has 6 to 10
_NOUN = rf"(?:the|a)(?: (?:{'|'.join(COLOURS)})){{0,2}}"
_SENTENCE = re.compile(rf"{_NOUN} (\w+) (?:{'|'.join(VERBS)}) {_NOUN} (?:{'|'.join(ANIMALS)}) \.")

Score = Callable[[Tensor, Tensor], Tensor]  # ids and padding [B, T] -> rewards [B]


def sentence(animal: str, rng: random.Random) -> str:
    """One answer as the demonstrations have it: up to two colours before a noun, more often none."""
    noun = lambda name: [rng.choice(["the", "a"]), *rng.choices(COLOURS, k=rng.choices((0, 1, 2), (10, 7, 3))[0]), name]
    return " ".join([*noun(animal), rng.choice(VERBS), *noun(rng.choice(ANIMALS)), "."])


def demonstrations(n: int, seed: int) -> Batch:
    """n prompts with answers for supervised tuning: `ids`, `targets` (−100 at the prompt and padding), `padding`."""
    rng, ids = random.Random(seed), torch.full((n, 2 + ANSWER), PAD)
    for row in ids:
        words = ["<s>", animal := rng.choice(ANIMALS), *sentence(animal, rng).split()]
        row[: len(words)] = torch.tensor([WORDS.index(w) for w in words])
    targets = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100)
    targets[:, 0] = -100  # the animal is given
    return {"ids": ids[:, :-1], "targets": targets, "padding": ids[:, :-1] != PAD}


def prompts(n: int) -> Tensor:
    """[n, 2]: the animals in turn."""
    return torch.tensor([[START, WORDS.index(ANIMALS[i % len(ANIMALS)])] for i in range(n)])


def text(ids: Tensor) -> str:
    """The words after the prompt, to the first full stop."""
    return "".join(" ".join(WORDS[i] for i in ids[2:].tolist()).partition(" .")[:2])


def gold(ids: Tensor, padding: Tensor) -> Tensor:
    """What the reader truly likes, [B]: different colours in a well-formed sentence about the animal, else 0."""
    said = [(_SENTENCE.fullmatch(text(row)), WORDS[row[1]]) for row in ids]
    liked = [len(set(COLOURS) & set(found[0].split())) if found and found[1] == animal else 0 for found, animal in said]
    return torch.tensor(liked, dtype=torch.float32)


def answer(model: nn.Module, asked: Tensor, seed: int, eos: int = END, length: int = ANSWER) -> Batch:
    """Answers drawn at temperature 1 to prompts [B, P] of one length: `ids`, `padding`, `response` as in a batch."""
    ids = generate(model, asked, length, eos=eos, temperature=1.0, seed=seed)  # [B, T]
    place = torch.arange(ids.shape[1], device=ids.device)
    end = (ids == eos) & (place >= asked.shape[1])
    real = end.long().cumsum(1) - end.long() == 0  # what comes after the first eos repeats it
    return {"ids": ids, "padding": real, "response": (real & (place >= asked.shape[1]))[:, 1:]}


def pairs(model: nn.Module, n: int, seed: int, likes: Score = gold) -> Batch:
    """Two answers each to n prompts, the one that `likes` scores higher first; where it likes both, none is kept."""
    drawn = answer(model, prompts(n).repeat(2, 1), seed)
    score = likes(drawn["ids"], drawn["padding"]).view(2, n)
    columns = torch.arange(n)[score[0] != score[1]]
    order = torch.stack([score.argmax(0), score.argmin(0)])[:, columns]
    return {name: x.unflatten(0, (2, n))[order, columns] for name, x in drawn.items()}


def batches(examples: Batch, size: int, seed: int = 0) -> Data:
    """data(step), as a trainer takes it: `size` of the pairs, drawn by seed and step."""
    count = examples["ids"].shape[1]
    draw = lambda step: np.random.default_rng((seed, step)).integers(count, size=size)
    return lambda step: {name: x[:, draw(step)] for name, x in examples.items()}


class RewardModel(nn.Module):
    """A copy of a decoder with a head that gives one number. The critic of PPO is another: it has `values`."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.config, self.decoder = decoder.config, deepcopy(decoder)
        self.weight, self.bias = nn.Parameter(torch.zeros(self.config.d_model)), nn.Parameter(torch.zeros(()))

    def values(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        """A number after each token, [B, T]."""
        return self.decoder.hidden_states(ids, padding)[-1] @ self.weight + self.bias

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        """Rewards [B]: the number after the last real token of each row, ids and padding [B, T]."""
        last = (padding * torch.arange(padding.shape[1], device=ids.device)).argmax(1, keepdim=True)
        return self.values(ids, padding).gather(1, last)[:, 0]

    @torch.no_grad()
    def normalise(self, ids: Tensor, padding: Tensor) -> None:
        """Mean 0 and spread 1 over these answers (Ziegler et al. 2019): preferences fix neither."""
        if not (found := self(ids, padding)).var(correction=0) > 0:
            raise ValueError(f"rewards of {len(ids)} answers have no spread: train first, and give different answers")
        self.bias -= found.mean()
        for w in (self.weight, self.bias):
            w /= found.std()


def preference_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Bradley and Terry: P(y⁺ before y⁻) = σ(r⁺ − r⁻). Summed nats over the pairs, and how many."""
    return _pairwise(model(batch["ids"].flatten(0, 1), batch["padding"].flatten(0, 1)))


def dpo_loss(reference: nn.Module, beta: float = 0.1) -> Callable[[nn.Module, Batch], tuple[Tensor, int]]:
    """loss(policy, batch), as a trainer takes it. `reference` is the policy before, and stays."""
    return lambda policy, batch: _pairwise(implicit_rewards(policy, reference, batch, beta).flatten())


def implicit_rewards(policy: nn.Module, reference: nn.Module, batch: Batch, beta: float) -> Tensor:
    """β log π(y|x) / π_ref(y|x) of both answers, [2, B]. Only `policy` gets gradients."""
    flat = [batch[name].flatten(0, 1) for name in ("ids", "padding", "response")]
    with torch.no_grad():
        before = log_probs(reference, *flat)
    return beta * (log_probs(policy, *flat) - before).sum(-1).unflatten(0, (2, -1))


def log_probs(model: nn.Module, ids: Tensor, padding: Tensor, response: Tensor) -> Tensor:
    """log π of each token of the answer, given what is before it: [B, T - 1], 0 at prompts and padding."""
    found = model(ids, padding)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return found.masked_fill(~response.bool(), 0.0)


def accuracy(rewards: Tensor) -> float:
    """Share of pairs [2, B] whose preferred answer has the higher reward; a tie is half right."""
    return (1 + (rewards[0] - rewards[1]).sign().mean().item()) / 2


def _pairwise(rewards: Tensor) -> tuple[Tensor, int]:
    preferred, other = rewards.chunk(2)
    return -logsigmoid(preferred - other).sum(), len(preferred)
