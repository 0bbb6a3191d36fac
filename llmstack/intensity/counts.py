"""What a pass of a model computes and moves, under a convention: its operations priced in operations and bytes.

    terms(config, batch, tokens, phase, …)     every operation of the pass with its operations and bytes
    flops(…), traffic(…)                       their sums          by_part(terms)    summed by part of the model

    phase             what runs                                                                    operations a weight
    forward, prefill  `tokens` new tokens a sequence, `context` before them in a cache             2 a token
    decode            one token a sequence, which sees `tokens` of them, itself included           2
    generate          `tokens` tokens one after the other from nothing                             2 a token
    backward          gradients of the inputs and of the weights: two matmuls for each of forward  4 a token
    train             forward and backward, and with recompute="full" the blocks' forward again    6, 8 a token

Matmul Y [M, N] = X [M, K] W [K, N]: 2 M K N operations (a multiply and an add are two); X and W are read and Y is
written, each once. Backward reads dY, W and dY, X and writes dX and dW. Where W is frozen (LoRA's base) there is no dW,
and training costs 4 operations a weight and token in place of 6.

Sources: Kim et al. 2023, arXiv:2302.14017, section 2; Narayanan et al. 2021, arXiv:2104.04473, appendix; Korthikanti et
al. 2022, arXiv:2205.05198; Dao 2023, arXiv:2307.08691, section 4.1 (a fused backward makes the scores again).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from llmstack.config import RECOMPUTE, ModelConfig
from llmstack.intensity.operations import Op, forward_ops

PHASES = ("forward", "prefill", "decode", "generate", "backward", "train")
ENDS = ("embedding", "head", "final norm")
SCORES = ("attention", "softmax")


@dataclass(frozen=True)
class Convention:
    """How a paper counts. bytes: of a value. work: operations a value of what is no matmul; what is absent costs none.

    exact_adds: an inner product of n values is n multiplications and n - 1 additions where no bias makes it n.
    scores: attention scores travel to memory and back (False: FlashAttention keeps them on the chip).
    allowed: only pairs of a query and a key that the mask allows are counted; otherwise all, as most papers do.
    biases: their bytes are counted. joined: a post-norm block's norm does not read one of the sums before it again.
    """

    name: str = "2 MAC, 16 bits"
    bytes: float = 2.0
    work: Mapping[str, float] = field(default_factory=dict, hash=False)
    exact_adds: bool = False
    scores: bool = True
    allowed: bool = False
    biases: bool = True
    joined: bool = False


USUAL = Convention()
FUSED = Convention("2 MAC, 16 bits, fused attention", scores=False)
# Kim et al. print what is no matmul as one row, "other". Its three printed operation counts are met by 4 a score and 58
# a value of the residual stream; how these 58 divide between activation (4 wide), two norms and two sums is our choice.
# `joined` is read off the printed bytes as well: BERT's are one value a token and layer fewer than GPT-2's.
KIM_WORK = dict(softmax=4, activation=10, norm=8, add=1)
KIM = Convention("Kim et al. 2023, 8 bits", 1.0, KIM_WORK, exact_adds=True, biases=False, joined=True)


@dataclass(frozen=True)
class Term:
    """The price of one operation, or of several: operations, and bytes of weights, activations and cache."""

    part: str
    name: str
    flops: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    cache_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """Operations a byte; 0 where no byte moves."""
        return self.flops / self.bytes if self.bytes else 0.0

    def times(self, n: float) -> Term:
        return replace(self, **{f.name: n * getattr(self, f.name) for f in fields(self) if f.type == "float"})


def total(terms: Iterable[Term], part: str = "total", name: str = "") -> Term:
    """One Term for many."""
    out: dict[str, float] = {f.name: 0.0 for f in fields(Term) if f.type == "float"}
    for term in terms:
        for key in out:
            out[key] += getattr(term, key)
    return Term(part, name, **out)


def by_part(terms: Iterable[Term]) -> dict[str, Term]:
    """Summed by part, in the order of a pass."""
    parts: dict[str, list[Term]] = {}
    for term in terms:
        parts.setdefault(term.part, []).append(term)
    return {part: total(of, part) for part, of in parts.items()}


def terms(
    config: ModelConfig,
    batch: int = 1,
    tokens: int = 1,
    phase: str = "forward",
    convention: Convention = USUAL,
    *,
    context: int = 0,
    source: int = 0,
    frozen: bool = False,
    recompute: str = "none",
) -> list[Term]:
    """Every operation of a phase (table above) with its price.

    source: tokens that the encoder of an encoder-decoder reads. frozen: weights get no gradient. recompute: "selective"
    makes the attention scores again in backward (Korthikanti et al.), "full" everything in the blocks. Raises
    ValueError.
    """
    check(config, batch, tokens, phase, context, source, recompute)
    run = lambda *span: forward_ops(config, *span, source, convention.allowed)
    if phase == "decode":
        return [_forward(op, config, convention) for op in run(batch, 1, tokens - 1)]
    if phase == "generate":
        return _generate(config, run, batch, tokens, convention)
    ops = run(batch, tokens, context)
    priced: list[Term] = []
    if phase != "backward":
        priced += [_forward(op, config, convention) for op in ops]
    if phase in ("backward", "train"):
        back = [_backward(op, config, convention, frozen) for op in ops]
        priced += back if phase == "backward" else [replace(term, name=f"{term.name}, backward") for term in back]
        again = [op for op in ops if _made_again(op, recompute)]
        priced += [replace(_forward(op, config, convention), name=f"{op.name}, again") for op in again]
    return priced


def flops(
    config: ModelConfig, batch: int = 1, tokens: int = 1, phase: str = "forward", convention=USUAL, **how
) -> float:
    """Operations of a phase; arguments as `terms` takes them."""
    return total(terms(config, batch, tokens, phase, convention, **how)).flops


def traffic(
    config: ModelConfig, batch: int = 1, tokens: int = 1, phase: str = "forward", convention=USUAL, **how
) -> Term:
    """Bytes of a phase, of weights, activations and cache (and its operations): `.bytes`, `.intensity`."""
    return total(terms(config, batch, tokens, phase, convention, **how), phase, config.name)


def check(config, batch, tokens, phase, context=0, source=0, recompute="none") -> None:
    """Raises ValueError where `terms` does not take these."""
    if phase not in PHASES:
        raise ValueError(f"phase = {phase!r}, but it must be one of {', '.join(PHASES)}")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute = {recompute!r}, but it must be one of {', '.join(RECOMPUTE)}")
    for name, value in dict(batch=batch, tokens=tokens, context=context, source=source).items():
        least = int(name in ("batch", "tokens"))
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} = {value!r}, but it must be a whole number, at least {least}")
    if (config.kind == "encoder-decoder") != bool(source):
        raise ValueError(
            f"source = {source}: an encoder-decoder reads one or more tokens, {config.name} is a {config.kind}"
        )
    if phase in ("decode", "generate") and config.kind == "encoder":
        raise ValueError(f"{config.name} is an encoder and generates nothing; take phase 'forward'")
    if context and phase not in ("forward", "prefill"):
        raise ValueError(f"context = {context} belongs to forward and prefill; in decode, `tokens` counts it in")


def _forward(op: Op, config: ModelConfig, c: Convention) -> Term:
    moved = op.reads - op.cached + op.outputs - (0 if c.scores else op.on_chip)
    if c.joined and op.name == "norm" and config.norm_place == "post":
        moved -= op.outputs / 2  # two norms a block, one of which finds its input at hand
    return Term(op.part, op.name, _work(op, c), *(c.bytes * v for v in (_weights(op, c), moved, op.cached)))


def _backward(op: Op, config: ModelConfig, c: Convention, frozen: bool) -> Term:
    """dX and dW, each as much work as forward; of an operation without weights the gradients of both operands."""
    moved = op.outputs + 2 * op.reads - (0 if c.scores else (1.5 if op.name == "q k" else 1) * op.on_chip)
    if not op.inner:
        return Term(op.part, op.name, _work(op, c), c.bytes * _weights(op, c), c.bytes * moved)
    only_inputs = frozen and op.weights > 0
    work = 1 if only_inputs else 2 + (op.name == "q k" and not c.scores)  # a fused kernel makes the scores again
    moved = op.outputs + op.reads if only_inputs else moved + op.outputs
    held = _weights(op, c) * (1 if only_inputs else 2)
    return Term(op.part, op.name, work * _work(op, replace(c, exact_adds=False)), c.bytes * held, c.bytes * moved)


def _generate(config: ModelConfig, run, batch: int, tokens: int, c: Convention) -> list[Term]:
    """The sum over contexts 0 … tokens - 1. Bytes and operations grow evenly with the context, but where a window ends
    or latent attention absorbs: those steps are summed one by one."""
    if config.kv_lora_rank or config.sliding_window or config.kind == "encoder-decoder":
        steps = [[_forward(op, config, c) for op in run(batch, 1, before)] for before in range(tokens)]
        rows: dict[tuple[str, str], list[Term]] = {}
        for term in (term for step in steps for term in step):
            rows.setdefault((term.part, term.name), []).append(term)
        return [total(of, *key) for key, of in rows.items()]
    return [_forward(op, config, c).times(tokens) for op in run(batch, 1, (tokens - 1) / 2)]


def _made_again(op: Op, recompute: str) -> bool:
    scores = op.part.removeprefix("encoder ").removeprefix("decoder ").removeprefix("cross ") in SCORES
    return op.part not in ENDS if recompute == "full" else recompute == "selective" and scores


def _weights(op: Op, c: Convention) -> float:
    return op.weights + (op.biases if c.biases else 0)


def _work(op: Op, c: Convention) -> float:
    if not op.inner:
        return op.outputs * c.work.get(op.name, 0)
    return op.outputs * (2 * op.inner - (c.exact_adds and not op.weights))
