"""What every Transformer is made of: norm, attention, feed-forward network, and the residual block that joins them.

The dials of a ModelConfig choose among the variants, so one Block is GPT-2's, Llama's, PaLM's, BERT's and T5's:

    pre         x + f(n(x))             GPT-2, Llama, T5        the identity path is never normalised
    post        n(x + f(x))             2017, GPT-1, BERT       every layer's output is
    branch      x + n(f(x))             OLMo-2                  what a branch adds is
    deepnorm    n(α x + f(x))           Wang et al. 2022, arXiv:2203.00555, fig. 2
    parallel    x + a(n(x)) + f(n(x))   GPT-J, PaLM, Falcon     both halves read the same input
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmstack.architectures.cache import Cache
from llmstack.architectures.mla import LatentAttention
from llmstack.architectures.moe import Experts, MoE
from llmstack.config import ModelConfig
from llmstack.ops.activations import ACTIVATIONS_TORCH
from llmstack.ops.attention import attention_torch
from llmstack.ops.deepnorm import deepnorm_constants, deepnorm_torch
from llmstack.ops.glu import GLU_TORCH
from llmstack.ops.layernorm import layernorm_torch
from llmstack.ops.rmsnorm import rmsnorm_torch
from llmstack.ops.rope import rope_torch


@dataclass
class Pass:
    """What the layers of one forward pass share. Masks are True where attention is allowed; None allows all."""

    mask: Tensor | None = None  # [B or 1, 1, T, S]
    band: Tensor | None = None  # the mask of windowed layers
    causal: bool = False  # plain causal order, in place of a mask
    back: Tensor | None = None  # [B or 1, T, S]: position of the query minus position of the key
    bias: Tensor | None = None  # [B or 1, H, T, S]: ALiBi, T5's buckets
    real: Tensor | None = None  # [B, T]: False at padding, which takes no expert's room; None: all are real
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines, [B or 1, T, rotated dims / 2]
    cache: Cache | None = None
    memory: Tensor | None = None  # [B, S', D]: what cross-attention reads
    memory_mask: Tensor | None = None  # [B, 1, 1, S']


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis, with or without a bias."""

    def __init__(self, config: ModelConfig, width: int = 0):
        super().__init__()
        self.kind, self.eps = config.norm, config.norm_eps
        self.weight = nn.Parameter(torch.ones(width or config.d_model))
        self.bias = nn.Parameter(torch.zeros(width or config.d_model)) if config.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rmsnorm":
            return rmsnorm_torch(x, self.weight, self.eps)
        return layernorm_torch(x, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """H query heads over K shared key-value heads: self-attention, or cross-attention over an encoder's output.

    MHA: K = H. GQA: 1 < K < H. MQA: K = 1 (Shazeer 2019, arXiv:1911.02150; Ainslie et al. 2023, arXiv:2305.13245).
    """

    def __init__(self, config: ModelConfig, layer: int = 0, cross: bool = False):
        super().__init__()
        self.config, self.layer, self.cross = config, layer, cross
        inner, shared = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.q = nn.Linear(config.d_model, inner, bias=config.qkv_bias)
        self.k = nn.Linear(config.d_model, shared, bias=config.qkv_bias and config.k_bias)
        self.v = nn.Linear(config.d_model, shared, bias=config.qkv_bias)
        self.o = nn.Linear(inner, config.d_model, bias=config.out_bias)
        self.qkv: nn.Linear | None = None
        normed = config.qk_norm != "none" and not cross
        self.q_norm = Norm(config, config.d_head if config.qk_norm == "head" else inner) if normed else None
        self.k_norm = Norm(config, config.d_head if config.qk_norm == "head" else shared) if normed else None

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of x [B, T, D], heads side by side."""
        if self.qkv is None:
            return self.q(x), self.k(x), self.v(x)
        shared = self.config.n_kv_heads * self.config.d_head
        return self.qkv(x).split([self.qkv.out_features - 2 * shared, shared, shared], -1)

    def fuse(self) -> None:
        """Stack the three matrices into one, for one larger product in place of three. There is no way back."""
        parts = [self.q, self.k, self.v]
        rows = sum(part.out_features for part in parts)
        self.qkv = nn.Linear(self.config.d_model, rows, bias=self.config.qkv_bias).to(self.q.weight)
        self.qkv.weight.data = torch.cat([part.weight.data for part in parts])
        if self.config.qkv_bias:
            absent = torch.zeros(self.k.out_features).to(self.q.weight)
            self.qkv.bias.data = torch.cat([absent if p.bias is None else p.bias.data for p in parts])
        self.q = self.k = self.v = None

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        split = lambda y: y.unflatten(-1, (-1, self.config.d_head)).transpose(1, 2)  # [B, heads, T, Dh]
        scale = self.config.attention_scale
        if self.cross:
            q = split(self.q(x))
            make = lambda: (split(self.k(now.memory)), split(self.v(now.memory)))
            k, v = now.cache.memory(self.layer, make) if now.cache is not None else make()
            out = attention_torch(q, k, v, mask=now.memory_mask, scale=scale)
        else:
            q, k, v = self.project(x)
            if self.config.qk_norm == "whole":
                q, k = self.q_norm(q), self.k_norm(k)
            q, k, v = split(q), split(k), split(v)
            if self.config.qk_norm == "head":
                q, k = self.q_norm(q), self.k_norm(k)
            if now.rotation is not None and self.config.rotates(self.layer):
                q, k = (rope_torch(y, *now.rotation, interleaved=self.config.rope_interleaved) for y in (q, k))
            banded = self.config.windowed(self.layer)
            how = dict(mask=now.band if banded else now.mask, bias=now.bias, scale=scale)
            how["causal"] = now.causal and how["mask"] is None
            if now.cache is not None:
                out = now.cache.attend(self.layer, q, k, v, **how)
            else:
                out = attention_torch(q, k, v, **how)
        return self.o(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """act(x U + b) D + c, or with a gate (act(x G) ⊙ x U) D (Shazeer 2020, arXiv:2002.05202). [..., D] -> [..., D]."""

    def __init__(self, config: ModelConfig, width: int = 0):
        super().__init__()
        width = width or config.d_ff
        self.act = (GLU_TORCH if config.gated else ACTIVATIONS_TORCH)[config.activation]
        self.gate = nn.Linear(config.d_model, width, bias=config.ffn_bias) if config.gated else None
        self.up = nn.Linear(config.d_model, width, bias=config.ffn_bias)
        self.down = nn.Linear(width, config.d_model, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x), self.up(x))  # [..., F]
        return self.down(inner)


class Block(nn.Module):
    """Attention and FFN (and cross-attention between them where there is an encoder) around a residual stream."""

    def __init__(self, config: ModelConfig, layer: int = 0, cross: bool = False, side: str = ""):
        super().__init__()
        self.place, self.parallel, self.scale = config.norm_place, config.parallel, config.residual_scale
        self.alpha = deepnorm_constants(config.n_layers, config.kind, side or "encoder", config.n_decoder_layers)[0]
        normed = self.place != "none"
        self.attention = LatentAttention(config, layer) if config.kv_lora_rank else Attention(config, layer)
        self.norm1 = Norm(config) if normed else None
        if cross:
            self.cross = Attention(config, layer, cross=True)
            self.norm_cross = Norm(config) if normed else None
        if config.has_experts(layer):
            common = config.n_shared_experts * config.d_expert
            self.ffn = MoE.of(config, FeedForward(config, common) if common else None)
        else:
            self.ffn = FeedForward(config)
        self.norm2 = Norm(config) if normed and not (self.parallel and config.parallel_norms == 1) else None

    def residual(self, x: Tensor, norm: Norm | None, f) -> Tensor:
        if norm is None:
            return x + f(x)
        if norm.kind == "deepnorm":
            return deepnorm_torch(x, f(x), norm.weight, norm.bias, self.alpha, norm.eps)
        if self.place == "post":
            return norm(x + f(x))
        branch = f(norm(x)) if self.place == "pre" else norm(f(x))
        return x + (branch if self.scale == 1.0 else branch * self.scale)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        if self.parallel:
            n = self.norm1(x)
            return x + self.attention(n, now) + self.feed(n if self.norm2 is None else self.norm2(x), now)
        x = self.residual(x, self.norm1, lambda y: self.attention(y, now))
        if hasattr(self, "cross"):
            x = self.residual(x, self.norm_cross, lambda y: self.cross(y, now))
        return self.residual(x, self.norm2, lambda y: self.feed(y, now))

    def feed(self, x: Tensor, now: Pass) -> Tensor:
        return self.ffn(x, now.real) if isinstance(self.ffn, MoE) else self.ffn(x)


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Draw the weights. Decoders and encoders: N(0, 0.02²), with the matrices that write to the residual stream divided
    by sqrt(2 L) (GPT-2, section 2.3). Encoder-decoders: variance 1 / fan-in, with the query's scaled to what
    attention does not divide by (T5). DeepNorm: Xavier, with v, o and the FFN times β (arXiv:2203.00555, fig. 2)."""
    if next(model.parameters()).is_meta:
        return
    rng = torch.Generator().manual_seed(seed)
    two_sided = config.kind == "encoder-decoder"
    spread = lambda fan_in: fan_in**-0.5 if two_sided else 0.02
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            tied = config.tied and name == "tokens"
            wide = 1 / config.embedding_scale if two_sided and not config.tied else spread(config.d_model)
            draw(module.weight, wide / config.head_scale if tied else wide, rng)
        elif isinstance(module, nn.Linear | nn.Conv1d):
            if name == "head" and config.tied:
                continue
            std = spread(module.weight[0].numel())
            if name == "q":
                std *= min(1.0, config.d_head**-0.5 / config.attention_scale)
            if config.norm == "deepnorm" and name in ("q", "k", "v", "o", "up", "gate", "down"):
                std = deepnorm_std(path, module, config)
            elif name in ("o", "down") and not two_sided and config.norm_place == "pre":
                std /= (2 * config.n_layers) ** 0.5
            draw(module.weight, std, rng)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, Experts):
            for matrix in module.matrices():
                draw(matrix, spread(matrix.shape[-1]), rng)
            if not two_sided and config.norm_place == "pre":
                module.down /= (2 * config.n_layers) ** 0.5


def deepnorm_std(path: str, module: nn.Linear, config: ModelConfig) -> float:
    """Xavier's spread, with gain β but for the query and the key, which only weigh."""
    side = "decoder" if path.startswith("decoder") else "encoder"
    beta = (
        1.0
        if path.endswith((".q", ".k"))
        else deepnorm_constants(config.n_layers, config.kind, side, config.n_decoder_layers)[1]
    )
    return beta * (2 / (module.in_features + module.out_features)) ** 0.5


def draw(weight: Tensor, std: float, rng: torch.Generator) -> None:
    """The same numbers on every device: they are drawn on the CPU in fp32."""
    weight.copy_(torch.randn(weight.shape, generator=rng, device="cpu") * std)
