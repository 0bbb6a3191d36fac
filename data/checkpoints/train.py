"""Train the four small checkpoints of this folder, on one core, from text that pip and Python bring.

    python data/checkpoints/train.py tokenizer         the byte-level BPE that all four share
    python data/checkpoints/train.py llama-2m          or gpt2-2m, relu-2m, t5-2m

A run stopped at any moment goes on where it was when it is started again (its state lies in the temporary folder; see
--work). A folder gets config.json, model.safetensors, tokenizer.json, and card.json with seed, steps and seconds;
measure.py then adds what was learnt, and README.md has the numbers of the stored weights.

The three decoders predict the next token. The encoder-decoder restores capitals and punctuation to verses of the King
James Bible that lost both. Half of the training documents are used: a core sees them two to four times in half an hour.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

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
    pair_loss,
    verse_pairs,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from llmstack.architectures import build, save
from llmstack.config import ModelConfig
from llmstack.ops.cross_entropy import cross_entropy_torch

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

    def __init__(self, model: nn.Module, lr: float = 0.02, adam_lr: float = 0.01, decay: float = 0.05):
        named = dict(model.named_parameters())
        self.matrices = [p for n, p in named.items() if p.ndim == 2 and ".blocks." in f".{n}"]
        chosen = {id(p) for p in self.matrices}
        rest = [p for p in named.values() if id(p) not in chosen]
        self.adam = torch.optim.AdamW(rest, adam_lr, (0.9, 0.95), weight_decay=0.0, fused=True)
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.lr, self.adam_lr, self.decay = lr, adam_lr, decay

    @torch.no_grad()
    def step(self, share: float) -> None:
        """One step at a share of the peak learning rates; gradients are cleared."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * share
        self.adam.step()
        self.adam.zero_grad()
        for p, m in zip(self.matrices, self.momenta):
            m.mul_(0.95).add_(p.grad)
            p.mul_(1 - self.lr * share * self.decay)
            p.add_(orthogonal(p.grad.add(m, alpha=0.95)), alpha=-self.lr * share * max(1, len(p) / p.shape[1]) ** 0.5)
            p.grad = None


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


def windows(stream: Tensor, batch: int, seed: int):
    """Batches [batch, CONTEXT + 1], epoch after epoch, each cut from another offset and in another order."""
    rng, order = torch.Generator().manual_seed(seed), []
    while True:
        if len(order) < batch:
            offset = torch.randint(0, CONTEXT, (1,), generator=rng)
            order += (torch.randperm(len(stream) // CONTEXT - 1, generator=rng) * CONTEXT + offset).tolist()
        starts, order = order[:batch], order[batch:]
        yield torch.stack([stream[s : s + CONTEXT + 1] for s in starts])


def buckets(pairs: list, batch: int, seed: int):
    """Batches of pairs of like length, so that little is padding."""
    rng = np.random.default_rng(seed)
    while True:
        lengths = np.array([len(t) for _, t in pairs]) + rng.uniform(0, 2, len(pairs))
        order = np.argsort(lengths)[: len(pairs) // batch * batch].reshape(-1, batch)
        for row in rng.permutation(order):
            yield [pairs[i] for i in row]


def fit(model: nn.Module, batches, loss_of, steps: int, cycle: int, state: Path, probe) -> float:
    """Train, keeping what is needed to go on in `state`. Seconds of training, those before a stop included."""
    optimizer, start, before = Muon(model), 0, 0.0
    if state.is_file():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.adam.load_state_dict(kept["adam"])
        optimizer.momenta, start, before = kept["momenta"], kept["step"], kept["seconds"]
    began = time.perf_counter()
    for step, batch in zip(range(steps), batches):
        if step < start:
            continue
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step(share(step, cycle))
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = before + time.perf_counter() - began
            kept = dict(model=model.state_dict(), adam=optimizer.adam.state_dict(), momenta=optimizer.momenta)
            torch.save(kept | dict(step=step + 1, seconds=seconds), state.with_suffix(".tmp"))
            state.with_suffix(".tmp").replace(state)
            held = f"  held out {probe(model):.4f}" if (step + 1) % 300 == 0 else ""
            print(f"{step + 1:5d}/{steps}  {seconds:6.0f} s  loss {loss.item():.4f}{held}", flush=True)
    return before + time.perf_counter() - began


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
    args.work.mkdir(parents=True, exist_ok=True)
    train, held_out = chosen()
    if args.what == "tokenizer":
        train_tokenizer(d.text for d in train).save(str(args.out / "tokenizer.json"))
        return
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    cfg = config(args.what)
    model, state = build(cfg, args.seed), args.work / f"{args.what}-{args.seed}.pt"
    cycle = max(1, round(CYCLE * args.scale))
    steps = cycle * CYCLES[args.what]
    print(f"{args.what}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    if cfg.kind == "decoder":
        texts, batch = encode(tokenizer, [d.text for d in train]), 8
        stream = torch.tensor([i for text in texts for i in (START, *text)])
        small = encode(tokenizer, [d.text for d in held_out[::20]])
        probe = lambda m: np.divide(*decoder_loss(m, small))
        loss_of = lambda m, ids: cross_entropy_torch(m(ids[:, :-1]), ids[:, 1:])
        seconds = fit(model, windows(stream, batch, args.seed), loss_of, steps, cycle, state, probe)
        card = dict(tokens_seen=steps * batch * CONTEXT, tokens_distinct=len(stream))
    else:
        sides = [encode_pairs(tokenizer, side) for side in verse_pairs()]
        texts, batch = [t for _, t in sides[0]], 32
        probe = lambda m: pair_loss(m, sides[1][:256]).item()
        seconds = fit(model, buckets(sides[0], batch, args.seed), pair_loss, steps, cycle, state, probe)
        card = dict(pairs_seen=steps * batch, pairs_distinct=len(sides[0]))
    write(args.out / args.what, model, tokenizer, card | dict(seed=args.seed, steps=steps, seconds=round(seconds)))


if __name__ == "__main__":
    main()
