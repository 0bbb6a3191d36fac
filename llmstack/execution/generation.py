"""Autoregressive generation: p(x) = Π p(x_t | x_<t), one token a pass, with what went before kept in a cache.

The first pass computes the whole prompt (prefill), every later one a single token (decode). An encoder-decoder runs
its encoder once, before the first. `score` reads the same p(x) off one pass, where x is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.ends import check_ids
from llmstack.architectures.ssm import StateCache
from llmstack.execution.sampling import check_logits, check_sampling, pick


class Decoding:
    """A model with its cache, called with the newest tokens [B, T] -> logits [B, V] of the one after them.

    Raises ValueError on an empty or right-padded prompt, or one that leaves no room in a position table.
    """

    def __init__(self, model, ids, max_new_tokens, eos=None, padding=None, source=None, source_padding=None):
        config, kind = model.config, model.config.kind
        if kind == "encoder":
            raise ValueError(f"{config.name} is an encoder: it has no next token; generate with a decoder")
        if (kind == "encoder-decoder") != (source is not None):
            raise ValueError(f"{config.name} is of kind {kind}: source is for encoder-decoders, and they need it")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens = {max_new_tokens!r}, but it must be a whole number, zero or more")
        if isinstance(ids, Tensor) and 0 in ids.shape:
            raise ValueError(f"ids are an empty prompt, shape {list(ids.shape)}; give one token at least, say BOS")
        check_ids(ids, config)
        if padding is not None and not padding[:, -1].all():
            raise ValueError("prompts must be padded on the left: the last token of every row has to be a real one")
        (B, T), room = ids.shape, config.max_seq_len
        if config.positions == "learned" and T + max_new_tokens > room:
            asked = f"{T} prompt tokens and max_new_tokens = {max_new_tokens}"
            raise ValueError(f"{asked} do not fit the {room} positions of {config.name}; shorten, or ask for fewer")
        if source is not None and len(source) != B:
            raise ValueError(f"{len(source)} sources for {B} prompts: a row of one is for a row of the other")
        like = (weight := next(model.parameters())).device, weight.dtype
        state = bool(config.d_state)
        self.cache = StateCache(config, B, *like) if state else ContiguousCache(config, B, T + max_new_tokens, *like)
        self.model, self.source_padding = model, source_padding
        self.ends = _ends(eos, config.vocab_size).to(ids.device)
        self.memory = None if source is None else model.encode(source, source_padding)

    def __call__(self, new: Tensor, real: Tensor | None = None) -> Tensor:
        if self.memory is None:
            return self.model(new, padding=real, cache=self.cache, keep=1)[:, -1]  # [B, V]
        return self.model.decode(new, self.memory, self.source_padding, self.cache, real, keep=1)[:, -1]

    def reorder(self, rows: Tensor) -> None:
        """Go on with these rows of the batch, [B'], in this order; a row may come twice or not at all."""
        for name, held in vars(self.cache).items():
            if isinstance(held, Tensor):  # flags are [B, …], what layers hold is [L, B, …]
                setattr(self.cache, name, held.index_select(0 if held.dtype == torch.bool else 1, rows))
        if self.memory is not None:
            self.cache.memories = {i: (k[rows], v[rows]) for i, (k, v) in self.cache.memories.items()}
            self.memory = self.memory[rows]
            self.source_padding = None if self.source_padding is None else self.source_padding[rows]


def _ends(eos: int | Sequence[int] | None, vocab_size: int) -> Tensor:
    """The ids that end a row, as a tensor."""
    ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
    fine = isinstance(ends, list | tuple) and all(isinstance(e, int) and 0 <= e < vocab_size for e in ends)
    if not fine:
        raise ValueError(f"eos = {eos!r}, but it must be one of the {vocab_size} token ids, several of them, or None")
    return torch.tensor(ends, dtype=torch.long)


@torch.no_grad()
def generate(
    model: nn.Module, ids: Tensor, max_new_tokens: int, eos: int | Sequence[int] | None = None,
    temperature: float = 0.0, seed: int | None = None, padding: Tensor | None = None, source: Tensor | None = None,
    source_padding: Tensor | None = None, **cuts: float,
) -> Tensor:  # fmt: skip
    """Prompts ids [B, T] with their continuations, [B, T + new], new <= max_new_tokens.

    Temperature 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature), after the
    cuts top_k, top_p, min_p (execution.sampling), the same ones for the same `seed`. A row that has reached `eos`, one
    id or one of several (a chat model's `tokenizer.eos_ids`), repeats it, and generation stops when all rows have.
    Prompts of different lengths stand left-padded, with `padding` [B, T] True at real tokens. An encoder-decoder takes
    its input as `source` (with `source_padding`), and as ids the tokens that its decoder starts with.

    Raises ValueError as Decoding, check_sampling and check_logits do.
    """
    check_sampling(temperature, **cuts)
    step = Decoding(model, ids, max_new_tokens, eos, padding, source, source_padding)
    rng = None if temperature == 0 else torch.Generator(ids.device)
    if rng is not None:
        rng.manual_seed(seed) if seed is not None else rng.seed()
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    new, real = ids, padding
    for _ in range(max_new_tokens):
        token = pick(step(new, real), temperature, rng, **cuts)  # [B]
        token = torch.where(done, ids[:, -1], token)
        done |= torch.isin(token, step.ends)
        new, real = token[:, None], None
        ids = torch.cat([ids, new], 1)
        if done.all():
            break
    return ids


@torch.no_grad()
def beam_search(
    model: nn.Module, ids: Tensor, max_new_tokens: int, beams: int, length_penalty=1.0, eos=None, **prompt
) -> Tensor:
    """The best continuation that `beams` hypotheses kept side by side find, [B, T + new].

    eos and prompt (padding, source, source_padding) as generate takes them; nothing is drawn, so there is no seed.

    A finished one is worth Σ log p / new ** length_penalty: 0 ranks by probability, 1 by the mean log-probability.
    Of a row's 2 · beams best extensions those that end, if among the first `beams`, are finished; the best others
    live on. A row closes when it has `beams` finished ones and its best live one is worth less than the worst of
    them. After its eos a row repeats it. Raises ValueError as generate does, and on fewer than one beam.
    """
    V, n = model.config.vocab_size, beams
    if not isinstance(beams, int) or isinstance(beams, bool) or not 1 <= beams <= V // 2:
        raise ValueError(f"beams = {beams!r}, but it must be a whole number from 1 to half the vocabulary, {V // 2}")
    if not isinstance(length_penalty, int | float) or not abs(length_penalty) < float("inf"):
        raise ValueError(f"length_penalty = {length_penalty!r}, but it must be a number; 0 is none")
    step = Decoding(model, ids, max_new_tokens, eos, **prompt)
    B, T = ids.shape
    pick_rows = lambda x, at: x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))  # [B, n, t]
    live, worth = ids[:, None], torch.zeros(B, 1, device=ids.device)  # [B, 1, T]: the first pass knows one each
    kept = nn.functional.pad(ids, (0, max_new_tokens), value=-1)[:, None].expand(B, n, -1)
    kept_worth = torch.full((B, n), -torch.inf, device=ids.device)
    is_open = torch.ones(B, 1, dtype=torch.bool, device=ids.device)
    new, real = ids, prompt.get("padding")
    for length in range(1, max_new_tokens + 1):
        logits = step(new, real).float()
        check_logits(logits)
        total = logits.log_softmax(-1).view(B, -1, V) + worth[..., None]  # [B, n, V]
        top, at = total.flatten(1).topk(2 * n)  # [B, 2n]
        parent, token = at // V, at % V
        longer = torch.cat([pick_rows(live, parent), token[..., None]], -1)  # [B, 2n, T + length]
        ends = torch.isin(token, step.ends)
        finished = (ends | (length == max_new_tokens))[:, :n] & is_open
        value = (top[:, :n] / length**length_penalty).masked_fill(~finished, -torch.inf)
        room = nn.functional.pad(longer[:, :n], (0, max_new_tokens - length), value=-1)
        kept_worth, best = torch.cat([kept_worth, value], 1).topk(n)
        kept = pick_rows(torch.cat([kept, room], 1), best)
        worth, on = top.masked_fill(ends, -torch.inf).topk(n)
        is_open &= (worth[:, :1] / length**length_penalty) > kept_worth[:, -1:]
        if not is_open.any() or length == max_new_tokens:
            break
        rows = parent.gather(1, on) + torch.arange(B, device=ids.device)[:, None] * total.shape[1]
        step.reorder(rows.flatten())
        live = pick_rows(longer, on)
        new, real = live[..., -1].reshape(B * n, 1), None
    length = (kept[:, 0] >= 0).sum(-1)  # [B]
    out = kept[:, 0, : int(length.max())]
    return torch.where(out < 0, out.gather(1, length[:, None] - 1), out)


@torch.no_grad()
def score(model: nn.Module, ids: Tensor, padding=None, source=None, source_padding=None) -> Tensor:
    """log p(x_t | x_<t) [B, T - 1] of the tokens after the first, all from one masked pass (teacher forcing).

    Its sum over a row is log p(x | x_1). Zero where the token or its predecessor is padding.
    """
    logits = model(ids, padding) if source is None else model(source, ids, source_padding, padding)  # [B, T, V]
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    if padding is None:
        return found
    real = padding.bool()
    return found.masked_fill(~(real[:, 1:] & real[:, :-1]), 0)
