"""What the surveys claim about hardware, recomputed. data/claims.toml names these functions."""

from llmstack.facts import Computed, accelerators
from llmstack.hardware.buffers import thin_seconds
from llmstack.hardware.matrix_unit import planned
from llmstack.ops.matmul import padded


def ffn_exceeds_on_chip() -> Computed:
    """AC-26: both matrices of an FFN of width 4096 in 16 bits, against what accelerators hold on chip."""
    h, value_bytes = 4096, 2
    matrix = h * 4 * h * value_bytes
    held = [chip.on_chip_bytes for chip in accelerators().values() if chip.l2_bytes or chip.sram_bytes]
    small = [size for size in held if size < matrix]
    tile = planned(h, 4 * h, h, accelerators()["a100-sxm-80gb"].shared_bytes)
    text = f"2 × {matrix / 1e6:.0f} MB; {len(small)} of {len(held)} accelerators with a stated size hold less than one"
    return Computed(2 * matrix, "bytes", f"{text}; a tile that fits an SM of an A100: {' × '.join(map(str, tile))}")


def flat_products() -> Computed:
    """BC-26: rows that a flat product of eight multiplies, and its modelled time, with padding to 64 and to 8."""
    rows, shape = [padded(8, to) for to in (64, 8)], ("flat", 8, 4096, 4096, "a100-sxm-80gb")
    old, new = (thin_seconds(*shape, buffers, pad) for buffers, pad in ((1, 64), (2, 8)))
    text = (
        f"{rows[0]} rows multiplied for 8 with padding to 64, {rows[1]} with padding to 8; that and a second buffer: "
    )
    text += f"{old / new:.2f}× faster on an A100, modelled"
    return Computed(rows[0] / rows[1], "× fewer rows multiplied", text)
