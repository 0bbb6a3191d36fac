"""What a real forward or backward pass does, operation by operation, as PyTorch dispatches it: the count that checks
`counts`, from the model's own code in place of its dials.

    with Trace() as t: model(ids)          t.flops, t.bytes, t.rows, t.matmuls()
    traced(config, batch, tokens, phase)   the same over a model on the meta device: shapes without data, so that 405
                                           billion parameters cost nothing

A matmul costs two operations for each multiply and add; nothing else is counted as operations. Every operation that
makes a new tensor reads its operands and writes its result, each once, at the width of their dtype: what an eager
framework moves. Views are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmstack.architectures import build
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.ssm import StateCache
from llmstack.config import ModelConfig
from llmstack.intensity.counts import check

aten = torch.ops.aten
MATMULS = {aten.mm.default: 0, aten.mm.out: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default)


@dataclass(frozen=True)
class Row:
    """One dispatched operation: its name, operations, bytes, and the shapes of its operands and its result."""

    name: str
    flops: int
    bytes: int
    shapes: tuple[tuple[int, ...], ...]


class Trace(TorchDispatchMode):
    """Counts while it is entered. On the meta device nobody knows which experts a token chooses: their load is even."""

    def __init__(self):
        super().__init__()
        self.rows: list[Row] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.bincount.default and args[0].is_meta:
            return even(args[0].numel(), kwargs.get("minlength", args[2] if len(args) > 2 else 0))
        out = self.run(func, args, kwargs)
        if func.is_view or func in (aten.detach.default, aten._unsafe_view.default, aten.alias.default):
            return out
        given, made = tensors((args, {k: v for k, v in kwargs.items() if k != "out"})), tensors(out)
        if given:
            shapes = tuple(tuple(x.shape) for x in (*given, *made))
            read = made + given[1:] if func in LOOKUPS else given  # of a table, what is taken out of it
            self.rows.append(self.row(str(func), work(func, args, given, made), sum(map(nbytes, read + made)), shapes))
        return out

    def run(self, func, args, kwargs):
        return func(*args, **kwargs)

    def row(self, *what) -> Row:
        return Row(*what)

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.rows)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def matmuls(self) -> Iterator[Row]:
        return (row for row in self.rows if row.flops)


def tensors(tree) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def work(func, args: tuple, given: list[Tensor], made: list[Tensor]) -> int:
    """2 M K N of a matmul [.., M, K] x [.., K, N], of fused attention's two and of a convolution's one; 0 of others."""
    if func in MATMULS:
        a, b = given[MATMULS[func] :][:2]
        return 2 * a.numel() * b.shape[-1]
    if func in (aten.convolution.default, aten.convolution_backward.default):  # an inner product for each output
        backward = func is aten.convolution_backward.default
        outputs, products = (given[0], sum(args[-1][:2])) if backward else (made[0], 1)  # args[-1]: dX, dW, db wanted?
        weight = given[2 if backward else 1]  # [out, in, width]
        return 2 * products * outputs.numel() * weight[0].numel()
    if "_scaled_dot_product" in func.name():  # all pairs, masked ones too
        q, k, v = given[:3]  # [B, H, T, Dh], [B, K, S, Dh], [B, K, S, Dv]
        return 2 * q[..., 0].numel() * k.shape[-2] * (k.shape[-1] + v.shape[-1])
    return 0


def nbytes(x: Tensor) -> int:
    """Of the values that are stored: a broadcast axis (stride 0) is stored once."""
    return x.element_size() * math.prod(n for n, step in zip(x.shape, x.stride()) if step or n < 2)


def even(rows: int, experts: int) -> Tensor:
    """How many of `rows` each of `experts` gets when they are spread evenly."""
    return torch.tensor([rows // experts + (e < rows % experts) for e in range(experts)])


def traced(
    config: ModelConfig, batch: int = 1, tokens: int = 1, phase: str = "forward", source: int = 0, dtype=torch.float32
) -> Trace:
    """A forward pass, or "train": forward and backward of every logit (or state), or "decode": a token that sees
    `tokens`, itself included, in a decoder's cache. Experts have room for all. Raises ValueError."""
    check(config, batch, tokens, phase, source=source)
    if phase not in ("forward", "train", "decode") or phase == "decode" and config.kind != "decoder":
        given = f"phase = {phase!r} of a model of kind {config.kind}"
        raise ValueError(f"{given}: a trace runs 'forward', 'train' or, of a decoder, 'decode'")
    where = dict(device="meta", dtype=dtype)
    model, trace = build(config.with_(expert_capacity=0), **where), Trace()
    ids = lambda n: torch.zeros(batch, n, dtype=torch.long, device="meta")
    heard = torch.zeros(batch, config.n_mels, 2 * source, **where) if config.n_mels else ids(source)
    with torch.set_grad_enabled(phase == "train"):
        if phase == "decode":
            state = StateCache(config, batch, **where) if config.d_state else None
            cache = state or ContiguousCache(config, batch, tokens, **where)
            cache.length = tokens - 1
            with trace:
                model(ids(1), cache=cache)
            return trace
        with trace:
            out = model(heard, ids(tokens)) if source else model(ids(tokens))
            if phase == "train":
                out.backward(torch.empty_like(out))
    return trace
