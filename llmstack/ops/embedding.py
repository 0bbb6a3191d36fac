"""Embedding: a row of a table for each token id.

    y = table[ids]                 ids [...] integers in 0…V−1       table [V, D]       y, dy [..., D]

    dtable[v] = Σ of dy where ids = v        the transpose of reading rows is adding to rows (scatter-add)

No operations forward, R·D additions backward. For R ids forward reads and writes R·D values: rows that no id names are
never touched, so the gradient of a large table is mostly zeros. The same as one_hot(ids) @ table, which would cost
2RVD operations.
"""

import numpy as np
import torch


def embedding_np(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    check_ids(ids, len(table), "ids")
    return table[ids]  # [..., D]


def embedding_np_backward(dy: np.ndarray, ids: np.ndarray, V: int) -> np.ndarray:
    dtable = np.zeros((V, dy.shape[-1]), dy.dtype)  # [V, D]
    np.add.at(dtable, ids.reshape(-1), dy.reshape(-1, dy.shape[-1]))  # += would keep only one of equal ids
    return dtable


def embedding_torch(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    check_ids(ids, len(table), "ids")
    return torch.nn.functional.embedding(ids, table)  # [..., D]


def check_ids(ids: np.ndarray | torch.Tensor, V: int, name: str):
    """Raises TypeError on what is no array of whole numbers, IndexError on an id outside 0…V−1.

    On a GPU the look at the ids would wait for the device: left out there.
    """
    kind = str(getattr(ids, "dtype", type(ids).__name__))
    if "int" not in kind:
        raise TypeError(f"{name} must be an array of whole numbers, got {kind}")
    if isinstance(ids, torch.Tensor) and ids.device.type != "cpu" or not len(ids.reshape(-1)):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= V:
        raise IndexError(
            f"{name} has {low if low < 0 else high}, but the table has rows 0 to {V - 1}: "
            "do the tokenizer and the model belong together?"
        )


IMPLS = {"numpy": embedding_np, "torch": embedding_torch}
BACKWARDS = {"numpy": embedding_np_backward}
