"""To be documented below."""

import torch


def cross_entropy_torch(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    kept = targets != ignore_index  # [...]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [..., V]
    picked = wide.gather(-1, targets.masked_fill(~kept, 0)[..., None])[..., 0]  # [...]
    loss = (wide.logsumexp(-1) - picked).masked_fill(~kept, 0.0)  # [...]
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum().clamp(min=1) if reduction == "mean" else loss.sum()
