"""To be documented below."""

import math

import torch


def sinusoidal(n: int, d: int, base: float = 10000.0, interleaved: bool = True) -> torch.Tensor:
    angle = torch.arange(n, dtype=torch.float64)[:, None] * base ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    pair = (angle.sin(), angle.cos())  # [n, d/2] each
    table = torch.stack(pair, -1).reshape(n, d) if interleaved else torch.cat(pair, -1)  # [n, d]
    return table.float()


def learned(positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(positions, table)


def relative_bucket(
    distance: torch.Tensor, bidirectional: bool = True, buckets: int = 32, max_distance: int = 128
) -> torch.Tensor:
    offset = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0) * buckets
        away = distance.abs()
    else:
        away = (-distance).clamp(min=0)
    exact = buckets // 2
    steps = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + steps.long()).clamp(max=buckets - 1)
    return offset + torch.where(away < exact, away, far)


def alibi_slopes(H: int) -> torch.Tensor:
    P = 2 ** math.floor(math.log2(H))
    slopes = [2 ** (-8 * i / P) for i in range(1, P + 1)]
    slopes += [2 ** (-4 * i / P) for i in range(1, 2 * (H - P), 2)]
    return torch.tensor(slopes)


def alibi_bias(T: int, S: int, H: int) -> torch.Tensor:
    query = torch.arange(S - T, S)[:, None]  # [T, 1]
    return alibi_slopes(H)[:, None, None] * -(query - torch.arange(S)).abs()  # [H, T, S]
