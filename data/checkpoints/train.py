"""Train the four small checkpoints of this folder, on one core, from text that pip and Python bring.

    python data/checkpoints/train.py tokenizer         the byte-level BPE that all four share
    python data/checkpoints/train.py llama-2m          or gpt2-2m, relu-2m, t5-2m

A run stopped at any moment goes on where it was when it is started again (the Trainer's checkpoints and log lie in the
temporary folder; see --work). A folder gets config.json, model.safetensors, tokenizer.json, and card.json with seed,
steps and seconds; measure.py then adds what was learnt, and README.md has the numbers of the stored weights.

The three decoders predict the next token. The encoder-decoder restores capitals and punctuation to verses of the King
James Bible that lost both. Half of the training documents are used: a core sees them two to four times in half an hour.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import (
    CONTEXT,
    END,
    HERE,
    PAD,
    SPECIAL,
    START,
    VOCAB,
    chosen,
    decoder_loss,
    encode,
    encode_pairs,
    pair_batch,
    pair_loss,
    verse_pairs,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from llmstack.architectures import build, save
from llmstack.config import ModelConfig
from llmstack.execution.data import Batch, Data
from llmstack.execution.objectives import next_token, text_to_text
from llmstack.execution.trainer import Trainer

COMMON = dict(vocab_size=VOCAB, max_seq_len=CONTEXT, tied=True)
LEARNT = dict(positions="learned", norm="layernorm", norm_bias=True, qkv_bias=True, out_bias=True, ffn_bias=True)
SHAPES = {
    "llama-2m": dict(d_model=192, n_layers=4, n_heads=6, n_kv_heads=2, d_ff=384, model_type="llama"),
    "gpt2-2m": dict(d_model=160, n_layers=4, n_heads=5, model_type="gpt2", activation="gelu_tanh", **LEARNT),
    "relu-2m": dict(
        d_model=160, n_layers=4, n_heads=5, model_type="opt", activation="relu", position_offset=2, **LEARNT
    ),
    "t5-2m": dict(
        d_model=128, n_layers=4, n_heads=4, d_ff=512, model_type="t5", kind="encoder-decoder", activation="relu",
        positions="relative", attention_scale=1.0, head_scale=128**-0.5, norm_eps=1e-6,
    ),
}  # fmt: skip
CYCLE = 1600  # steps from one warm-up to the end of its decay
CYCLES = {"llama-2m": 1, "gpt2-2m": 2, "relu-2m": 2, "t5-2m": 2}


def config(name: str) -> ModelConfig:
    return ModelConfig(name=name, **COMMON, **SHAPES[name])


def train_tokenizer(texts) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = dict(vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**options))
    return tokenizer


def tokenizer_for(tokenizer: Tokenizer, kind: str) -> Tokenizer:
    """A decoder's text begins with <|start|>; an encoder-decoder's source ends with <|end|>."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    template = "<|start|> $A" if kind == "decoder" else "$A <|end|>"
    copy.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<|start|>", START), ("<|end|>", END)]
    )
    return copy


# --- training


class Muon:
    """Matrices move by their orthogonalised momentum (Jordan 2024, kellerjordan.github.io/posts/muon), everything else
    by AdamW: half the steps of AdamW alone at these sizes."""

    def __init__(self, model: nn.Module, rate: float = 0.02, adam_rate: float = 0.01, decay: float = 0.05):
        self.params = dict(model.named_parameters())
        self.momenta = {n: torch.zeros_like(p) for n, p in self.params.items() if p.ndim == 2 and ".blocks." in f".{n}"}
        rest = [p for n, p in self.params.items() if n not in self.momenta]
        self.adam = torch.optim.AdamW(rest, adam_rate, (0.9, 0.95), weight_decay=0.0, fused=True)
        self.lr, self.rate, self.adam_rate, self.decay = 1.0, rate, adam_rate, decay  # lr: the share of both rates

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step at a share `lr` of the peak learning rates."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * lr
        self.adam.step()
        for name, m in self.momenta.items():
            p = self.params[name]
            m.mul_(0.95).add_(p.grad)
            p.mul_(1 - self.rate * lr * self.decay)
            p.add_(orthogonal(p.grad.add(m, alpha=0.95)), alpha=-self.rate * lr * max(1, len(p) / p.shape[1]) ** 0.5)

    def state_dict(self) -> dict[str, Tensor]:
        adam = {n: self.adam.state.get(p, {}) for n, p in self.params.items()}
        flat = {f"{n}/{key}": value for n, state in adam.items() for key, value in state.items()}
        return flat | {f"{n}/m": m for n, m in self.momenta.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for key, value in saved.items():
            name, _, part = key.rpartition("/")
            if part == "m":
                self.momenta[name] = value
            else:
                self.adam.state[self.params[name]][part] = value


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrix with singular values near 1, by Newton-Schulz iterations."""
    x = g / (g.norm() + 1e-7)
    x = x.t() if len(x) > x.shape[1] else x
    for _ in range(steps):
        a = x @ x.t()
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.t() if len(g) > g.shape[1] else x


def share(step: int, cycle: int) -> float:
    """In every cycle a warm-up over 50 steps, a plateau, then linearly to zero over the second half."""
    step %= cycle
    return min(1.0, (step + 1) / 50, 2 * (cycle - step) / cycle)


def windows(stream: Tensor, batch: int, seed: int) -> Data:
    """Batches of CONTEXT tokens, epoch after epoch, each cut from another offset and in another order."""
    rng, starts = torch.Generator().manual_seed(seed), []  # drawn as far as a step has asked

    def data(step: int) -> Batch:
        while len(starts) < (step + 1) * batch:
            offset = torch.randint(0, CONTEXT, (1,), generator=rng)
            starts.extend((torch.randperm(len(stream) // CONTEXT - 1, generator=rng) * CONTEXT + offset).tolist())
        rows = torch.stack([stream[s : s + CONTEXT + 1] for s in starts[step * batch : (step + 1) * batch]])
        return {"ids": rows[:, :-1], "targets": rows[:, 1:]}

    return data


def buckets(pairs: list, batch: int, seed: int) -> Data:
    """Batches of pairs of like length, so that little is padding."""
    rng, rows = np.random.default_rng(seed), []

    def data(step: int) -> Batch:
        while len(rows) <= step:
            lengths = np.array([len(t) for _, t in pairs]) + rng.uniform(0, 2, len(pairs))
            order = np.argsort(lengths)[: len(pairs) // batch * batch].reshape(-1, batch)
            rows.extend(rng.permutation(order))
        return pair_batch([pairs[i] for i in rows[step]])

    return data


def fit(model: nn.Module, data: Data, loss, steps: int, cycle: int, folder: Path, probe) -> float:
    """Train, or go on with what `folder` has. Seconds of training, those before a stop included."""

    def tell(record: dict) -> None:
        if (done := record["step"] + 1) % 100 == 0 or done == steps:
            seconds = sum(r["seconds"] for r in trainer.records)
            held = f"  held out {probe(model):.4f}" if done % 300 == 0 else ""
            print(f"{done:5d}/{steps}  {seconds:6.0f} s  loss {record['loss']:.4f}{held}", flush=True)

    schedule = lambda step: share(step, cycle)
    trainer = Trainer(model, data, Muon(model), schedule, loss, folder=folder, every=100, on_step=tell)
    trainer.resume()
    return sum(r["seconds"] for r in trainer.run(steps))


def write(folder: Path, model: nn.Module, tokenizer: Tokenizer, card: dict) -> None:
    save(model, folder)
    ends = dict(bos_token_id=START, eos_token_id=END, pad_token_id=PAD)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    told |= {f"{end}_token": SPECIAL[i] for end, i in (("bos", START), ("eos", END), ("pad", PAD))}
    for name, content in (("config", raw | ends), ("tokenizer_config", told), ("card", card)):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    tokenizer_for(tokenizer, model.config.kind).save(str(folder / "tokenizer.json"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tokenizer", *SHAPES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "llmstack-train")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the training length")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    train, held_out = chosen()
    if args.what == "tokenizer":
        train_tokenizer(d.text for d in train).save(str(args.out / "tokenizer.json"))
        return
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    cfg = config(args.what)
    model, folder = build(cfg, args.seed), args.work / f"{args.what}-{args.seed}"
    cycle = max(1, round(CYCLE * args.scale))
    steps = cycle * CYCLES[args.what]
    print(f"{args.what}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    if cfg.kind == "decoder":
        texts, batch = encode(tokenizer, [d.text for d in train]), 8
        stream = torch.tensor([i for text in texts for i in (START, *text)])
        small = encode(tokenizer, [d.text for d in held_out[::20]])
        probe = lambda m: np.divide(*decoder_loss(m, small))
        seconds = fit(model, windows(stream, batch, args.seed), next_token, steps, cycle, folder, probe)
        card = dict(tokens_seen=steps * batch * CONTEXT, tokens_distinct=len(stream))
    else:
        sides = [encode_pairs(tokenizer, side) for side in verse_pairs()]
        texts, batch = [t for _, t in sides[0]], 32
        probe = lambda m: pair_loss(m, sides[1][:256]).item()
        seconds = fit(model, buckets(sides[0], batch, args.seed), text_to_text, steps, cycle, folder, probe)
        card = dict(pairs_seen=steps * batch, pairs_distinct=len(sides[0]))
    write(args.out / args.what, model, tokenizer, card | dict(seed=args.seed, steps=steps, seconds=round(seconds)))


if __name__ == "__main__":
    main()
