"""Labs of chapter 2 on retrieval."""

import numpy as np

from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.execution.retrieval import HNSW, Flat, verses

SHOWN, K = 600, 10


def hnsw_steps() -> Lab:
    """A search through an HNSW graph of verses, drawn on their two main axes: built on those two numbers, or on all."""
    data = verses(SHOWN)
    middle = data.vectors.mean(0)
    main = np.linalg.svd(data.vectors - middle, full_matrices=False)[2][:2].T  # [384, 2]
    main *= np.sign(main.sum(0))  # a direction is known up to its sign
    views = {"two main axes": lambda x: (x - middle) @ main, "all 384 numbers": lambda x: x}
    graphs = {name: HNSW(view(data.vectors), M=6, ef_construction=40) for name, view in views.items()}
    queries, asked = data.queries[-10:], data.asked[-10:]
    at = views["two main axes"](data.vectors)

    def draw(ef: int, question: str, built_on: str):
        graph, query = graphs[built_on], queries[asked.index(question)]
        point, trace = views[built_on](query[None]), {}
        found, visited = graph.walk(point[0], ef, trace)
        best, truth = [node for _, node in found][:K], Flat(graph.x).search(point, K)[1][0]
        fig, ax = plots.axes("first main axis", "second main axis", size=(7.6, 4.6))
        ax.plot(*at.T, ".", color="#cccccc", markersize=4, label=f"{SHOWN} verses")
        upper = [node for layer in sorted(trace, reverse=True) if layer for node in trace[layer]]
        for steps, look, name in ((upper, "^-", "upper layers, down"), (trace[0], "o-", "layer 0, as expanded")):
            colour = plots.COLOURS[1 if look == "^-" else 0]
            ax.plot(*at[steps].T, look, color=colour, linewidth=0.8, markersize=5, label=name)
        ax.plot(*at[truth].T, "s", mfc="none", mec="#111111", markersize=9, label=f"true {K} nearest")
        ax.plot(*views["two main axes"](query[None]).T, "*", color="#d55e00", markersize=15, label="question")
        ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        hits = len({*best} & {*truth.tolist()})
        return fig, (
            f"ef = {ef}: {len(upper) + len(trace[0])} of {SHOWN} nodes expanded, {visited} distances measured; "
            f"{hits} of the true {K} found. First: {data.texts[best[0]]}"
        )

    return lab(draw, "Steps of a search in HNSW", ef=(1, 60, 1, 10), question=asked, built_on=list(views))
