"""Autoregressive generation: p(x) = Π p(x_t | x_<t), one token a pass, with what went before kept in a cache.

The first pass computes the whole prompt (prefill), every later one a single token (decode). An encoder-decoder runs
its encoder once, before the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.ends import check_ids
from llmstack.architectures.ssm import StateCache


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    eos: int | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
    padding: Tensor | None = None,
    source: Tensor | None = None,
    source_padding: Tensor | None = None,
) -> Tensor:
    """Prompts ids [B, T] with their continuations, [B, T + new], new <= max_new_tokens.

    Temperature 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature), the same
    ones for the same `seed`. A row that has reached `eos` repeats it, and generation stops when all have. Prompts of
    different lengths stand left-padded, with `padding` [B, T] True at real tokens. An encoder-decoder takes its input
    as `source` (with `source_padding`), and as ids the tokens that its decoder starts with.

    Raises ValueError on an empty or right-padded prompt, or one that leaves no room in a position table.
    """
    config = model.config
    if config.kind == "encoder":
        raise ValueError(f"{config.name} is an encoder: it has no next token; generate with a decoder")
    if (config.kind == "encoder-decoder") != (source is not None):
        raise ValueError(f"{config.name} is of kind {config.kind}: source is for encoder-decoders, and they need it")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens!r}, but it must be a whole number, zero or more")
    if not isinstance(temperature, int | float) or not temperature >= 0:
        raise ValueError(f"temperature = {temperature!r}, but it must be a number, zero or more")
    if eos is not None and not (isinstance(eos, int) and 0 <= eos < config.vocab_size):
        raise ValueError(f"eos = {eos!r}, but it must be one of the {config.vocab_size} token ids, or None")
    if isinstance(ids, Tensor) and 0 in ids.shape:
        raise ValueError(f"ids are an empty prompt, shape {list(ids.shape)}; give one token at least, say BOS")
    check_ids(ids, config)
    if padding is not None and not padding[:, -1].all():
        raise ValueError("prompts must be padded on the left: the last token of every row has to be a real one")
    B, T = ids.shape
    if config.positions == "learned" and T + max_new_tokens > config.max_seq_len:
        raise ValueError(
            f"{T} prompt tokens and max_new_tokens = {max_new_tokens} do not fit the {config.max_seq_len} positions of "
            f"{config.name}; shorten the prompt or ask for fewer"
        )
    weight = next(model.parameters())
    if config.d_state:
        cache = StateCache(config, B, weight.device, weight.dtype)
    else:
        cache = ContiguousCache(config, B, T + max_new_tokens, weight.device, weight.dtype)
    rng = None if temperature == 0 else torch.Generator(ids.device)
    if rng is not None:
        rng.manual_seed(seed) if seed is not None else rng.seed()
    memory = None if source is None else model.encode(source, source_padding)
    done = torch.zeros(B, dtype=torch.bool, device=ids.device)
    new, real = ids, padding
    for _ in range(max_new_tokens):
        if memory is None:
            logits = model(new, padding=real, cache=cache, keep=1)[:, -1]  # [B, V]
        else:
            logits = model.decode(new, memory, source_padding, cache, target_padding=real, keep=1)[:, -1]
        token = pick(logits, temperature, rng)  # [B]
        if eos is not None:
            token = token.masked_fill(done, eos)
            done |= token == eos
        new, real = token[:, None], None
        ids = torch.cat([ids, new], 1)
        if done.all():
            break
    return ids


def pick(logits: Tensor, temperature: float = 0.0, rng: torch.Generator | None = None) -> Tensor:
    """A token [B] for each row of logits [B, V]: the likeliest at temperature 0, otherwise drawn."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=rng)[:, 0]
