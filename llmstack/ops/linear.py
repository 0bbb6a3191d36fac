"""Linear layer: one matrix for every token.

    y = x wᵀ + b                   x [..., in]      w [out, in]      b [out] or none      y, dy [..., out]

    dx = dy w                      dw = dyᵀ x over all rows          db = Σ over rows of dy

w is stored with a row for each output, as PyTorch and Hugging Face store it. For R rows and values of n bytes:

                operations       bytes read                  bytes written
    forward     2R·in·out        n(R·in + in·out)            nR·out
    backward    4R·in·out        n(2R·out + R·in + in·out)   n(R·in + in·out)

Backward costs twice forward: one product for dx, one for dw. With few rows (decoding) the bytes of w set the time.
"""

import numpy as np
import torch


def linear_np(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
    y = x @ w.T  # [..., out]
    return y if b is None else y + b


def linear_np_backward(dy: np.ndarray, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = dy.reshape(-1, w.shape[0])  # [R, out]
    return dy @ w, rows.T @ x.reshape(-1, w.shape[1]), rows.sum(axis=0)


def linear_torch(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, w, b)  # [..., out]


IMPLS = {"numpy": linear_np, "torch": linear_torch}
BACKWARDS = {"numpy": linear_np_backward}
