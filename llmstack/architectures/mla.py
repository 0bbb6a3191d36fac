"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from one short vector.

    c = norm(x W_dkv) [r]         the latent: all that is cached of a token, with
    k_r = rope(x W_kr) [d_r]      a key for positions that all heads share
    k = [c W_uk, k_r]   v = c W_uv   q = [q_n, rope(q_r)]        for each head

Naive form: keys and values of all heads are made from the latents of all S tokens. Absorbed form: since
q_n · (c W_uk) = (q_n W_ukᵀ) · c, each head carries its query into the latent space instead, attends there to the
latents themselves, and carries the result out with W_uv. That is multi-query attention with one key [c, k_r] and one
value c: nothing per head and token is ever made, which is what makes decoding cheap. Both forms cache r + d_r numbers
a token and layer, where MHA caches 2 H Dh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llmstack.config import ModelConfig
from llmstack.ops.attention import attention_torch
from llmstack.ops.rope import rope_torch

if TYPE_CHECKING:
    from llmstack.architectures.layers import Pass


class LatentAttention(nn.Module):
    """x [B, T, D] -> [B, T, D]. `absorbed` chooses the form; None: naive for a whole text, absorbed for a token."""

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        c = self.config = config
        if c.positions != "rope" or c.sliding_window:
            c._refuse("kv_lora_rank", "latent attention takes positions = 'rope' and sliding_window = 0")
        self.layer, self.absorbed = layer, None
        inner = c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        if c.q_lora_rank:
            self.q_down = nn.Linear(c.d_model, c.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(c.q_lora_rank, 1e-6)
            self.q_up = nn.Linear(c.q_lora_rank, inner, bias=False)
        else:
            self.q = nn.Linear(c.d_model, inner, bias=False)
        self.kv_down = nn.Linear(c.d_model, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(c.kv_lora_rank, 1e-6)
        self.kv_up = nn.Linear(c.kv_lora_rank, c.n_heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o = nn.Linear(c.n_heads * c.v_head_dim, c.d_model, bias=False)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        c, heads = self.config, self.config.n_heads
        rotate = lambda y: rope_torch(y, *now.rotation, interleaved=c.rope_interleaved)
        q = self.q_up(self.q_norm(self.q_down(x))) if c.q_lora_rank else self.q(x)
        q = q.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, T, n + d_r]
        q_n, q_r = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_r = self.kv_down(x)[:, None].split(
            [c.kv_lora_rank, c.qk_rope_head_dim], -1
        )  # [B, 1, T, r], [.., d_r]
        latent, q_r, k_r = self.kv_norm(latent), rotate(q_r), rotate(k_r)
        if now.cache is not None:
            latent, k_r = now.cache.update(self.layer, latent, k_r)  # [B, 1, S, r], [B, 1, S, d_r]
        how = dict(mask=now.mask, bias=now.bias, scale=c.attention_scale, causal=now.causal and now.mask is None)
        up = self.kv_up.weight.unflatten(0, (heads, -1))  # [H, n + v, r]
        w_uk, w_uv = up.split([c.qk_nope_head_dim, c.v_head_dim], 1)
        absorbed = self.absorbed if self.absorbed is not None else x.shape[1] == 1 and now.cache is not None
        if absorbed:
            q, k = torch.cat([q_n @ w_uk, q_r], -1), torch.cat([latent, k_r], -1)  # [B, H, T, r + d_r], [B, 1, S, ..]
            out = attention_torch(q, k, latent, **how) @ w_uv.mT  # [B, H, T, v]
        else:
            k = torch.cat([latent @ w_uk.mT, k_r.expand(-1, heads, -1, -1)], -1)  # [B, H, S, n + d_r]
            out = attention_torch(torch.cat([q_n, q_r], -1), k, latent @ w_uv.mT, **how)
        return self.o(out.transpose(1, 2).flatten(2))
