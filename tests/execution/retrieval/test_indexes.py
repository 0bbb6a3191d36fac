"""Indexes against faiss and hnswlib on real sentence vectors, and against the properties that their papers state."""

import faiss
import hnswlib
import numpy as np
import pytest
from scipy.stats import chisquare

from llmstack.execution.retrieval import (
    HNSW,
    IVF,
    IVFPQ,
    DiskIndex,
    Flat,
    recall,
    vamana,
    verses,
    write_disk_index,
)
from llmstack.execution.retrieval.exact import squared
from llmstack.execution.retrieval.hnsw import diversify, draw_levels
from llmstack.execution.retrieval.ivf import PQ

K, M, EF_CONSTRUCTION = 10, 8, 64
EFS = (10, 16, 32, 64, 128)


@pytest.fixture(scope="module")
def real():
    return verses()


@pytest.fixture(scope="module")
def x(real):
    return real.vectors[:1000]


@pytest.fixture(scope="module")
def truth(real, x):
    return faiss_flat(x, real.queries)


@pytest.fixture(scope="module")
def graph(x):
    return HNSW(x, M, EF_CONSTRUCTION)


@pytest.fixture(scope="module")
def disk(x, tmp_path_factory):
    path = tmp_path_factory.mktemp("disk") / "index"
    write_disk_index(path, x, *vamana(x, R=24, L=40, alpha=1.2), PQ(x, 48, 6))
    return DiskIndex(path)


def faiss_flat(x, queries, k=K):
    index = faiss.IndexFlatL2(x.shape[1])
    index.add(x)
    return index.search(queries, k)[1]


# ------------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("n, width, k", [(1, 1, 1), (7, 3, 7), (63, 100, 5), (1000, 17, 100)])
def test_flat_is_faiss(n, width, k):
    rng = np.random.default_rng(n)
    x, queries = (rng.standard_normal((m, width)).astype(np.float32) for m in (n, 9))
    index = faiss.IndexFlatL2(width)
    index.add(x)
    want, ids = index.search(queries, k)
    found = Flat(x).search(queries, k)
    np.testing.assert_array_equal(found[1], ids)
    np.testing.assert_allclose(found[0], want, atol=1e-5 * width)
    assert [a.dtype for a in found] == [want.dtype, ids.dtype]


def test_flat_is_faiss_on_sentences(real):
    np.testing.assert_array_equal(Flat(real.vectors).search(real.queries, K)[1], faiss_flat(real.vectors, real.queries))


def test_the_stored_vectors_are_sentences(real):
    """Unit length, and the plain questions find verses about what they ask."""
    assert real.vectors.shape == (1890, 384) and len(real.texts) == len(real.chapters) == 1890
    assert len(real.queries) == len(real.asked) == 110 and not set(real.asked) & set(real.texts)
    np.testing.assert_allclose((real.vectors**2).sum(-1), 1, atol=2e-3)
    first = {q: real.texts[i] for q, (i, *_) in zip(real.asked, Flat(real.vectors).search(real.queries, 1)[1])}
    assert "steal" in first["Do not steal."] and "neighbour" in first["Love your neighbour."]


@pytest.mark.slow
def test_the_stored_vectors_are_the_models(real):
    from llmstack import architectures
    from llmstack.architectures.zoo import embed

    model, tokenizer = architectures.pretrained("all-minilm-l6-v2")
    for lines, vectors in ((real.texts[::90], real.vectors[::90]), (real.asked[-10:], real.queries[-10:])):
        np.testing.assert_allclose(embed(model, tokenizer, lines).numpy(), vectors, atol=2e-4)


# --------------------------------------------------------------------------------------------------- cells and codes


def test_ivf_with_all_cells_is_exact(real, x, truth):
    ivf = IVF(x, lists=32)
    distances, ids = ivf.search(real.queries, K, probe=32)
    np.testing.assert_array_equal(ids, truth)
    assert (ivf.visited == len(x)).all() and (np.diff(distances) >= 0).all()


def test_ivf_is_faiss_given_its_centres(real, x):
    """With faiss's own centres in place of ours the cells, and so the answers, are faiss's."""
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(384), 384, 16)
    index.train(x)
    index.add(x)
    ivf = IVF(x, lists=16)
    ivf.centres = index.quantizer.reconstruct_n(0, 16)
    ivf.cell = squared(x, ivf.centres).argmin(-1)
    ivf.members = [np.flatnonzero(ivf.cell == i) for i in range(16)]
    for probe in (1, 4):
        index.nprobe = probe
        np.testing.assert_array_equal(ivf.search(real.queries, K, probe)[1], index.search(real.queries, K)[1])


def test_recall_and_work_grow_with_the_cells_read(real, x, truth):
    ivf, curve = IVF(x, lists=32), []
    for probe in (1, 2, 4, 8, 16, 32):
        curve.append((recall(ivf.search(real.queries, K, probe)[1], truth), ivf.visited.mean()))
    assert (np.diff(curve, axis=0) >= 0).all() and curve[-1] == (1.0, len(x))


def test_ivfpq_recalls_as_faiss_does(real, x, truth):
    """At the same cells, parts, bits, probes and k-means steps, averaged over seeds: within one point."""
    ours, theirs = [], []
    for seed in range(6):
        index = faiss.IndexIVFPQ(faiss.IndexFlatL2(384), 384, 16, 48, 5)
        index.cp.seed, index.cp.niter = seed + 1, 25
        index.pq.cp.seed = seed + 1
        index.pq.cp.min_points_per_centroid = index.cp.min_points_per_centroid = 1
        index.train(x)
        index.add(x)
        index.nprobe = 8
        theirs.append(recall(index.search(real.queries, K)[1], truth))
        own = IVFPQ(x, lists=16, parts=48, bits=5, seed=seed)
        ours.append(recall(own.search(real.queries, K, probe=8)[1], truth))
        assert own.pq.bytes == index.pq.code_size == 30
    assert np.mean(ours) > 0.5
    assert abs(np.mean(ours) - np.mean(theirs)) <= 0.01, (ours, theirs)


def test_table_distances_are_those_to_the_decoded_vector(real, x):
    pq = PQ(x, 48, 4)
    codes, query = pq.encode(x[:50]), real.queries[0]
    want = ((pq.decode(codes).astype(float) - query) ** 2).sum(-1)
    np.testing.assert_allclose(pq.distances(pq.table(query), codes), want, rtol=1e-4)
    error = ((pq.decode(codes) - x[:50]) ** 2).sum(-1).mean()
    assert error < ((x[:50] - x.mean(0)) ** 2).sum(-1).mean() * 0.6


# --------------------------------------------------------------------------------------------------------------- HNSW


def test_levels_are_geometric(graph):
    """P(level ≥ l) = M^-l, mL = 1 / ln M: a chi-square test of 100,000 draws, and the built graph has those layers."""
    levels = draw_levels(100_000, M, np.random.default_rng(3))
    seen = np.bincount(np.minimum(levels, 4), minlength=5)
    share = [M**-l * (1 - 1 / M) for l in range(4)] + [M**-4.0]
    assert chisquare(seen, np.array(share) * len(levels)).pvalue > 0.01
    assert [len(layer) for layer in graph.links] == [(graph.levels >= l).sum() for l in range(graph.levels.max() + 1)]


def test_links_stay_few_and_in_their_layer(graph):
    for l, layer in enumerate(graph.links):
        for node, links in layer.items():
            assert len(links) <= (2 * M if l == 0 else M) and node not in links
            assert len(set(links.tolist())) == len(links) and all(graph.levels[links] >= l)


def test_hnsw_recalls_as_hnswlib_does(real, x, truth, graph):
    """At the same M and ef: within one point everywhere, and 0.95 is reached. Both vary by order and by seed."""
    peers = []
    for seed in range(3):
        peer = hnswlib.Index("l2", 384)
        peer.init_index(len(x), M=M, ef_construction=EF_CONSTRUCTION, random_seed=seed)
        peer.add_items(x, num_threads=1)
        peers.append(peer)
    for ef in EFS:
        theirs = []
        for peer in peers:
            peer.set_ef(ef)
            theirs.append(recall(peer.knn_query(real.queries, K, num_threads=1)[0], truth))
        ours = recall(graph.search(real.queries, K, ef)[1], truth)
        assert abs(ours - np.mean(theirs)) <= (0.01 if ef >= 32 else 0.03), (ef, ours, theirs)
    assert recall(graph.search(real.queries, K, ef=64)[1], truth) >= 0.95


def test_recall_and_visited_nodes_grow_with_ef(real, truth, graph):
    curve = []
    for ef in EFS:
        distances, ids = graph.search(real.queries, K, ef)
        curve.append((recall(ids, truth), graph.visited.mean()))
        np.testing.assert_allclose(distances, ((real.queries[:, None] - graph.x[ids]) ** 2).sum(-1), atol=1e-5)
    assert (np.diff(curve, axis=0) >= 0).all(), curve
    assert not graph._seen.any()


@pytest.mark.parametrize("n", [1, 2, 9, 30])
def test_few_vectors_are_all_found(real, n):
    distances, ids = HNSW(real.vectors[:n], 4, 30).search(real.vectors[:n], n, ef=n)
    assert [sorted(row) for row in ids.tolist()] == [list(range(n))] * n
    assert (ids[:, 0] == np.arange(n)).all() and np.abs(distances[:, 0]).max() < 1e-5


def test_copies_are_one_node_and_all_found(real):
    x = np.concatenate([real.vectors[:2], np.repeat(real.vectors[:1], 30, 0)])
    index = HNSW(x, 4, 20)
    distances, ids = index.search(x[:1], 31, ef=31)
    assert ids.tolist() == [[0, *range(2, 32)]] and (distances == 0).all()
    np.testing.assert_array_equal(index.x, x[:2])
    assert [own.tolist() for own in index.copies] == [[0, *range(2, 32)], [1]]


# -------------------------------------------------------------------------------------------------- Vamana and DiskANN


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5])
def test_robust_prune_keeps_its_promise(real, x, alpha):
    """Every candidate is kept or is nearer by α to one that was kept; of two kept ones neither covers the other."""
    between = np.sqrt(((x[:200, None].astype(float) - x[None, :200]) ** 2).sum(-1))
    for node in range(20):
        others = np.delete(np.arange(200), node)
        kept = others[diversify(between[node, others] ** 2, x[others], 200, alpha)]
        assert (np.diff(between[node, kept]) >= 0).all()
        covered = alpha * between[np.ix_(kept, others)] < between[node, others] + 1e-4
        assert (covered.any(0) | np.isin(others, kept)).all()
        for i, later in enumerate(kept):
            assert (alpha * between[kept[:i], later] >= between[node, later] - 1e-4).all()


def test_alpha_keeps_more_links(x):
    out = [np.mean([len(row) for row in vamana(x[:300], R=30, L=30, alpha=a)[0]]) for a in (1.0, 1.3)]
    assert out[1] > 1.2 * out[0]


def test_nearly_every_vector_can_be_reached_from_the_entry(x):
    """Pruning a node's links can cut off another's last one; nothing in the algorithm forbids it."""
    links, entry = vamana(x[:400], R=16, L=30)
    seen, todo = {entry}, [entry]
    while todo:
        new = set(links[todo.pop()].tolist()) - seen
        seen, todo = seen | new, todo + list(new)
    assert len(seen) >= 0.98 * 400 and max(map(len, links)) <= 16


def test_diskann_recalls_with_few_sector_reads(real, x, truth, disk):
    """0.95 with fewer than 60 reads of 4 KiB, of 500 sectors; an exact search reads all of them."""
    _, ids = disk.search(real.queries, K, L=40, beam=4)
    assert recall(ids, truth) >= 0.95
    assert disk.sectors == 500 and disk.reads.max() < 60
    assert (disk.rounds * 4 >= disk.reads).all() and (disk.rounds < disk.reads).all()


def test_diskann_counts_what_it_reads(real, disk, monkeypatch):
    asked = []
    read = type(disk)._read
    monkeypatch.setattr(type(disk), "_read", lambda self, node: asked.append(node) or read(self, node))
    disk.search(real.queries[:5], K, L=20)
    assert len(asked) == disk.reads.sum()


def test_the_file_holds_the_vectors_in_sectors(x, disk):
    import os

    assert isinstance(disk.file, np.memmap) and os.path.getsize(disk.file.filename) == 4096 * disk.sectors
    for node in (0, 1, 499, 999):
        np.testing.assert_array_equal(disk._read(node)["vector"], x[node])
    assert not hasattr(disk, "x") and disk.codes.nbytes == 48 * len(x)


# ------------------------------------------------------------------------------------ far from the origin, with copies


def built(name, x, folder):
    """Each index with settings under which it misses nothing of these small sets."""
    if name == "disk":
        write_disk_index(folder / "far", x, *vamana(x, R=24, L=40), PQ(x, 8, 5))
        return lambda q: DiskIndex(folder / "far").search(q, K, L=120)
    index = {"flat": Flat, "ivf": lambda x: IVF(x, 16), "hnsw": lambda x: HNSW(x, M, EF_CONSTRUCTION)}[name](x)
    how = {"flat": {}, "ivf": {"probe": 16}, "hnsw": {"ef": 200}}[name]
    return lambda q: index.search(q, K, **how)


@pytest.mark.parametrize("name", ["flat", "ivf", "hnsw", "disk"])
@pytest.mark.parametrize("centre", ["one", "two"])
def test_recall_far_from_the_origin_is_hnswlibs(name, centre, tmp_path):
    """At 10,000 a squared norm in fp32 has steps as large as the distances; two clouds have their mean between them."""
    rng = np.random.default_rng(0)
    side = np.ones((600, 1)) if centre == "one" else rng.choice([-1, 1], (600, 1))
    x = (rng.standard_normal((600, 16)) + 10_000 * side).astype(np.float32)
    queries = x[::30] + 0.1 * rng.standard_normal((20, 16)).astype(np.float32)
    exact = ((queries[:, None].astype(float) - x) ** 2).sum(-1)
    truth = np.argsort(exact, kind="stable")[:, :K]
    peer = hnswlib.Index("l2", 16)
    peer.init_index(len(x), M=M, ef_construction=EF_CONSTRUCTION, random_seed=0)
    peer.add_items(x, num_threads=1)
    peer.set_ef(200)
    assert recall(peer.knn_query(queries, K, num_threads=1)[0], truth) == 1
    distances, ids = built(name, x, tmp_path)(queries)
    assert recall(ids, truth) >= (0.97 if name == "disk" else 1)  # codes of half a byte a number guide the disk's walk
    np.testing.assert_allclose(distances, np.take_along_axis(exact, ids, 1), rtol=1e-5)


@pytest.mark.parametrize("name", ["flat", "ivf", "hnsw", "disk"])
def test_of_vectors_with_many_copies_the_nearest_is_found(name, tmp_path):
    """Five vectors, a hundred copies each, in turns: more copies than a node has links, more cells than vectors."""
    rng = np.random.default_rng(1)
    five = rng.standard_normal((5, 16)).astype(np.float32)
    queries = five + 0.1 * rng.standard_normal((5, 16)).astype(np.float32)
    distances, ids = built(name, np.tile(five, (100, 1)), tmp_path)(queries)
    np.testing.assert_array_equal(ids, np.arange(5)[:, None] + 5 * np.arange(K))  # of equal ones the lower ids
    np.testing.assert_allclose(distances, ((queries - five) ** 2).sum(-1)[:, None].repeat(K, 1), rtol=1e-5)


def test_cells_without_vectors_are_not_read_first():
    x = np.repeat(np.eye(4, dtype=np.float32), 20, 0)
    ivf = IVF(x, lists=12)
    ivf.centres = np.concatenate([ivf.centres, ivf.centres])  # equal centres, of which the later ones have the vectors
    ivf.members = [np.zeros(0, int)] * 12 + ivf.members
    _, ids = ivf.search(np.eye(4), K, probe=1)
    assert (ids // 20 == np.arange(4)[:, None]).all()


# ---------------------------------------------------------------------------------------------------------- bad input


INDEXES = {
    "flat": Flat,
    "ivf": lambda x: IVF(x, 2),
    "ivfpq": lambda x: IVFPQ(x, 2, 4, 2),
    "hnsw": lambda x: HNSW(x, 4, 10),
    "vamana": vamana,
}


@pytest.mark.parametrize("name", INDEXES)
def test_bad_vectors_are_refused(name):
    make, x = INDEXES[name], np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
    with pytest.raises(ValueError, match="an index needs one vector at least"):
        make(x[:0])
    with pytest.raises(ValueError, match=r"numbers \[n, D\], got float32 \[8\]"):
        make(x[0])
    broken = x.copy()
    broken[[3, 7], 2] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"NaN or infinity in rows \[3, 7\]"):
        make(broken)
    if name != "vamana":
        index = make(x)
        with pytest.raises(ValueError, match="k = 21, but it must be a whole number from 1 to 20"):
            index.search(x, 21)
        with pytest.raises(ValueError, match="queries have width 7, but the index holds 8"):
            index.search(x[:, :7], 2)
        with pytest.raises(ValueError, match="queries hold NaN"):
            index.search(broken, 2)
        assert [a.shape for a in index.search(x[:0], 2)] == [(0, 2), (0, 2)]


def test_settings_that_cannot_be_are_refused(x, disk, tmp_path):
    for wrong, says in (
        (lambda: IVF(x[:10], 11), "k = 11 centres of 10 vectors"),
        (lambda: IVF(x[:10], 2).search(x[:1], 1, probe=3), "probe = 3 cells of 2"),
        (lambda: PQ(x, 7), "parts = 7 must divide the width 384"),
        (lambda: PQ(x[:100], 48, 8), "as many vectors, here 100"),
        (lambda: HNSW(x[:5], 1), "M = 1"),
        (lambda: HNSW(x[:20], 4).search(x[:1], 10, ef=5), "ef = 5 nodes kept cannot give k = 10"),
        (lambda: vamana(x[:10], alpha=0.9), "alpha = 0.9"),
        (lambda: disk.search(x[:1], 10, L=5), "a list of L must hold k = 10"),
        (lambda: write_disk_index(tmp_path / "a", x, [x[0]], 0, None), "links of 1 nodes do not fit 1000"),
        (
            lambda: write_disk_index(tmp_path / "a", np.eye(2, 1024), [np.array([1])] * 2, 0, None),
            "one sector's 4096",
        ),
        (lambda: recall(np.zeros((2, 3)), np.zeros((2, 4))), "must have one shape"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()
    with pytest.raises(FileNotFoundError, match="write_disk_index makes both"):
        DiskIndex(tmp_path / "none")
