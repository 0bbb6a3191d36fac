"""Where the time of a pass goes, operation by operation, measured and predicted.

    timed(config, batch, tokens, phase)     the same of a model with random weights, each operation at its fastest
    with Timing() as t: model(ids)          t.rows: every operation with its operations, bytes and seconds
    t.shares()                              of the time: linear, attention, the rest
    predict(rows, roof)                     measured over predicted seconds of each

A clock around each operation costs some microseconds of its own, so that many small operations look slower than they
are; large ones do not. Seconds are wall time of this process on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from llmstack.architectures import build
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.ssm import StateCache
from llmstack.config import ModelConfig
from llmstack.intensity.roof import Point, Roofline
from llmstack.intensity.trace import Row, Trace


@dataclass(frozen=True)
class Timed(Row):
    """A traced operation with the seconds that it took."""

    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """ "linear", "attention" (its two matmuls, fused or not) or "other"."""
        if "_scaled_dot_product" in self.name or "bmm" in self.name or "softmax" in self.name:
            return "attention"
        return "linear" if self.flops else "other"

    @property
    def point(self) -> Point:
        return Point(self.name.removeprefix("aten.").rpartition(".")[0], self.flops, self.bytes, self.seconds)


class Timing(Trace):
    """A Trace with a clock."""

    def run(self, func, args, kwargs):
        began = time.perf_counter()
        out = func(*args, **kwargs)
        self.last = time.perf_counter() - began
        return out

    def row(self, *what) -> Timed:
        return Timed(*what, self.last)

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    def shares(self) -> dict[str, float]:
        """Of the time in all operations that make a tensor."""
        kinds = dict.fromkeys(("linear", "attention", "other"), 0.0)
        for row in self.rows:
            kinds[row.kind] += row.seconds
        return {kind: spent / self.seconds for kind, spent in kinds.items()}


def timed(config: ModelConfig, batch: int = 1, tokens: int = 1, phase: str = "forward", runs: int = 5) -> Timing:
    """A forward pass, or "decode": a token that sees `tokens`, itself included, in a cache. Each operation is given the
    fastest of `runs`, after one that is not counted. Raises ValueError."""
    phases = {"encoder": ["forward"], "decoder": ["forward", "decode"]}.get(config.kind, [])
    if phase not in phases or min(batch, tokens, runs) < 1:
        given = f"phase {phase!r}, {config.kind}, batch {batch}, {tokens} tokens, {runs} runs"
        raise ValueError(f"{given}: timed runs 'forward' of an encoder or a decoder or 'decode' of a decoder, all >= 1")
    model, how, timings, new = build(config), {}, [], 1 if phase == "decode" else tokens
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    with torch.no_grad():
        if phase == "decode":
            how["cache"] = StateCache(config, batch) if config.d_state else ContiguousCache(config, batch, tokens)
            if tokens > 1:
                model(ids[:, 1:], **how)
        for _ in range(runs + 1):
            if how:
                how["cache"].length = tokens - 1
            with Timing() as timing:
                model(ids[:, :new], **how)
            timings.append(timing)
    return fastest_of(timings[1:])


def fastest_of(timings: list[Timing]) -> Timing:
    """Of timings of one and the same pass: each operation at its fastest, which what else runs has disturbed least."""
    best = Timing()
    best.rows = [min(same, key=lambda row: row.seconds) for same in zip(*(t.rows for t in timings), strict=True)]
    return best


def predict(rows: Iterable[Timed], roof: Roofline) -> list[tuple[Timed, float]]:
    """Each operation with its measured seconds over those that the roof allows: 1 is at the roof, 2 takes twice as
    long. Below 1, operands were still in a cache."""
    return [(row, row.seconds / roof.seconds(row.point)) for row in rows if row.bytes]
