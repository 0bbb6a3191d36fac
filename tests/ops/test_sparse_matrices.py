"""Sparse formats against scipy's and torch's, and their bytes against the formulas."""

import numpy as np
import pytest
import scipy.sparse
import torch

from llmstack.ops.sparse import Blocks, blocks, csr, dense, sparse_linear_np, two_of_four

SHAPES = [(1, 8), (7, 24), (64, 104), (0, 16), (5, 8)]


def weight(shape, share=0.3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) * (rng.random(shape) < share)


def of_blocks(N, K, b, share=0.3):
    return weight((N, K), 2.0) * np.kron(np.random.default_rng(1).random((N // b, K // b)) < share, np.ones((b, b)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_csr_is_scipys(shape):
    w = weight(shape)
    ours, theirs = csr(w), scipy.sparse.csr_matrix(w)
    for mine, his in ((ours.values, theirs.data), (ours.columns, theirs.indices), (ours.starts, theirs.indptr)):
        assert np.array_equal(mine, his)


@pytest.mark.parametrize("b", [1, 2, 8])
def test_blocks_are_scipys(b):
    w = of_blocks(32, 48, b)
    ours, theirs = blocks(w, b), scipy.sparse.csr_matrix(w).tobsr((b, b))
    theirs.sort_indices()
    assert np.array_equal(ours.values, theirs.data)
    assert np.array_equal(ours.columns, theirs.indices)
    assert np.array_equal(ours.starts, theirs.indptr)


@pytest.mark.parametrize("M", [0, 1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_the_masked_dense_ones(shape, M):
    w, x = weight(shape, 2.0), np.random.default_rng(2).standard_normal((M, shape[1]))
    pruned = dense(two_of_four(w))
    for kept, stored in ((weight(shape), csr), (pruned, two_of_four)):
        assert sparse_linear_np(x, stored(kept)) == pytest.approx(x @ kept.T)
        assert np.array_equal(dense(stored(kept)), kept)
    square = of_blocks(16, shape[1], 8)
    assert sparse_linear_np(x, blocks(square, 8)) == pytest.approx(x @ square.T)
    assert np.array_equal(dense(blocks(square, 8)), square)


def test_two_of_four_keeps_the_larger_half():
    w = weight((6, 40), 2.0)
    kept = dense(two_of_four(w))
    top = torch.from_numpy(w).view(6, 10, 4).abs().topk(2).indices
    mask = torch.zeros(6, 10, 4).scatter_(-1, top, 1.0).view(6, 40).numpy()
    assert np.array_equal(kept, w * mask)
    ties = np.ones((1, 8))
    assert (dense(two_of_four(ties)) != 0).reshape(2, 4).sum(1).tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bytes_are_the_formulas(dtype):
    N, K, b, v = 64, 128, 8, np.dtype(dtype).itemsize
    w = of_blocks(N, K, b).astype(dtype)
    d = np.count_nonzero(w) / w.size
    assert csr(w).bytes == pytest.approx(d * N * K * (v + 4) + 4 * (N + 1))
    assert blocks(w, b).bytes == pytest.approx(d * N * K * (v + 4 / b**2) + 4 * (N / b + 1))
    assert two_of_four(w).bytes == N * K * v / 2 + N * K / 8
    assert isinstance(blocks(w, b), Blocks)


def test_csr_pays_for_its_indices():
    """In 16 bits an element with its index takes 6 bytes for 2: nothing is saved above a third."""
    for share, smaller in ((0.30, True), (0.37, False)):
        w = weight((300, 300), share).astype(np.float16)
        assert (csr(w).bytes < w.nbytes) == smaller


@pytest.mark.parametrize(
    "call",
    [
        lambda: csr(np.ones(3)),
        lambda: blocks(np.ones((6, 8)), 4),
        lambda: two_of_four(np.ones((2, 12))),
        lambda: sparse_linear_np(np.ones((2, 3)), csr(np.eye(4))),
    ],
    ids=["vector", "squares", "columns", "depth"],
)
def test_refused(call):
    with pytest.raises(ValueError, match="shape|squares|columns"):
        call()
