"""Prompts that are learned: ℓ vectors before the input of a frozen decoder, at its embedding or in every layer.

    prompt         P [ℓ, D] before the token embeddings: ℓ D values            Lester et al. 2021, arXiv:2104.08691
    p-tuning       P = MLP(LSTM(E)) or MLP(E)                                  Liu et al. 2021, arXiv:2103.10385
    prefix         keys and values of each layer, [ℓ, 2 L K Dh] = MLP(E)       Li and Liang 2021, arXiv:2101.00190
    p-tuning-v2    the same, trained themselves                                Liu et al. 2021, arXiv:2110.07602

What E goes through serves training alone: `materialise` keeps its result. Tokens stand behind the prompt: their
positions begin at ℓ. Keys of a prefix are what a cache would hold, rotation included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """The learned rows [ℓ, width]: a table, or what an encoder makes of a table."""

    def __init__(self, table: Tensor, encoder: nn.Module | None = None):
        super().__init__()
        self.table, self.encoder = nn.Parameter(table), encoder

    def forward(self) -> Tensor:
        return self.table if self.encoder is None else self.encoder(self.table)


class Recurrent(nn.LSTM):
    """An LSTM that passes on its outputs alone, [ℓ, in] -> [ℓ, 2 hidden]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Prefixed:
    """A cache with ℓ learned keys and values before all others, on top of another cache or none.

    `prefix` [L, 2, K, ℓ, Dh].
    """

    def __init__(self, prefix: Tensor, cache: Cache | None):
        self.prefix, self.cache = prefix, cache

    @property
    def length(self) -> int:
        return self.prefix.shape[3] + (self.cache.length if self.cache is not None else 0)

    def advance(self, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, positions = self.prefix.shape[3], positions_of(real)
        queries, keys, real = (positions, positions, real) if self.cache is None else self.cache.advance(real)
        own = torch.arange(n, device=real.device).expand(len(real), n)
        return queries + n, torch.cat([own, keys + n], 1), torch.cat([torch.ones_like(own, dtype=torch.bool), real], 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
        k, v = (k, v) if self.cache is None else self.cache.update(layer, k, v)
        own = self.prefix[layer, :, None].expand(-1, len(q), -1, -1, -1)  # [2, B, K, ℓ, Dh]
        return attention_torch(q, torch.cat([own[0], k], 2), torch.cat([own[1], v], 2), **how)


def prompt(model: nn.Module, length: int = 20, ids: Sequence[int] | None = None, seed: int = 0) -> Tuned:
    """Train ℓ vectors before the token embeddings. They start as those of `ids`, or of ℓ tokens drawn."""
    rows = model.embed.tokens.weight[_start(model, length, ids, seed)].detach().clone()  # [ℓ, D]
    return _install(model, Prompt(rows), _at_embedding)


def p_tuning(
    model: nn.Module, length: int = 20, encoder: str = "lstm", hidden: int = 0, layers: int = 2, seed: int = 0
) -> Tuned:
    """Train the same vectors through an encoder: "lstm" (both ways, with an MLP behind it) or "mlp". Hidden 0: D."""
    rows = model.embed.tokens.weight[_start(model, length, None, seed)].detach().clone()  # [ℓ, D]
    d, h = rows.shape[1], hidden or rows.shape[1]
    if encoder not in ("lstm", "mlp"):
        raise ValueError(f"encoder = {encoder!r}, but a prompt is encoded by 'lstm' or 'mlp'")

    def make():
        if encoder == "lstm":
            both = Recurrent(d, h, layers, bidirectional=True)
            return nn.Sequential(both, nn.Linear(2 * h, 2 * h), nn.ReLU(), nn.Linear(2 * h, d))
        return nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, d))

    return _install(model, Prompt(rows, _drawn(make, rows, seed)), _at_embedding)


def p_tuning_v2(
    model: nn.Module, length: int = 20, ids: Sequence[int] | None = None, hidden: int = 0, seed: int = 0
) -> Tuned:
    """Train ℓ keys and values in each layer. They start as those of `ids`, or of ℓ tokens drawn; with `hidden`, they
    are made by an MLP of that inner width from a smaller table [ℓ, K Dh], and start at random."""
    config, start = model.config, _start(model, length, ids, seed)
    if config.kv_lora_rank or config.d_state:
        raise ValueError(f"{config.name} keeps no keys and values of heads; take 'prompt' or 'p-tuning'")
    with torch.no_grad():
        weight = model.embed.tokens.weight
        cache = ContiguousCache(config, 1, len(start), weight.device, weight.dtype)
        model(start[None], cache=cache, keep=1)
        rows = torch.stack([cache.k[:, 0], cache.v[:, 0]], 1).permute(3, 0, 1, 2, 4).flatten(1)  # [ℓ, 2 L K Dh]
    if hidden:
        wide, d = rows.shape[1], config.n_kv_heads * config.d_head
        rows = torch.randn(len(start), d, generator=torch.Generator().manual_seed(seed)).to(rows)
        make = lambda: nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, wide))
    return _install(model, Prompt(rows, _drawn(make, rows, seed) if hidden else None), _in_layers)


def prefix(model: nn.Module, length: int = 20, hidden: int = 512, seed: int = 0) -> Tuned:
    """Prefix tuning as its paper trains it: through an MLP, without which it found training unstable."""
    return p_tuning_v2(model, length, hidden=hidden, seed=seed)


def materialise(tuned: Tuned) -> Tuned:
    """After training: keep what the encoder makes, and let the encoder go. The model's outputs stay."""
    own = tuned.model.prompt
    own.table, own.encoder = nn.Parameter(own().detach().clone()), None
    return Tuned(tuned.model, {"prompt.table": own.table})


def _start(model, length, ids, seed) -> Tensor:
    """The ids [ℓ] that a prompt starts from."""
    if model.config.kind != "decoder":
        raise ValueError(f"{model.config.name} is of kind {model.config.kind}: prompts are learned for decoders here")
    if ids is None and (not isinstance(length, int) or length < 1):
        raise ValueError(f"length = {length!r}, but a prompt has a whole number of vectors, 1 or more")
    rng, weight = torch.Generator().manual_seed(seed), model.embed.tokens.weight
    ids = torch.randint(len(weight), (length,), generator=rng) if ids is None else torch.tensor(ids)
    check_ids(ids[None], model.config)
    return ids.to(weight.device)


def _drawn(make, like: Tensor, seed: int) -> nn.Module:
    """A module with torch's own initialisation, drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(like)


def _install(model, own: Prompt, states) -> Tuned:
    freeze(model)
    model.prompt, model.states = own, partial(states, model, model.states)
    return Tuned(model)


def _alone(how) -> None:
    if how.get("pattern") is not None or how.get("positions") is not None:
        raise ValueError("a learned prompt stands before one sequence a row; give padded batches, not packed ones")


def _in_layers(model, states, ids, padding=None, cache=None, **how) -> Iterator[Tensor]:
    _alone(how)
    c = model.config
    rows = model.prompt().unflatten(1, (c.n_layers, 2, c.n_kv_heads, c.d_head)).permute(1, 2, 3, 0, 4)
    yield from states(ids, padding, Prefixed(rows, cache))


def _at_embedding(model, states, ids, padding=None, cache=None, **how) -> Iterator[Tensor]:
    _alone(how)
    check_ids(ids, model.config)
    if cache is not None and cache.length:  # the prompt went before, at the first pass
        yield from states(ids, padding, cache)
        return
    rows = model.prompt()  # [ℓ, D]
    n = len(rows)
    if cache is not None:
        cache.k, cache.v = (pad(t, (0, 0, 0, n)) for t in (cache.k, cache.v))
        cache.real = pad(cache.real, (0, n))
    padding = None if padding is None else pad(padding, (n, 0), value=True)
    put = lambda module, given, out: torch.cat([rows.expand(len(ids), -1, -1), out[:, n:]], 1)  # [B, ℓ + T, D]
    passing = states(pad(ids, (n, 0)), padding, cache)
    with model.embed.tokens.register_forward_hook(put):
        first = next(passing)
    for x in chain([first], passing):
        yield x[:, n:]
