"""Train the small models of the tasks, each in a minute or two of one core, and write what they reach to results.toml.

    python data/tasks/train.py                  all
    python data/tasks/train.py sentiment        one: translation, summary, sentiment, extraction, generation,
                                                addition, shots, smollm2, instructions, sweep

Letters, words and numbers of a task come from `llmstack.execution.tasks`; its held-out examples are never trained on:
verses of the held-out side of the corpus, and for the rules, draws that do not occur among the training draws.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tomllib
from collections import Counter
from pathlib import Path

import torch

from llmstack.architectures import build, load, pretrained, save  # noqa: F401  load is for who reads these
from llmstack.config import ModelConfig
from llmstack.execution import data, instructions, schedules, tasks
from llmstack.execution.generation import generate
from llmstack.execution.kneser_ney import KneserNey
from llmstack.execution.optimizers import adamw
from llmstack.execution.trainer import Trainer
from llmstack.ops.rope import rope_frequencies, rope_tables, rope_torch

HERE = Path(__file__).parent
LEARNT = dict(
    positions="learned", norm="layernorm", norm_bias=True, qkv_bias=True, out_bias=True, ffn_bias=True,
    activation="gelu_tanh", tied=True, n_heads=4, max_seq_len=128,
)  # fmt: skip
SHAPES = {
    "translation": dict(kind="encoder-decoder", model_type="t5", d_model=64, n_layers=2, **LEARNT),
    "summary": dict(kind="encoder-decoder", model_type="t5", d_model=64, n_layers=2, **LEARNT),
    "sentiment": dict(kind="encoder", model_type="bert", d_model=32, n_layers=2, **LEARNT),
    "extraction": dict(kind="encoder", model_type="bert", d_model=64, n_layers=2, **LEARNT | dict(positions="rope")),
    "generation": dict(model_type="gpt2", d_model=64, n_layers=2, **LEARNT),
    "addition": dict(model_type="gpt2", d_model=64, n_layers=2, **LEARNT),
    "shots": dict(d_model=64, n_layers=2, n_heads=4, d_ff=128, max_seq_len=64),
}
STEPS = dict(translation=900, summary=500, sentiment=300, extraction=1200, generation=800, addition=1000, shots=1500)
RATE = dict(extraction=2e-3, translation=2e-3, summary=2e-3)
WORDS, HELD_OUT, BATCH = 400, 400, 32

GOOD, BAD = set(tasks.OF["good"]), set(tasks.OF["bad"])
BARS = {  # answers that need no model
    "translation": {
        "copy": lambda e: e.source,
        "letters turned, words not": lambda e: " ".join(w[::-1] for w in e.target.split()),
    },
    "summary": {"as many first words": lambda e: " ".join(e.source.split()[: len(e.target.split())])},
    "sentiment": {
        "always good": lambda e: "good",
        "counting words": lambda e: "good" if sum((w in GOOD) - (w in BAD) for w in e.source.split()) > 0 else "bad",
    },
    "extraction": {
        "the first place": lambda e: e.source.split(" at ")[1].split(" .")[0],
        "a random place": lambda e: random.Random(e.source).choice(e.source.split(" at ")[1:]).split(" .")[0],
    },
}


def frequent(verses: list[str]) -> list[str]:
    """The commonest words: a summary is of verses that have no others."""
    return [w for w, _ in Counter(w for v in verses for w in v.split()).most_common(WORDS)]


def examples(task: str) -> tuple[list[tasks.Example], list[tasks.Example]]:
    """Training and held-out examples."""
    if task in ("translation", "generation"):
        train, held = ([v for v in tasks.verses(5, side) if v] for side in (False, True))
        make = tasks.cipher if task == "translation" else lambda text: tasks.Example("", text)
        if task == "generation":
            train, held = tasks.verses(12), tasks.verses(12, True)
        return [make(v) for v in train], [make(v) for v in held[:: len(held) // HELD_OUT]][:HELD_OUT]
    if task == "summary":
        words = set(frequent(tasks.verses(14)))
        sides = [
            [tasks.summary(v) for v in tasks.verses(14, side) if words >= set(v.split()) and len(v.split()) > 6]
            for side in (False, True)
        ]
        return sides[0], sides[1][:HELD_OUT]
    make, n = {"sentiment": (tasks.review, 4000), "extraction": (tasks.passage, 20000)}[task]
    rng = random.Random(0)
    train = [make(rng) for _ in range(n)]
    seen = {e.source for e in train}
    return train, [e for e in (make(rng) for _ in range(2 * HELD_OUT)) if e.source not in seen][:HELD_OUT]


def config(task: str, alphabet: tasks.Alphabet) -> ModelConfig:
    return ModelConfig(f"task-{task}", vocab_size=len(alphabet), **SHAPES[task])


def model_for(task: str, alphabet: tasks.Alphabet):
    shape = config(task, alphabet)
    return tasks.Reader(shape) if shape.kind == "encoder" else build(shape)


def alphabet_of(task: str, train: list[tasks.Example]) -> tasks.Alphabet:
    if task == "summary":
        return tasks.Alphabet([" ".join(sorted({w for e in train for w in e.source.split()}))], str.split)
    if task in ("sentiment", "extraction"):
        return tasks.Alphabet([e.source for e in train], str.split)
    if task == "addition":
        return tasks.Alphabet(["0123456789+=!? "])
    if task == "shots":
        return tasks.Alphabet([tasks.KEYS + tasks.VALUES])
    return tasks.Alphabet([tasks.SMALL])


def fit(model, batches, steps: int, lr: float = 3e-3, schedule=None, on_step=None) -> float:
    """Seconds that it took."""
    schedule = schedule or schedules.cosine(steps, warmup=min(50, steps // 4), floor=0.05)
    optimizer, began = adamw(dict(model.named_parameters()), lr, betas=(0.9, 0.98)), time.perf_counter()
    Trainer(model, batches, optimizer, schedule, tasks.LOSSES[model.config.kind], clip=1.0, on_step=on_step).run(steps)
    model.eval()
    return time.perf_counter() - began


def family(task: str, steps: int = 0) -> dict:
    """Train on one of the four tasks that have a metric; give its score and those of what needs no model."""
    train, held = examples(task)
    alphabet = alphabet_of(task, train)
    model = model_for(task, alphabet)
    rows = [tasks.encoded(e, alphabet, model.config.kind) for e in train]
    steps = steps or STEPS[task]
    seconds = fit(model, data.padded(rows, 2 * BATCH if task == "extraction" else BATCH), steps, RATE.get(task, 3e-3))
    got = tasks.answers(model, alphabet, [e.source for e in held], kind="span" if task == "extraction" else "")
    bars = {n: round(tasks.mean_score(task, [f(e) for e in held], held), 4) for n, f in BARS[task].items()}
    for e, g in zip(held[:4], got):
        print("   ", e.source, "|", g, "|", e.target)
    return dict(model=round(tasks.mean_score(task, got, held), 4), bars=bars, steps=steps, seconds=round(seconds))


def generation(task: str = "generation") -> dict:
    """Nats a letter on held-out verses, beside n-grams that counted the same verses."""
    train, held = examples(task)
    alphabet = alphabet_of(task, train)
    rows = [[tasks.encoded(e, alphabet, "decoder") for e in side] for side in (train, held)]
    model = model_for(task, alphabet)
    seconds = fit(model, data.padded(rows[0], BATCH), STEPS[task])
    with torch.no_grad():
        total, n = tasks.next_token(model, data.collate(rows[1]))
    ids = lambda side: [alphabet.encode(e.target) + [tasks.END] for e in side]
    bars = {f"{k}-gram": round(KneserNey(ids(train), len(alphabet), k).loss(ids(held)), 4) for k in (1, 2, 3, 4)}
    print("   ", tasks.answers(model, alphabet, ["and the lord ", "in the house "]))
    return dict(model=round(total.item() / n, 4), bars=bars, steps=STEPS[task], seconds=round(seconds))


# --- reasoning, shots, instructions, sizes


def sums(n: int, kinds: tuple[bool, ...], seed: int = 0) -> list[tasks.Example]:
    rng = random.Random(seed)
    return [tasks.addition(rng, steps=kinds[i % len(kinds)]) for i in range(n)]


def right(model, alphabet: tasks.Alphabet, steps: bool, n: int = 400) -> float:
    """The share of right sums. They are not among the training draws (checked), which cover 0.02 % of all pairs."""
    seen = {e.source[:-1] for e in sums(20000, (True,))} | {e.source[:-1] for e in sums(20000, (False, True))}
    held = [e for e in sums(n, (steps,), seed=1) if e.source[:-1] not in seen]
    got = tasks.answers(model, alphabet, [e.source for e in held], 56)
    return round(sum(g[-5:] == e.target[-5:] for g, e in zip(got, held)) / len(held), 4)


def addition(task: str = "addition") -> dict:
    """The same decoder on 64,000 sums: told alone, with their columns, or half of them each way (it is stored)."""
    alphabet, out = alphabet_of(task, []), {}
    for name, kinds, steps in (
        ("both", (False, True), 1000),
        ("steps", (True,), 1000),
        ("alone", (False,), 1000),
        ("alone, as many tokens", (False,), 3500),
    ):
        model = model_for(task, alphabet)
        rows = [tasks.encoded(e, alphabet, "decoder") for e in sums(20000, kinds)]
        seconds = fit(model, data.padded(rows, 64), steps)
        asked = {False: "?", True: "!"}
        out[name] = {f"asked with {asked[k]}": right(model, alphabet, k) for k in (False, True)}
        out[name] |= dict(sums=steps * 64, tokens=sum(map(len, (r["ids"] for r in rows))) * steps * 64 // len(rows))
        out[name] |= dict(seconds=round(seconds))
        print(name, out[name], flush=True)
        if name == "both":
            save(model, HERE / task)
        if name == "alone":  # tuned on steps afterwards
            rows = [tasks.encoded(e, alphabet, "decoder") for e in sums(20000, (True,))]
            fit(model, data.padded(rows, 64), 500)
            out["alone, then tuned on steps"] = dict(sums=500 * 64) | {
                f"asked with {asked[k]}": right(model, alphabet, k) for k in (False, True)
            }
            print(out["alone, then tuned on steps"], flush=True)
    return out


K = (0, 1, 2, 4, 8, 16)


@torch.no_grad()
def by_shots(model, ids: torch.Tensor) -> list[float]:
    """Accuracy of the value after K pairs; ids [B, 2n]."""
    hit = model(ids)[:, ::2].argmax(-1) == ids[:, 1::2]  # [B, n]
    return [round(hit[:, k].float().mean().item(), 4) for k in K]


@torch.no_grad()
def induction(model, ids: torch.Tensor) -> list[list[float]]:
    """For each layer and head: how much of a key's attention goes to what followed the same key before."""
    same = ids[:, :, None] == ids[:, None]  # [B, T, S]
    after = torch.zeros_like(same)
    after[:, :, 1:] = same[:, :, :-1]
    after &= torch.ones_like(after).tril()
    asks = after.any(-1) & (torch.arange(ids.shape[1]) % 2 == 0)  # [B, T]
    scores = []
    for block, x in zip(model.blocks, model.hidden_states(ids)):
        c, (q, k, _) = model.config, block.attention.project(block.norm1(x))
        turn = rope_tables(torch.arange(ids.shape[1]), rope_frequencies(c.d_head, c.rope_theta))
        q, k = (rope_torch(y.unflatten(-1, (-1, c.d_head)).transpose(1, 2), *turn) for y in (q, k))
        z = (q @ k.transpose(2, 3)) * c.attention_scale  # [B, H, T, S]
        p = z.masked_fill(~torch.ones_like(after).tril()[:, None], -torch.inf).softmax(-1)
        found = (p * after[:, None]).sum(-1).transpose(1, 2)[asks]  # [*, H]
        scores.append([round(v, 3) for v in found.mean(0).tolist()])
    return scores


def shots(task: str = "shots") -> dict:
    """A decoder of two layers that is to take a mapping from its context; tested on mappings that it never met."""
    alphabet, rng, steps = alphabet_of(task, []), random.Random(0), STEPS[task]
    draw = lambda n, new: torch.tensor([alphabet.encode(tasks.shots(rng, 24, new).target) for _ in range(n)])
    ids, held = draw(64 * steps, False), draw(1000, True)  # no sequence is seen twice
    model, curve = model_for(task, alphabet), {}

    def batch(step: int) -> data.Batch:
        rows = ids[64 * step : 64 * step + 64]
        targets = rows[:, 1:].clone()
        targets[:, 1::2] = data.IGNORE  # the keys are chance: nobody could know them
        return {"ids": rows[:, :-1], "targets": targets}

    def watch(record):
        if record["step"] % 50 == 49:
            curve[record["step"] + 1] = by_shots(model, held)
            print("   ", record["step"] + 1, round(record["loss"], 3), curve[record["step"] + 1], flush=True)

    seconds = fit(model, batch, steps, schedule=schedules.cosine(2000, warmup=50, floor=0.05), on_step=watch)
    save(model, HERE / task)
    ceiling = [round(1 - (7 / 8) ** (k + 1), 4) for k in K]  # seen before, or else one guess in eight
    return dict(
        shots=list(K), accuracy=by_shots(model, held), ceiling=ceiling, heads=induction(model, held[:200]),
        seconds=round(seconds), steps=list(curve), after_8=[row[4] for row in curve.values()],
    )  # fmt: skip


def few_shot(model, tokenizer, pairs: list[list[str]], k: int, n: int = 20) -> float:
    """The share of n queries "left ->" that a model completes with the right word, after k other pairs."""
    rng, hits = random.Random(k), 0
    for query in pairs[:n]:
        lines = [f"{a} -> {b}\n" for a, b in rng.sample([p for p in pairs if p is not query], k)]
        ids = tokenizer.encode("".join(lines) + f"{query[0]} ->", special=False)
        want = tokenizer.encode(f" {query[1]}", special=False)
        with torch.no_grad():
            said = model(torch.tensor([ids + want[:-1]]), keep=len(want))[0].argmax(-1).tolist()
        hits += said == want
    return hits / n


def pairs(name: str) -> list[list[str]]:
    return [p.split() for p in tasks.OF["pairs"][name].split(",")]


def smollm2(task: str = "") -> dict:
    model, tokenizer = pretrained("smollm2-135m")
    ks = (0, 1, 2, 4, 8)
    return dict(shots=list(ks)) | {n: [few_shot(model, tokenizer, pairs(n), k) for k in ks] for n in tasks.OF["pairs"]}


def obeys(model, tokenizer, phrasings: list[str], n: int = 200) -> float:
    """The share of right answers to requests in these phrasings."""
    rng, rows = random.Random(1), []
    for asked, answer in (instructions.request(rng, phrasings) for _ in range(n)):
        text = tokenizer.apply_chat_template([asked])
        rows.append((tokenizer.encode(text, special=False), answer["content"]))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([[tokenizer.pad] * (longest - len(row)) + row for row, _ in rows])
    out = generate(model, ids, 8, tokenizer.eos, padding=ids != tokenizer.pad)
    return sum(tokenizer.decode(o[longest:]) == w for o, (_, w) in zip(out, rows)) / n


def tuned(phrasings: int, steps: int = 200) -> dict:
    """llama-2m tuned on requests in the first so many phrasings; what it gets right in those, and in unseen ones."""
    model, tokenizer = pretrained("llama-2m")
    tokenizer.chat_template = instructions.TEMPLATE
    of, rng = tasks.OF, random.Random(0)
    out = dict(unseen_before=obeys(model, tokenizer, of["unseen"]))
    asked = [instructions.request(rng, of["seen"][:phrasings]) for _ in range(4000)]
    rows = [instructions.conversation(tokenizer, messages) for messages in asked]
    seconds = fit(model, data.padded(rows, 16), steps, 1e-3)
    out |= dict(seen=obeys(model, tokenizer, of["seen"][:phrasings]), unseen=obeys(model, tokenizer, of["unseen"]))
    print("   ", phrasings, out, flush=True)
    return out | dict(steps=steps, seconds=round(seconds))


def instruct(task: str = "") -> dict:
    return {f"phrasings_{n}": tuned(n) for n in (6, 1, 3)}


def sweep(task: str = "") -> dict:
    """Decoders of three widths on verses, each run with a schedule of its own length: nats a letter, held out."""
    train, held = examples("generation")
    alphabet = alphabet_of("generation", train)
    text = lambda side: torch.tensor([i for e in side for i in (tasks.START, *alphabet.encode(e.target))])
    stream, test = text(train), data.windows(text(held), 64, 300)(0)
    out = dict(runs=[])
    for d, lengths in ((32, (50, 100, 200, 400, 800, 1600)), (64, (50, 100, 200, 400)), (128, (25, 50, 100))):
        for steps in lengths:
            shape = SHAPES["generation"] | dict(d_model=d, max_seq_len=64)
            model = build(ModelConfig(f"width-{d}", vocab_size=len(alphabet), **shape))
            fit(model, data.windows(stream, 64, BATCH), steps)
            with torch.no_grad():
                total, n = tasks.next_token(model, test)
            matrices = sum(p.numel() for name, p in model.named_parameters() if "blocks" in name)
            run = dict(d_model=d, params=matrices, tokens=steps * BATCH * 64, loss=round(total.item() / n, 4))
            out["runs"].append(run | dict(flops=6 * matrices * run["tokens"]))
            print("   ", out["runs"][-1], flush=True)
    return out


OTHERS = dict(
    generation=generation, addition=addition, shots=shots, smollm2=smollm2, instructions=instruct, sweep=sweep
)


def write(results: dict) -> None:
    """JSON's numbers, texts and lists are TOML's too; a mapping becomes a table."""
    lines = ["# Made by data/tasks/train.py, which says what the numbers are."]
    for task, result in sorted(results.items()):
        plain = {k: v for k, v in result.items() if not isinstance(v, dict)}
        for name, part in [("", plain), *((f".{json.dumps(k)}", v) for k, v in result.items() if isinstance(v, dict))]:
            lines += ["", f"[{task}{name}]"] if part else []
            for key, value in part.items():
                if isinstance(value, list) and value and isinstance(value[0], dict):
                    inner = (", ".join(f"{k} = {json.dumps(v)}" for k, v in row.items()) for row in value)
                    lines += [f"{key} = [", *(f"    {{ {row} }}," for row in inner), "]"]
                else:
                    lines.append(f"{json.dumps(key)} = {json.dumps(value)}")
    (HERE / "results.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="the tasks; all where none is given")
    every = [*dict.fromkeys([*BARS, *OTHERS])]
    torch.set_num_threads(1)
    for task in parser.parse_args().what or every:
        if task not in every:
            parser.error(f"no task {task!r}; there are {', '.join(every)}")
        result = OTHERS.get(task, family)(task)
        print(task, result, flush=True)
        path = HERE / "results.toml"
        write((tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}) | {task: result})


if __name__ == "__main__":
    main()
