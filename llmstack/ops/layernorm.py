"""To be documented below."""

import torch


def layernorm_torch(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor | None = None, eps: float = 1e-5) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # bf16 and fp16 are summed in fp32
    centred = wide - wide.mean(-1, keepdim=True)  # [..., D]
    r = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)  # [..., 1]
    y = centred * r * g  # [..., D]
    return (y if b is None else y + b).to(x.dtype)
