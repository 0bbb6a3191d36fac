"""HNSW's queries a second at recall@10 of 0.95, ours in NumPy against hnswlib in C++: same data, M, one thread.

Each takes the smallest ef that reaches the recall; queries go in one by one, the best of five rounds counts, in CPU
seconds. Writes results/bench_retrieval.json.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time  # noqa: E402

import hnswlib  # noqa: E402
from side_by_side import write  # noqa: E402

from llmstack.execution.retrieval import HNSW, Flat, recall, verses  # noqa: E402

M, EF_CONSTRUCTION, K, WANTED = 16, 100, 10, 0.95


def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    data = verses()
    truth = Flat(data.vectors).search(data.queries, K)[1]
    theirs = hnswlib.Index("l2", data.vectors.shape[1])
    theirs.init_index(len(data.vectors), M=M, ef_construction=EF_CONSTRUCTION, random_seed=0)
    built = {"hnswlib": seconds(lambda: theirs.add_items(data.vectors, num_threads=1))}
    kept = []
    built["ours"] = seconds(lambda: kept.append(HNSW(data.vectors, M, EF_CONSTRUCTION)))
    ours = kept[0]

    def knn(queries, k, ef):
        theirs.set_ef(ef)
        return theirs.knn_query(queries, k, num_threads=1)[::-1]

    results = {}
    for name, search in (("ours", ours.search), ("hnswlib", knn)):
        ef = next(ef for ef in range(K, 400, 2) if recall(search(data.queries, K, ef)[1], truth) >= WANTED)
        each = lambda: [search(q[None], K, ef) for q in data.queries]
        rate = len(data.queries) / min(seconds(each) for _ in range(5))
        got = recall(search(data.queries, K, ef)[1], truth)
        results[name] = dict(ef=ef, recall=got, queries_per_s=rate, build_s=built[name])
        print(f"{name:<8} ef {ef:>3}  recall {got:.3f}  {rate:>8.0f} queries/s  built in {built[name]:.2f} s")
    results["ratio"] = results["ours"]["queries_per_s"] / results["hnswlib"]["queries_per_s"]
    print(f"ratio    {results['ratio']:.3f} of hnswlib's queries a second")
    write("bench_retrieval", results)


if __name__ == "__main__":
    main()
