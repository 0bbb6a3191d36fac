"""To be documented below."""

import math

import torch


def rope_frequencies(
    d: int, theta: float = 10000.0, scaling: tuple[float, float, float, int] | None = None
) -> torch.Tensor:
    frequency = 1.0 / theta ** (torch.arange(0, d, 2).float() / d)  # [d/2], in fp32 as the checkpoints were trained
    if scaling is None:
        return frequency
    factor, low, high, length = scaling
    turns = length * frequency / (2 * math.pi)  # whole rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / factor)


def rope_tables(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angle = positions[..., None].float() * frequencies  # [..., T, d/2]
    return angle.cos(), angle.sin()


def rope_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, d/2]
    half = cos.shape[-1]
    turn, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turn[..., ::2], turn[..., 1::2]  # [B, H, T, d/2] each
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turn[..., :half], turn[..., half:]
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    out = out.to(x.dtype)
    return torch.cat([out, rest], -1) if rest.shape[-1] else out


def half_to_interleaved(w: torch.Tensor, heads: int, rotary: int = 0) -> torch.Tensor:
    return _permute(w, heads, rotary, lambda order: order.view(2, -1).T.reshape(-1))


def interleaved_to_half(w: torch.Tensor, heads: int, rotary: int = 0) -> torch.Tensor:
    return _permute(w, heads, rotary, lambda order: order.view(-1, 2).T.reshape(-1))


def _permute(w: torch.Tensor, heads: int, rotary: int, rearrange) -> torch.Tensor:
    by_head = w.reshape(heads, -1, *w.shape[1:])  # [H, Dh, ...]
    d = by_head.shape[1]
    order = torch.arange(d, device=w.device)
    order[: rotary or d] = rearrange(order[: rotary or d])
    return by_head[:, order].reshape(w.shape)
