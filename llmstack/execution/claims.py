"""What the surveys claim about training, generation and retrieval, recomputed. data/claims.toml names the functions."""

from random import Random

import numpy as np
import torch

from llmstack import facts
from llmstack.architectures import load, pretrained
from llmstack.config import preset
from llmstack.execution.generation import Decoding, generate
from llmstack.execution.numpy_gpt import Counted, init, loss_and_gradients
from llmstack.execution.optimizers import lamb, lars, norm, sgd
from llmstack.execution.precision import OPERANDS, Precision, rounded
from llmstack.execution.schedules import cosine
from llmstack.execution.tasks import Alphabet, addition, answers
from llmstack.facts import Computed

OPENING = "And the king said unto the people"


def compute_is_six_n_d() -> Computed:
    """AC-08: counted operations of a training step over 6 N D, as the width h grows past the length s = 16."""
    ratios, tokens = {}, np.arange(17)[None] % 32
    for h in (32, 128, 512):
        config = preset("gpt2").with_(d_model=h, n_layers=2, n_heads=4, vocab_size=32, max_seq_len=16)
        w = init(config)
        matrices = sum(a.size for name, a in w.items() if a.ndim == 2 and "positions" not in name)
        loss_and_gradients(tokens[:, :-1], tokens[:, 1:], Counted.of(w), config)
        ratios[h] = Counted.operations / (6 * matrices * 16)
    chinchilla = 6 * 70e9 * 1.4e12
    shown = ", ".join(f"h = {h}: {r:.4f}" for h, r in ratios.items())
    says = f"counted / 6 N D at s = 16, {shown}; Chinchilla's 70e9 × 1.4e12 tokens give {chinchilla:.3g} operations"
    return Computed(ratios[512], "of 6 N D", says)


def layerwise_optimizers() -> Computed:
    """AC-16: how unequal a step ‖Δw‖ / ‖w‖ is between three layers: largest over smallest."""
    spread = {}
    for name, make in (("SGD", sgd), ("SGD with cosine decay", sgd), ("LARS", lars), ("LAMB", lamb)):
        draw = np.random.default_rng(0)
        w = {str(i): draw.normal(size=(8, 8)) * 10**i for i in range(3)}
        before = {n: a.copy() for n, a in w.items()}
        lr = 1e-3 * (cosine(100)(50) if "cosine" in name else 1)
        make(w, lr=lr).step({n: draw.normal(size=a.shape) for n, a in w.items()})
        moved = [norm(w[n] - before[n]) / norm(before[n]) for n in w]
        spread[name] = max(moved) / min(moved)
    shown = ", ".join(f"{name} {s:.3g}" for name, s in spread.items())
    return Computed([spread["LARS"], spread["LAMB"]], "largest / smallest ‖Δw‖/‖w‖ of three layers", shown)


def transformer_engine_is_fp8() -> Computed:
    """BC-18: the share of a linear's small gradients that E5M2 loses, as they are and with a scale for each tensor."""
    dy = 1e-7 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    layer, precision, x = torch.nn.Linear(16, 32, bias=False), Precision("fp8"), torch.ones(64, 16, requires_grad=True)
    for _ in range(2):  # the first pass finds the scales
        x.grad = None
        with precision.forward(layer):
            layer(x).backward(dy)
    lost = [float((g == 0).float().mean()) for g in (rounded(dy, "e5m2"), x.grad)]
    formats = ", ".join(f"{name} {format.upper()}" for name, format in OPERANDS.items())
    says = f"operands {formats}, the rest 16 bits; of gradients of 1e-7, {lost[0]:.0%} are lost without scales"
    return Computed(lost, "of the gradients lost without and with scales", f"{says}, {lost[1]:.0%} with them")


@torch.no_grad()
def inference_in_parallel() -> Computed:
    """AC-21: tokens a pass, where one at a time would choose the same: a prompt, a batch, six drafted tokens."""
    model, tokenizer = pretrained("llama-2m")
    T = (ids := torch.tensor([tokenizer.encode(OPENING)])).shape[1]
    written, one = generate(model, ids, 6), Decoding(model, ids, 6)
    choices = torch.stack([one(written[:, t : t + 1]).argmax(-1) for t in range(T + 6)], 1)  # [1, T + 6]
    prefill = (model(ids).argmax(-1) == choices[:, :T]).sum()
    batch = (Decoding(model, ids.expand(4, -1), 6)(ids.expand(4, -1)).argmax(-1) == choices[:, T - 1]).sum()
    verify = Decoding(model, ids, 6)
    verify(ids)
    drafted = (model(written[:, T:], cache=verify.cache).argmax(-1) == choices[:, T:]).sum()
    says = f"{prefill} of {T} prompt tokens, {batch} of 4 rows, {drafted} of 6 drafted tokens"
    counts = [int(prefill), int(batch), int(drafted)]
    return Computed(counts, "tokens a pass", f"in one pass, as one at a time chooses: {says}")


@torch.no_grad()
def inputs_with_cache() -> Computed:
    """AC-22: how many tokens each pass of generate gets, with the cache, for a prompt and four new ones."""
    model, tokenizer = pretrained("llama-2m")
    ids, widths = torch.tensor([tokenizer.encode(OPENING)]), []
    hook = model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    generate(model, ids, 4)
    hook.remove()
    return Computed(widths, "tokens a pass", f"{widths[0]} in the prefill, then {', '.join(map(str, widths[1:]))}")


def steps_are_asked_for() -> Computed:
    """AC-17: one trained model's share of right sums, asked for the sum alone and for the steps before it."""
    model, share = load(facts.data_path() / "tasks" / "addition").eval(), []
    for steps in (False, True):
        examples = [addition(Random(10_000 + i), steps=steps) for i in range(100)]
        said = answers(model, Alphabet(["0123456789+=!? "]), [e.source for e in examples], 56)
        share.append(sum(s[-5:] == e.target[-5:] for s, e in zip(said, examples)) / 100)
    tuned = facts.table("tasks/results")["addition"]
    before, after = (tuned[name]["asked with !"] for name in ("alone", "alone, then tuned on steps"))
    says = "the same weights, right sums without and with steps: {:.0%} and {:.0%}".format(*share)
    says += f"; a model of plain sums before and after tuning on steps: {before:.0%} and {after:.0%}"
    return Computed(share, "of 100 sums", says)


def smaller_on_more_tokens() -> Computed:
    """AC-07: nats a letter at width 128, and at half of it (a quarter of the weights) on four times the letters."""
    runs = facts.table("tasks/results")["sweep"]["runs"]
    wide = max((r for r in runs if r["d_model"] == 128), key=lambda r: r["tokens"])
    narrow = {r["tokens"]: r["loss"] for r in runs if r["d_model"] == 64}
    pair = [wide["loss"], narrow[4 * wide["tokens"]]]
    more = ", ".join(f"{n:,} letters {loss:.3f}" for n, loss in sorted(narrow.items()))
    return Computed(pair, "nats a letter", f"equal operations, width 128 and 64: {pair}; width 64 alone, {more}")


def rag_answers() -> Computed:
    """BC-16: the share of facts that a small model gets right without and with the sentence that retrieval finds."""
    asked = facts.table("retrieval/rag")["asked"]
    score = {how: sum(row[how]["right"] for row in asked) for how in ("alone", "with_1", "with_3")}
    found, n = sum(row["found"] for row in asked), len(asked)
    text = f"SmolLM2-135M answers {score['alone']} of {n} facts from its weights, {score['with_1']} with the sentence "
    text += f"found first and {score['with_3']} with three; the right sentence came first {found} times"
    return Computed([score["alone"] / n, score["with_1"] / n], "of the answers", text)
