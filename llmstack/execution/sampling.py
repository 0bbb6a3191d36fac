"""From logits to a token: the likeliest, or one drawn from the softmax after its tail has been cut off.

Each cut works on what the one before it left, in the order temperature, top-k, top-p, min-p:
    top-k   the k likeliest, however likely (Fan et al. 2018, arXiv:1805.04833, section 5.1)
    top-p   the fewest likeliest that have p of the mass together (Holtzman et al. 2019, arXiv:1904.09751, section 3.1)
    min-p   whatever has min_p of the likeliest's probability (Nguyen et al. 2024, arXiv:2407.01082, section 3)
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_sampling(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
    """Raises ValueError with what is allowed, also for a cut where nothing is drawn (temperature 0)."""
    rules = (  # a bound that nan fails too
        ("temperature", temperature, lambda t: 0 <= t < float("inf"), "a number, zero or more"),
        ("top_k", top_k, lambda k: k >= 0 and isinstance(k, int), "a whole number of tokens; 0 keeps all"),
        ("top_p", top_p, lambda p: 0 < p <= 1, "above 0 and not above 1, which keeps all"),
        ("min_p", min_p, lambda m: 0 <= m < 1, "below 1 and not below 0, which keeps all"),
    )
    for name, given, fine, allowed in rules:
        if not isinstance(given, int | float) or not fine(given):
            raise ValueError(f"{name} = {given!r}, but it must be {allowed}")
    if temperature == 0 and (top_k, top_p, min_p) != (0, 1, 0):
        cuts = f"top_k = {top_k}, top_p = {top_p:g}, min_p = {min_p:g}"
        raise ValueError(f"temperature = 0 takes the likeliest token and draws none: {cuts} need a temperature above 0")


def check_logits(logits: Tensor) -> None:
    """Raises ValueError where a row of logits [..., V] has no likeliest token: a nan or +inf in it, or -inf throughout.

    argmax would take the nan, and name the same token for ever; a softmax would be nan in every place.
    """
    if not logits.amax(-1).isfinite().all():
        bad = "nan" if logits.isnan().any() else "inf" if logits.isposinf().any() else "nothing but -inf"
        raise ValueError(
            f"the logits hold {bad}, so no token can be chosen; usual causes are weights that are damaged or have "
            "diverged, and float16, which ends at 65504: take float32 or bfloat16"
        )


def filtered(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Logits [..., V] with -inf where the cuts leave nothing; the likeliest token always stays.

    Tokens that tie with the k-th all stay; of those that tie at top-p's border the first stay.
    """
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        before = p.cumsum(-1) - p  # the mass of all likelier tokens
        out = before >= top_p
        out[..., 0] = False  # a top_p that rounds to 0 in fp32 keeps one too
        logits = logits.masked_fill(out.scatter(-1, order, out), -torch.inf)
    if min_p:
        p = logits.softmax(-1)
        logits = logits.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
    return logits


def pick(logits: Tensor, temperature: float = 0.0, rng: torch.Generator | None = None, **cuts) -> Tensor:
    """A token [B] for each row of logits [B, V]: the likeliest at temperature 0, or one drawn; cuts as `filtered`.

    A temperature that fp32 does not hold, below 1.2e-38, is 0. Raises ValueError as check_logits does.
    """
    check_logits(logits)
    if temperature < torch.finfo(torch.float32).tiny:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0, so that nothing overflows upwards
    return torch.multinomial(filtered(logits, **cuts).softmax(-1), 1, generator=rng)[:, 0]
