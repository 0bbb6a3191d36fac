"""To be documented below."""

import torch


def softmax_torch(x: torch.Tensor) -> torch.Tensor:
    if not x.shape[-1]:
        return x.clone()
    m = x.amax(-1, keepdim=True)  # [..., 1]
    e = torch.exp(x - m.masked_fill(m == -torch.inf, 0.0))  # [..., S]
    total = e.sum(-1, keepdim=True)  # [..., 1]
    return e / total.masked_fill(total == 0, 1.0)  # [..., S]
