"""Policy gradients on a language model: PPO with its four models, and GRPO, which drops the critic.

    actor π        the policy that is trained            reference π_ref   the policy before, frozen
    critic V       what reward to expect from here       reward r          one number for a whole answer

A token is an action, the text before it the state. Reward of token t (Ziegler et al. 2019, arXiv:1909.08593, eq. 2):

    r_t = −β (log π(a_t) − log π_ref(a_t)),  and the answer's r at its last token
    δ_t = r_t + γ V_{t+1} − V_t,  A_t = Σ_l (γλ)^l δ_{t+l}               GAE: Schulman et al. 2015, arXiv:1506.02438
    −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A),  ρ = π / π_old                   PPO: Schulman et al. 2017, arXiv:1707.06347

GRPO (Shao et al. 2024, arXiv:2402.03300): A is the answer's reward among G answers to the same prompt, less their mean
and divided by their spread; the KL goes into the loss by the estimator k3 = x − log x − 1, x = π_ref / π.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmstack.execution.optimizers import Optimizer, clip_
from llmstack.execution.preferences import END, Batch, Score, answer, log_probs


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """Advantages [B, T] of the actions where mask is True: one run a row, with nothing to expect after its end."""
    values, out, ahead, after = values * mask, torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * ahead - values[:, t]
        out[:, t] = after = (delta + gamma * lam * after) * mask[:, t]
        ahead = values[:, t]
    return out


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the True places together, 0 elsewhere."""
    inside = x[mask]
    return ((x - inside.mean()) / (inside.var(correction=0) + 1e-8).sqrt()) * mask


def clipped_objective(ratio: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """What PPO raises, element by element: no gain from taking the ratio further than `clip` from 1."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def grpo_advantages(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """Rewards [N, G] of G answers to each of N prompts, normalised within their group."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)


def k3(log_p: Tensor, log_ref: Tensor) -> Tensor:
    """Estimator of KL(p ‖ ref) from samples of p: never negative, and unbiased since E[ref / p] = 1."""
    return (log_ref - log_p).expm1() - (log_ref - log_p)


class AdaptiveKL:
    """β that steers the KL, in nats an answer, to its target: up by 20 % at most over `horizon` answers, or down.

    Ziegler et al. 2019, section 2.2. Without a target β stays.
    """

    def __init__(self, coefficient: float, target: float | None = None, horizon: int = 10000):
        if not coefficient >= 0 or (target is not None and not (target > 0 and coefficient > 0)) or horizon < 1:
            rule = "target and horizon are more than zero, coefficient too where there is a target: it moves by factors"
            raise ValueError(f"coefficient = {coefficient}, target = {target}, horizon = {horizon}, but {rule}")
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, kl: float, answers: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * answers / self.horizon


class PPO:
    """Answers prompts, scores the answers and moves the policy towards the better ones: one `step` a batch.

    policy, reference: decoders; critic: a RewardModel, whose `values` are trained; reward(ids, padding) -> [B]: a
    RewardModel, or any program that reads the answer. optimizers: of the policy, and of the critic.
    """

    def __init__(self, policy: nn.Module, reference: nn.Module, reward: Score, critic: nn.Module | None,
                 optimizers: list[Optimizer], kl: AdaptiveKL, *,
                 epochs=4, clip=0.2, lam=0.95, eos=END, group=8):  # fmt: skip
        self.policy, self.reference, self.reward, self.critic = policy, reference, reward, critic
        self.optimizers, self.kl, self.epochs, self.clip = optimizers, kl, epochs, clip
        self.lam, self.eos, self.group = lam, eos, group

    @torch.no_grad()
    def rollout(self, prompts: Tensor, seed: int) -> Batch:
        """Answers with all that the update needs to know of them, from before it."""
        b = answer(self.policy, prompts, seed, self.eos)
        read = b["ids"], b["padding"]
        b["old"], b["ref"] = (log_probs(m, *read, b["response"]) for m in (self.policy, self.reference))
        b["score"] = self.reward(*read)  # [B]
        if b["score"].shape != (n := len(prompts),) or not b["score"].isfinite().all():
            raise ValueError(f"the reward gives {b['score']}, but it is one finite number for each of {n} answers")
        return b | self.advantages(b)

    def advantages(self, b: Batch) -> Batch:
        """`advantages` and, for the critic, `returns` [B, T - 1]."""
        mask = b["response"]
        last = mask & (mask.long().flip(1).cumsum(1).flip(1) == 1)
        rewards = last * b["score"][:, None] - self.kl.coefficient * (b["old"] - b["ref"])  # [B, T - 1]
        values = self.critic.values(b["ids"], b["padding"])[:, :-1]
        found = gae(rewards, values, mask, lam=self.lam)
        return {"advantages": whiten(found, mask), "returns": found + values * mask}

    def losses(self, b: Batch) -> tuple[list[Tensor], Tensor]:
        """One loss for each optimizer, means over the answers' tokens, and the ratios π / π_old."""
        mask = b["response"]
        ratio = (log_probs(self.policy, b["ids"], b["padding"], mask) - b["old"]).exp()
        values = self.critic.values(b["ids"], b["padding"])[:, :-1]
        squares = (values - b["returns"])[mask] ** 2
        return [-clipped_objective(ratio, b["advantages"], self.clip)[mask].mean(), squares.mean() / 2], ratio[mask]

    def step(self, prompts: Tensor, seed: int) -> dict[str, float]:
        """One batch of answers (kept as `batch`), `epochs` updates on it.

        Returns `reward` and `kl`, means over the answers from before the updates, in nats an answer; the coefficient
        of that KL; and of each epoch's ratios the largest distance from 1: in the first it is 0 to the bit.
        """
        b, moved = self.rollout(prompts, seed), []
        for _ in range(self.epochs):
            losses, ratio = self.losses(b)
            for loss, optimizer in zip(losses, self.optimizers):
                optimizer.zero_grad()
                loss.backward()
                clip_([w.grad for w in optimizer.params.values() if w.grad is not None], 1.0)
                optimizer.step()
            moved.append((ratio - 1).abs().max().item())
        self.batch, kl, used = b, (b["old"] - b["ref"]).sum(-1).mean().item(), self.kl.coefficient
        self.kl.update(kl, len(prompts))
        return {"reward": b["score"].mean().item(), "kl": kl, "coefficient": used, "moved": moved}


class GRPO(PPO):
    """PPO without a critic (None) and with one optimizer: prompts come in groups of `group` equal ones."""

    def advantages(self, b: Batch) -> Batch:
        if self.group < 2 or len(b["score"]) % self.group:
            raise ValueError(f"{len(b['score'])} prompts are no groups of {self.group}: repeat each; group= 2 and on")
        return {"advantages": grpo_advantages(b["score"].view(-1, self.group)).view(-1, 1) * b["response"]}

    def losses(self, b: Batch) -> tuple[list[Tensor], Tensor]:
        mask = b["response"]
        now = log_probs(self.policy, b["ids"], b["padding"], mask)
        ratio = (now - b["old"]).exp()
        gain = clipped_objective(ratio, b["advantages"], self.clip) - self.kl.coefficient * k3(now, b["ref"])
        return [-((gain * mask).sum(1) / mask.sum(1)).mean()], ratio[mask]
