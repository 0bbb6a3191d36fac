"""Indexes on bad vectors, and index files that are cut short or not their own."""

import numpy as np
import pytest

from llmstack.execution.retrieval import BM25, HNSW, IVF, DiskIndex, Flat, vamana, verses, write_disk_index
from llmstack.execution.retrieval.ivf import PQ

X = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
GRAPH = vamana(X[:120], 4, 8)


@pytest.fixture
def index(tmp_path):
    write_disk_index(tmp_path / "i", X[:120], *GRAPH, PQ(X[:120], 4, 3))
    return tmp_path / "i"


def test_the_oracle_is_exact_far_from_zero():
    for shift in (1e3, 1e4):
        moved = (X + shift).astype(np.float32)
        truth = ((moved[:5, None].astype(float) - moved) ** 2).sum(-1).argsort(-1, kind="stable")[:, :3]
        assert np.array_equal(Flat(moved).search(moved[:5], 3)[1], truth)


MAKERS = {"flat": Flat, "ivf": lambda x: IVF(x, 4), "hnsw": lambda x: HNSW(x, 4, 8), "vamana": vamana}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_values_whose_squares_overflow_are_refused(make):
    with pytest.raises(ValueError, match="overflow"):
        make(X[:60] * np.float32(1e30))


def test_quantisers_check_their_vectors():
    pq = PQ(X, 4, 3)
    assert pq.encode(X[:0]).shape == (0, 4) and pq.decode(pq.encode(X[:0])).shape == (0, 8)
    with pytest.raises(ValueError, match="width 4"):
        pq.encode(X[:, :4])
    with pytest.raises(ValueError, match="NaN"):
        PQ(X * np.nan, 4, 3)
    with pytest.raises(ValueError, match="k = 2.5"):
        IVF(X, 2.5)


@pytest.mark.parametrize("kept", [0, 2000, 4096, -100, -4096])
def test_a_file_cut_short_is_refused_when_it_is_opened(index, kept):
    index.write_bytes(index.read_bytes()[:kept])
    with pytest.raises(ValueError, match="cut short"):
        DiskIndex(index)


@pytest.mark.parametrize("content", [b"", b"hello" * 100, None], ids=["empty", "text", "cut"])
def test_a_damaged_table_beside_it_is_refused(index, content):
    table = index.with_name("i.npz")
    table.write_bytes(table.read_bytes()[:500] if content is None else content)
    with pytest.raises(ValueError, match="write_disk_index"):
        DiskIndex(index)


def test_damaged_records_and_another_index_are_refused(index):
    np.savez(index.with_name("i.npz"), codes=np.zeros(3))
    with pytest.raises(ValueError, match="write_disk_index"):
        DiskIndex(index)
    write_disk_index(index, X[:120], *GRAPH, PQ(X[:120], 4, 3))
    index.write_bytes(b"\xff" * index.stat().st_size)
    with pytest.raises(ValueError, match="damaged"):
        DiskIndex(index).search(X[:1], 5)


def test_links_to_nowhere_are_not_written(index):
    links, entry = GRAPH
    for bad in ((links, 120), ([np.array([120])] * 120, entry)):
        with pytest.raises(ValueError, match="among the 120"):
            write_disk_index(index, X[:120], *bad, PQ(X[:120], 4, 3))


def test_words_in_any_spelling():
    index = BM25(["Stra\u00dfe", "cafe\u0301", "\u6771\u4eac \u30bf\u30ef\u30fc", "\u043a\u043e\u0448\u043a\u0430"])
    for i, query in enumerate(["STRASSE", "CAF\u00c9", "\u6771\u4eac", "\u041a\u041e\u0428\u041a\u0410"]):
        assert index.search(query, 1)[1].tolist() == [i]


def test_texts_and_dials_are_checked():
    with pytest.raises(ValueError, match="list of texts"):
        BM25([None])
    with pytest.raises(ValueError, match="k1 = inf"):
        BM25(["a"], float("inf"))
    with pytest.raises(ValueError, match="n = -1"):
        verses(-1)
