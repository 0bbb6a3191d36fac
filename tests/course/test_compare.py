"""How far apart two results are, as text."""

import math

import numpy as np
import pytest
import torch

from llmstack import course


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (1.0, 1.0, "under 1e-06"),
        ([0.0, 2.0], [0.0, 2.0], "under 1e-06"),
        (np.zeros(3), np.zeros(3), "under 1e-06"),
        ([100.0, 3.0], [100.0, 3.00005], "under 1e-06"),  # 5e-5 over the largest value, 100
        ([1.0, 3.0], [1.0, 3.3], "0.09"),
        (torch.tensor([1.0, 2.0], requires_grad=True), np.array([1.0, 2.0]), "under 1e-06"),
        (torch.tensor([1.0, 1.5], dtype=torch.bfloat16), torch.tensor([1.0, 1.0]), "0.5"),
        ([math.nan, 1.0], [1.0, 1.0], "nan"),
        (1.0, 0.0, "inf"),
    ],
)
def test_a_gap_is_under_its_limit_or_a_number(a, b, says):
    with np.errstate(divide="ignore"):
        assert course.gap(a, b, 1e-6) == says


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"a has shape \(3,\) and b \(2,\)"):
        course.gap([1, 2, 3], [1, 2], 1e-6)
