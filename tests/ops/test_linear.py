"""Linear and embedding layers against torch's own, and their gradients against autograd."""

import numpy as np
import pytest
import torch
from op_checks import check_backward, check_forward, randn
from torch.nn import functional as F

from llmstack.ops import embedding, linear

SHAPES = [(1, 1), (3, 5, 100), (2, 1000), (0, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", linear.IMPLS)
def test_linear_forward(impl, shape):
    x, w, b = randn(*shape), randn(7, shape[-1], seed=1), randn(7, seed=2)
    check_forward(linear.IMPLS[impl], impl, F.linear, x, w, b, terms=x.shape[-1])
    check_forward(linear.IMPLS[impl], impl, F.linear, x, w, terms=x.shape[-1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_backward(shape):
    x, w, b = randn(*shape), randn(7, shape[-1], seed=1), randn(7, seed=2)
    dy = randn(*shape[:-1], 7, seed=3)
    check_backward(linear.linear_np_backward, "numpy", F.linear, [x, w, b], dy, x, w)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,)], ids=str)
@pytest.mark.parametrize("impl", embedding.IMPLS)
def test_embedding_forward(impl, shape):
    ids = torch.arange(torch.Size(shape).numel()).reshape(shape) % 3
    check_forward(embedding.IMPLS[impl], impl, lambda ids, table: table[ids], ids, randn(11, 63))


def test_embedding_backward_adds_the_rows_of_equal_ids():
    ids, table, dy = torch.tensor([[4, 4, 0], [4, 9, 0]]), randn(11, 63), randn(2, 3, 63, seed=1)
    reference = lambda table: F.embedding(ids, table)
    check_backward(embedding.embedding_np_backward, "numpy", reference, [table], dy, ids, V=11)


@pytest.mark.parametrize("bad", [-1, 11])
@pytest.mark.parametrize("impl", embedding.IMPLS)
def test_an_id_outside_the_table_is_refused(impl, bad):
    ids = torch.tensor([0, bad])
    with pytest.raises(IndexError, match=f"ids has {bad}, but the table has rows 0 to 10.*tokenizer"):
        embedding.IMPLS[impl](ids.numpy() if impl == "numpy" else ids, randn(11, 4).numpy())


@pytest.mark.parametrize("name", embedding.IMPLS)
@pytest.mark.parametrize("ids", [[1.0], [True]], ids=str)
def test_ids_are_whole_numbers(name, ids):
    given = np.array(ids) if name == "numpy" else torch.tensor(ids)
    table = np.ones((3, 2)) if name == "numpy" else torch.ones(3, 2)
    with pytest.raises(TypeError, match="ids must be an array of whole numbers, got .*(float|bool)"):
        embedding.IMPLS[name](given, table)
    with pytest.raises(TypeError, match="ids must be an array of whole numbers, got list"):
        embedding.IMPLS[name](ids, table)
