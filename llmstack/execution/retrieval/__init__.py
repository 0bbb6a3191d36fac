"""Finding the nearest of many vectors, and using what was found: every index from scratch in NumPy.

    Flat(x)                    exact: all distances                                    exact.py
    IVF(x, lists)              cells of k-means, whole vectors                         ivf.py
    IVFPQ(x, lists, parts)     cells, and in them residuals in a few bytes             ivf.py
    HNSW(x, M)                 layers of a proximity graph                             hnsw.py
    DiskIndex(path)            Vamana's graph in a file, PQ codes in memory (DiskANN)  vamana.py
    BM25(texts)                words, not vectors                                      bm25.py
    answer(model, …)           retrieve, then generate                                 rag.py

Each index has `.search(queries [Q, D], k) -> distances [Q, k], ids [Q, k]`, nearest first, as faiss returns them:
squared Euclidean distances, and id -1 at distance inf where fewer than k were found. On vectors of unit length the
order is that of the cosine, for |a - b|² = 2 - 2 a·b.
"""

from llmstack.execution.retrieval.bm25 import BM25
from llmstack.execution.retrieval.exact import Flat, recall, verses
from llmstack.execution.retrieval.hnsw import HNSW
from llmstack.execution.retrieval.ivf import IVF, IVFPQ
from llmstack.execution.retrieval.vamana import DiskIndex, vamana, write_disk_index

__all__ = ["BM25", "DiskIndex", "Flat", "HNSW", "IVF", "IVFPQ", "recall", "vamana", "verses", "write_disk_index"]
