"""Labs of chapter 3.3: attention tile by tile, and a matrix unit fed through buffers."""

import numpy as np

from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.hardware.buffers import pipeline
from llmstack.ops.flash.ref import HBM, block_rule, flash_np, standard_np

DH = 16


class Walk(HBM):
    """Notes after each move what has crossed so far, and where each block of keys met which block of queries."""

    def __init__(self, q: np.ndarray, k: np.ndarray):
        super().__init__()
        self.q, self.k, self.row, self.steps = q, k, 0, []

    def load(self, tile):
        place = lambda whole: (tile.ctypes.data - whole.ctypes.data) // whole.strides[2]
        super().load(tile)
        if np.shares_memory(tile, self.q):  # counted with the tile of scores that comes next
            self.row = place(self.q)
            return tile
        if np.shares_memory(tile, self.k):
            self.steps.append([self.row, place(self.k), 0, 0])
        return self._note(tile)

    def store(self, place, tile):
        super().store(place, tile)
        self._note(place)

    def _note(self, tile):
        if self.steps:
            self.steps[-1][2:] = self.read, self.written
        return tile


def tile_walk() -> Lab:
    """The running flash_np, stopped at any tile: which scores are made, what is on the chip, what has crossed."""

    def draw(percent_of_the_walk: int, on_chip: int, tokens: int, causal: bool):
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, tokens, DH), dtype=np.float32)
        (Br, Bc), walk, plain = block_rule(on_chip, DH), Walk(q, k), HBM()
        flash_np(q, k, v, causal, blocks=(Br, Bc), hbm=walk)
        standard_np(q, k, v, plain)
        now = max(1, round(percent_of_the_walk / 100 * len(walk.steps)))
        row, key, read, written = walk.steps[now - 1]
        end, standard = (sum(x) / 1e3 for x in (walk.steps[-1][2:], (plain.read, plain.written)))
        grid = np.zeros((-(-tokens // Br), -(-tokens // Bc)))
        for i, (r, c, *_) in enumerate(walk.steps[:now]):
            grid[r // Br, c // Bc] = 1 if i == now - 1 else 0.35
        fig, (tiles, chip, moved) = plots.axes("", "", size=(9.4, 3.4), panels=3)
        plots.heatmap(grid, ax=tiles, xlabel="block of keys", ylabel="block of queries", title="scores made")
        held = {"queries": Br * DH, "keys": Bc * DH, "values": Bc * DH, "sums": Br * DH, "scores": Br * Bc}
        plots.bars(
            {name: float(n) for name, n in held.items()}, ax=chip, ylabel="values", digits=4, title="on the chip now"
        )
        chip.set_xlim(0, 1200)
        so_far = np.array(walk.steps[:now])[:, 2:] / 1e3  # [tiles, read and written]
        lines = {"in all": so_far.sum(1), "of it written": so_far[:, 1]}
        moved.axhline(standard, color="#999999", linestyle="--")
        moved.text(0, standard, "standard, in all", va="bottom", fontsize=9)
        frame = dict(xlabel="tiles so far", ylabel="kB moved", title="to and from memory")
        plots.line(lines, range(1, now + 1), ax=moved, marks=now <= 20, **frame)
        moved.set(xlim=(0, len(walk.steps) + 1), ylim=(0, 1.15 * max(standard, end)))
        return fig, (
            f"{tokens} tokens in tiles of {Br} queries and {Bc} keys: {len(walk.steps)} tiles of {grid.size} are made. "
            f"Tile {now}: queries from {row}, keys from {key}; {sum(held.values()):,} values on the chip; "
            f"{read / 1e3:.1f} kB read and {written / 1e3:.1f} kB written so far, "
            f"{end:.1f} kB at the end, standard attention {standard:.1f}."
        )

    sizes = {f"{n:,} values": n for n in (1024, 256, 512, 2048, 4096)}
    return lab(
        draw,
        "Attention, tile by tile",
        percent_of_the_walk=(1, 100, 1, 40),
        on_chip=sizes,
        tokens=[128, 64, 256],
        causal={"no": False, "yes": True},
    )


def two_buffers() -> Lab:
    """Loads and multiplications of tiles in time, by the number of buffers."""

    def draw(buffers: int, load: float, compute: float, tiles: int, uneven: bool):
        factor = np.random.default_rng(1).uniform(0.2, 1.8, tiles) if uneven else np.ones(tiles)
        loads, computes = (load * factor).tolist(), [compute] * tiles
        line = pipeline(loads, computes, buffers)
        fig, ax = plots.axes("microseconds", "", size=(8, 2.2))
        for y, (starts, lengths) in enumerate([(line.load_start, loads), (line.compute_start, computes)]):
            for i, (start, length) in enumerate(zip(starts, lengths)):
                shade = plots.COLOURS[(0, 4)[i % 2]]
                ax.barh(y, length, 0.6, start, color=shade, edgecolor="white")
                ax.text(
                    start + length / 2,
                    y,
                    str(i + 1),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=("white", "black")[i % 2],
                )
        ax.set_yticks([0, 1], ["load", "multiply"])
        ax.set_xlim(0, tiles * (load + compute) * 1.02)
        ax.invert_yaxis()
        return fig, (
            f"{tiles} tiles with {buffers} buffer{'s' * (buffers > 1)}: {line.seconds:.4g} µs, of which the matrix "
            f"unit waits {line.stalled:.0%}. First load + n · max: {load + tiles * max(load, compute):.4g} µs."
        )

    return lab(draw, "Load while you multiply", buffers=(1, 4, 1, 2), load=(0.25, 2.0, 0.25, 1.0),
               compute=(0.25, 2.0, 0.25, 1.0), tiles=(2, 12, 1, 8), uneven={"no": False, "yes": True})  # fmt: skip
