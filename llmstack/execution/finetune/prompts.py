"""Prompts that are learned: ℓ vectors before the input of a frozen decoder, at its embedding or in every layer.

    prompt         P [ℓ, D] before the token embeddings: ℓ D values            Lester et al. 2021, arXiv:2104.08691
    p-tuning       P = MLP(LSTM(E)) or MLP(E)                                  Liu et al. 2021, arXiv:2103.10385
    prefix         keys and values of each layer, [ℓ, 2 L K Dh] = MLP(E)       Li and Liang 2021, arXiv:2101.00190
    p-tuning-v2    the same, trained themselves                                Liu et al. 2021, arXiv:2110.07602

What E goes through serves training alone: `materialise` keeps its result. Tokens stand behind the prompt: their
positions begin at ℓ. Keys of a prefix are what a cache would hold, rotation included; both start as what the model
makes of the tokens `ids`, or of ℓ drawn ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from llmstack.architectures.cache import Cache, ContiguousCache, positions_of
from llmstack.architectures.ends import check_ids
from llmstack.execution.finetune.base import Tuned, freeze
from llmstack.ops.attention import attention_torch


class Prompt(nn.Module):
    """The learned rows [ℓ, width]: what an encoder makes of a table; without layers, the table."""

    def __init__(self, table: Tensor, encoder: Sequence[nn.Module] = ()):
        super().__init__()
        self.table, self.encoder = nn.Parameter(table), nn.Sequential(*encoder)

    def forward(self) -> Tensor:
        return self.encoder(self.table)


class Recurrent(nn.LSTM):
    """An LSTM that passes on its outputs alone, [ℓ, in] -> [ℓ, 2 hidden]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


@dataclass
class Prefixed:
    """A cache with learned keys and values, prefix [L, 2, K, ℓ, Dh], before those of another cache or of none."""

    prefix: Tensor
    cache: Cache | None

    @property
    def length(self) -> int:
        return self.prefix.shape[3] + (self.cache.length if self.cache is not None else 0)

    def advance(self, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, at = self.prefix.shape[3], positions_of(real)
        queries, keys, real = (at, at, real) if self.cache is None else self.cache.advance(real)
        own = torch.arange(n, device=real.device).expand(len(real), n)
        return queries + n, torch.cat([own, keys + n], 1), pad(real, (n, 0), value=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
        both = (k, v) if self.cache is None else self.cache.update(layer, k, v)
        own = self.prefix[layer, :, None].expand(-1, len(q), -1, -1, -1)  # [2, B, K, ℓ, Dh]
        return attention_torch(q, *(torch.cat(pair, 2) for pair in zip(own, both)), **how)


def prompt(model: nn.Module, length=20, ids=None, encoder="", hidden=0, layers=2, seed=0) -> Tuned:
    """Train ℓ vectors before the token embeddings; as they are, or through an encoder of inner width `hidden` (0: D):
    "lstm", both ways in `layers` layers and an MLP behind, or "mlp"."""
    rows = model.embed.tokens.weight[_start(model, length, ids, seed)[0]].detach()  # [ℓ, D]
    d, h = rows.shape[1], hidden or rows.shape[1]
    dense = lambda *widths: [m for pair in zip(widths, widths[1:]) for m in (nn.Linear(*pair), nn.ReLU())][:-1]
    lstm = lambda: [Recurrent(d, h, layers, bidirectional=True), *dense(2 * h, 2 * h, d)]
    if encoder not in (encoders := {"": tuple, "lstm": lstm, "mlp": lambda: dense(d, h, h, d)}):
        raise ValueError(f"encoder = {encoder!r}, but a prompt is encoded by 'lstm' or 'mlp', or '' as it is")
    return _install(model, rows, encoders[encoder], _at_embedding, seed)


def p_tuning_v2(model: nn.Module, length=20, ids: Sequence[int] | None = None, hidden=0, seed=0) -> Tuned:
    """Train ℓ keys and values in each layer; with `hidden`, through an MLP of that inner width from a table [ℓ, K Dh].

    Prefix tuning is this with an MLP, without which its paper found training unstable.
    """
    c, start = model.config, _start(model, length, ids, seed)
    cache = ContiguousCache(c, 1, start.shape[1], start.device, model.embed.tokens.weight.dtype)
    with torch.no_grad():
        model(start, cache=cache, keep=1)
    rows = torch.cat([cache.k, cache.v], 1).permute(3, 0, 1, 2, 4).flatten(1)  # [ℓ, 2 L K Dh]
    wide, d = rows.shape[1], c.n_kv_heads * c.d_head
    mlp = lambda: (nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, wide))
    return _install(model, rows[:, :d] if hidden else rows, mlp if hidden else tuple, _in_layers, seed)


p_tuning = partial(prompt, encoder="lstm")
prefix = partial(p_tuning_v2, hidden=512)


def materialise(tuned: Tuned) -> Tuned:
    """After training: keep what the encoder makes, and let the encoder go. The model's outputs stay."""
    tuned.model.prompt = Prompt(tuned.model.prompt().detach().clone())
    return Tuned(tuned.model)


def _start(model: nn.Module, length: int, ids: Sequence[int] | None, seed: int) -> Tensor:
    """The ids [1, ℓ] that a prompt starts from."""
    c, rng, weight = model.config, torch.Generator().manual_seed(seed), model.embed.tokens.weight
    if c.kind != "decoder" or c.kv_lora_rank or c.d_state or length < 1:
        raise ValueError(f"length = {length} for {c.kind} {c.name}: 1 vector or more, for a decoder's heads")
    ids = torch.randint(c.vocab_size, (1, length), generator=rng) if ids is None else torch.tensor([ids])
    check_ids(ids, c)
    return ids.to(weight.device)


def _install(model: nn.Module, rows: Tensor, encoder, states, seed: int) -> Tuned:
    freeze(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.prompt = Prompt(rows.clone(), encoder()).to(rows)
    model.states = partial(states, model, model.states)
    return Tuned(model)


def _in_layers(model, states, ids, padding=None, cache=None, **how) -> Iterator[Tensor]:
    shape = (model.config.n_layers, 2, model.config.n_kv_heads, model.config.d_head)
    return states(ids, padding, Prefixed(model.prompt().unflatten(1, shape).permute(1, 2, 3, 0, 4), cache), **how)


def _at_embedding(model, states, ids, padding=None, cache=None, **how) -> Iterator[Tensor]:
    rows = model.prompt()[: 0 if cache is not None and cache.length else None]  # [ℓ, D]; later passes have it cached
    n = len(rows)
    if cache is not None:
        cache.k, cache.v = (pad(t, (0, 0, 0, n)) for t in (cache.k, cache.v))
        cache.real = pad(cache.real, (0, n))
    put = lambda module, given, out: torch.cat([rows.expand(len(ids), -1, -1), out[:, n:]], 1)  # [B, ℓ + T, D]
    passing = states(pad(ids, (n, 0)), None if padding is None else pad(padding, (n, 0), value=True), cache, **how)
    with model.embed.tokens.register_forward_hook(put):
        first = next(passing)
    for x in chain([first], passing):
        yield x[:, n:]
