"""StreamingLLM (Xiao et al. 2023, arXiv:2309.17453): the first tokens and the latest ones, for a text without end.

Softmax has to put its weight somewhere, and models learn to leave the rest on the first tokens. Drop those and every
score is read against a denominator that the model never saw. Keep them, and a few hundred recent tokens are enough to
go on for ever; what lies between is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmstack.architectures.cache import Cache, Pair
from llmstack.architectures.decoder import Decoder
from llmstack.config import ModelConfig
from llmstack.ops.attention import attention_torch
from llmstack.ops.cross_entropy import cross_entropy_torch
from llmstack.ops.rope import GROWING, rope_frequencies, rope_tables, rope_torch


class SinkCache:
    """A cache of constant size: a query sees the first `sinks` tokens and the last `window`, its own among them.

    Positions count slots of the cache, not tokens of the text (section 3.2): the sinks always stand right before the
    window, so no rotation is larger than the model was trained on. Kept keys are turned back as they move down. A pass
    of T tokens equals T passes of one: in it, a query meets the sinks at the distance that it would have alone.
    Holds 2 L B K (sinks + window − 1) Dh values between passes. Raises ValueError on padding, on a model without RoPE,
    and on one with latent attention.
    """

    def __init__(self, config: ModelConfig, batch: int = 1, sinks: int = 4, window: int = 256):
        if not isinstance(sinks, int) or not isinstance(window, int) or window < 1 or sinks < 0:
            raise ValueError(f"sinks = {sinks}, window = {window}: a query sees itself, so window is a whole 1 or more")
        if config.kv_lora_rank:
            raise ValueError(f"{config.name} caches latents (kv_lora_rank), not keys to move: take a ContiguousCache")
        grows = config.rope_scaling and config.rope_scaling[0] in GROWING
        if config.positions != "rope" or config.sliding_window or config.nope_every or grows:
            raise ValueError(f"{config.name}: a sink cache moves keys to other positions, which takes plain RoPE")
        self.config, self.sinks, self.window, self.batch = config, sinks, window, batch
        self.k: dict[int, Tensor] = {}  # by layer, [B, K, length, Dh]
        self.v: dict[int, Tensor] = {}
        self.length = 0  # slots in use after a pass
        self._start = 0  # of them, before this pass
        self.turns = rope_frequencies(config.rope_dims or config.d_head, config.rope_theta, config.rope_scaling)

    def advance(self, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if real.shape[0] != self.batch or not real.all():
            raise ValueError(f"a sink cache streams {self.batch} sequences without padding, got {list(real.shape)}")
        self._start, total = self.length, self.length + real.shape[1]
        self.length = min(total, self.sinks + self.window - 1)
        slots = torch.arange(total, device=real.device).expand(self.batch, -1)
        return slots[:, self._start :], slots, torch.ones_like(slots, dtype=torch.bool)

    def update(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        """All keys and values of this pass; of them the sinks and the last window − 1 stay, the latter moved down."""
        if self._start:
            k, v = torch.cat([self.k[layer], k], 2), torch.cat([self.v[layer], v], 2)  # [B, K, S, Dh]
        gone = k.shape[2] - self.length
        first = min(self.sinks, self.length)
        self.k[layer] = torch.cat([k[:, :, :first], self._turn(k[:, :, first + gone :], -gone)], 2)
        self.v[layer] = torch.cat([v[:, :, :first], v[:, :, first + gone :]], 2)
        return k, v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
        k, v = self.update(layer, k, v)
        T, S = q.shape[2], k.shape[2]
        key, query = torch.arange(S, device=q.device), torch.arange(S - T, S, device=q.device)[:, None]
        sink = key < self.sinks  # [S]
        how["mask"] = how["mask"] & (sink | (query - key < self.window))  # [B, 1, T, S]
        past = (query[:, 0] - (self.sinks + self.window - 1)).clamp(min=0)  # [T]: slots beyond the last there will be
        if past.any() and self.sinks:
            # One product gives both scores: [q, q turned back] against [k, 0] in the window and [0, k] at the sinks.
            near, far = k.masked_fill(sink[:, None], 0), k.masked_fill(~sink[:, None], 0)
            q, k = torch.cat([q, self._turn(q, -past)], -1), torch.cat([near, far], -1)
        return attention_torch(q, k, v, **how)

    def memory(self, layer: int, make: Callable[[], Pair]) -> Pair:
        raise ValueError("a sink cache serves decoders: there is no encoder's output to keep")

    def _turn(self, x: Tensor, by: Tensor | int) -> Tensor:
        """x [B, heads, T, Dh] rotated by that many positions further."""
        positions = torch.as_tensor(by, device=x.device).expand(x.shape[2])
        return rope_torch(x, *rope_tables(positions, self.turns), interleaved=self.config.rope_interleaved)


@torch.no_grad()
def stream_losses(model: Decoder, ids: Tensor, cache: Cache, chunk: int = 256) -> Tensor:
    """Loss in nats for each token after the first, [T − 1], of ids [1, T] read in chunks through a cache.
    Raises ValueError on other ids and on a chunk under 1."""
    if ids.ndim != 2 or len(ids) != 1 or chunk < 1:
        raise ValueError(f"ids = {list(ids.shape)}, chunk = {chunk}: one text [1, T] is read, 1 or more tokens a time")
    losses = [torch.zeros(0, device=ids.device)]  # a text of one token has no loss
    for start in range(0, ids.shape[1] - 1, chunk):
        logits = model(ids[:, start : min(start + chunk, ids.shape[1] - 1)], cache=cache)[0]  # [up to chunk, V]
        losses.append(cross_entropy_torch(logits, ids[0, start + 1 : start + 1 + len(logits)], reduction="none"))
    return torch.cat(losses)
