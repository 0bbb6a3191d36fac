"""What the surveys claim about hardware, recomputed. data/claims.toml names these functions."""

from llmstack.facts import Computed, accelerators
from llmstack.hardware.matrix_unit import on_chip_bytes, planned


def ffn_exceeds_on_chip() -> Computed:
    """AC-26: both matrices of an FFN of width 4096 in 16 bits, against what accelerators hold on chip."""
    h, value_bytes = 4096, 2
    matrix = h * 4 * h * value_bytes
    held = {chip.name: on_chip_bytes(chip)["all"] for chip in accelerators().values() if chip.on_chip}
    small = [name for name, size in held.items() if size < matrix]
    tile = planned(h, 4 * h, h, on_chip_bytes(accelerators()["a100-sxm-80gb"])["unit"])
    text = f"2 × {matrix / 1e6:.0f} MB; {len(small)} of {len(held)} accelerators with a stated size hold less than one"
    return Computed(2 * matrix, "bytes", f"{text}; a tile that fits an SM of an A100: {' × '.join(map(str, tile))}")
