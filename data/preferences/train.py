"""The steps that made ChatGPT of GPT-3, small: demonstrations, a reward model, PPO; then DPO and GRPO, on three seeds.

    python data/preferences/train.py        about ten minutes of a core: writes results.toml and the folder speaker/

Answers, prompts and the reader's likes are those of llmstack.execution.preferences. `reward` is what the reward model
says, normalised over answers of the tuned model; `gold` what the reader likes; `kl` nats an answer, to the tuned model.
All three are means over the answers from before a step's update; of the curves every third step is kept.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import torch
from torch import nn

from llmstack.architectures import build, save
from llmstack.config import ModelConfig
from llmstack.execution.optimizers import adam
from llmstack.execution.ppo import GRPO, PPO, AdaptiveKL
from llmstack.execution.preferences import (
    WORDS,
    RewardModel,
    accuracy,
    answer,
    batches,
    demonstrations,
    dpo_loss,
    gold,
    implicit_rewards,
    pairs,
    preference_loss,
    prompts,
    text,
)
from llmstack.execution.schedules import linear
from llmstack.execution.trainer import Trainer

CONFIG = ModelConfig("speaker", d_model=48, n_layers=2, n_heads=4, d_ff=96, vocab_size=len(WORDS), tied=True)
SEEDS = (0, 1, 2)
SFT_STEPS, RM_STEPS, DPO_STEPS, RL_STEPS = 400, 200, 120, 60
COEFFICIENTS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
TARGET, START = 4.0, 0.2  # nats an answer; the first coefficient
KEPT = 3


def weights(model: nn.Module) -> dict:
    return dict(model.named_parameters())


def tuned(seed: int) -> tuple[nn.Module, float]:
    """Step 1: a model that imitates demonstrations, and its last loss."""
    model = build(CONFIG, seed)
    data = lambda step: demonstrations(64, seed * 10**6 + step)
    records = Trainer(model, data, adam(weights(model), 5e-3), linear(SFT_STEPS)).run(SFT_STEPS)
    return model, records[-1]["loss"]


def judge(sft: nn.Module, train: dict, seed: int) -> RewardModel:
    """Step 2: a model of what the reader prefers, normalised over answers of the tuned model."""
    model = RewardModel(sft)
    Trainer(model, batches(train, 32, seed), adam(weights(model), 3e-3), linear(RM_STEPS), preference_loss).run(
        RM_STEPS
    )
    seen = answer(sft, prompts(500), seed)
    model.normalise(seen["ids"], seen["padding"])
    return model.requires_grad_(False)


def ppo(sft: nn.Module, reward, kl: AdaptiveKL) -> PPO:
    """Step 3, ready to go: the policy and the critic start as the tuned model."""
    policy, critic = copy.deepcopy(sft), RewardModel(sft)
    return PPO(policy, sft, reward, critic, [adam(weights(policy), 1e-3), adam(weights(critic), 3e-3)], kl)


def grpo(sft: nn.Module, reward, kl: AdaptiveKL) -> GRPO:
    policy = copy.deepcopy(sft)
    return GRPO(policy, sft, reward, None, [adam(weights(policy), 1e-3)], kl, group=8)


def curve(tuner: PPO, judge: RewardModel, asked: torch.Tensor, seed: int, steps: int = RL_STEPS) -> dict:
    rows = []
    for step in range(steps):
        record = tuner.step(asked, seed * 10**6 + step)
        read = tuner.batch["ids"], tuner.batch["padding"]
        rows.append(record | {"reward": judge(*read).mean().item(), "gold": gold(*read).mean().item()})
        assert record["moved"][0] == 0.0, record
    found = {name: [round(r[name], 3) for r in rows[::KEPT]] for name in ("reward", "gold", "kl")}
    found |= {f"last_{name}": round(sum(r[name] for r in rows[-10:]) / 10, 3) for name in ("reward", "gold", "kl")}
    found["largest_kl"] = round(max(r["kl"] for r in rows), 3)
    found["last_coefficient"] = round(rows[-1]["coefficient"], 4)
    return found | {"says": text(answer(tuner.policy, prompts(1), 99)["ids"][0])}


def dpo(sft: nn.Module, judge: RewardModel, train: dict, test: dict, seed: int, beta: float = 0.1) -> dict:
    policy, rows = copy.deepcopy(sft), []
    reader = ppo(sft, judge, AdaptiveKL(0.0))
    trainer = Trainer(
        policy, batches(train, 32, seed), adam(weights(policy), 5e-4), linear(DPO_STEPS), dpo_loss(sft, beta)
    )
    for step in range(0, DPO_STEPS + 1, 10):
        trainer.run(step)
        with torch.no_grad():
            reader.policy = policy
            b = reader.rollout(prompts(200), 99)
            rows.append(
                {
                    "accuracy": accuracy(implicit_rewards(policy, sft, test, beta)),
                    "reward": b["score"].mean().item(),
                    "gold": gold(b["ids"], b["padding"]).mean().item(),
                    "kl": (b["old"] - b["ref"]).sum(-1).mean().item(),
                }
            )
    return {name: [round(r[name], 3) for r in rows] for name in rows[0]} | {"says": text(b["ids"][0])}


def main() -> None:
    torch.set_num_threads(1)
    lines = ["# Made by data/preferences/train.py, which says what the numbers are."]
    lines += [f"steps = {RL_STEPS}", f"kept = {KEPT}", f"target = {TARGET}", f"coefficients = {list(COEFFICIENTS)}"]
    for seed in SEEDS:
        sft, loss = tuned(seed)
        if seed == SEEDS[0]:
            save(sft, Path(__file__).parent / "speaker")
        train, test = pairs(sft, 2000, seed * 10 + 1), pairs(sft, 1000, seed * 10 + 2)
        model = judge(sft, train, seed)
        rewards = model(test["ids"].flatten(0, 1), test["padding"].flatten(0, 1)).unflatten(0, (2, -1))
        seen = answer(sft, prompts(500), 99)
        row = {
            "seed": seed,
            "sft_loss": round(loss, 3),
            "sft_gold": round(gold(seen["ids"], seen["padding"]).mean().item(), 3),
        }
        row |= {
            "pairs": train["ids"].shape[1],
            "held_out": test["ids"].shape[1],
            "accuracy": round(accuracy(rewards), 4),
        }
        lines += ["", "[[run]]", *(f"{k} = {v}" for k, v in row.items())]
        print(row, flush=True)
        makers = {"adaptive": lambda: curve(ppo(sft, model, AdaptiveKL(START, TARGET, 640)), model, prompts(64), seed)}
        makers["dpo"] = partial(dpo, sft, model, train, test, seed)
        grouped = prompts(8).repeat_interleave(8, 0)
        makers["grpo_rule"] = lambda: curve(grpo(sft, gold, AdaptiveKL(0.04)), model, grouped, seed)
        makers["grpo_model"] = lambda: curve(grpo(sft, model, AdaptiveKL(0.04)), model, grouped, seed)
        for beta in COEFFICIENTS:
            makers[f'fixed."{beta}"'] = lambda beta=beta: curve(
                ppo(sft, model, AdaptiveKL(beta)), model, prompts(64), seed
            )
        for name, make in makers.items():
            found = make()
            said = {k: f'"{v}"' if isinstance(v, str) else v for k, v in found.items()}
            lines += ["", f"[run.{name}]", *(f"{k} = {v}" for k, v in said.items())]
            print(
                seed,
                name,
                {k: v for k, v in found.items() if not isinstance(v, list)},
                *(f"{k} {v[-1]}" for k, v in found.items() if isinstance(v, list)),
                flush=True,
            )
        (Path(__file__).parent / "results.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
