"""What FlashAttention's first paper prints of its traffic and operations, derived from its own algorithms.

Figure 2 of arXiv:2205.14135v2 (GPT-2 medium's attention, forward and backward, 1,024 tokens, 16 heads of 64, batch 64,
on an A100) has 66.6 and 75.2 GFLOPs, and 40.3 and 4.4 GB of HBM reads and writes, for standard and flash: 9.2×.
"""

from llmstack.facts import Computed
from llmstack.ops.flash.ref import block_rule


def flash_figure_2(M_bytes: int = 192 * 1024) -> dict[str, dict[str, float]]:
    """Operations and HBM bytes, forward and backward, of standard attention and of FlashAttention 1 in fp16.

    Standard: Algorithms 0 and 3 pass over the scores 4 and 7 times; a mask and a dropout of their own each read and
    write them once more in each direction, and the dropout a mask of one byte. Flash: Algorithms 1 and 4, with M_bytes
    on chip, arrays set to zero counted as written, and an fp32 maximum and sum for each row.
    """
    T, Dh, heads, value, statistic = 1024, 64, 16 * 64, 2, 4
    scores, rows, products = value * heads * T * T, value * heads * T * Dh, 2 * heads * T * T * Dh
    blocks = -(-T // block_rule(M_bytes // value, Dh)[1])
    forward, backward = 3 + 3 * blocks, 7 + 5 * blocks  # times that [T, Dh] crosses
    flash = (forward + backward) * rows + (2 + 6 * blocks) * statistic * heads * T
    return {
        "forward": {"operations": 2 * products},
        "standard": {"operations": 6 * products, "bytes": 12 * rows + 11 * scores},
        "standard with mask and dropout": {"operations": 6 * products, "bytes": 12 * rows + 20 * scores},
        "flash": {"operations": 7 * products, "bytes": flash},  # scores computed again
    }


def flash_attention() -> Computed:
    """BC-25: the ratio of HBM bytes that the time comes from; the time itself takes a GPU."""
    found = flash_figure_2()
    standard, bare, flash = (found[n] for n in ("standard with mask and dropout", "standard", "flash"))
    ratio = standard["bytes"] / flash["bytes"]
    text = (
        f"HBM traffic {standard['bytes'] / 1e9:.1f} GB against {flash['bytes'] / 1e9:.2f} GB: {ratio:.1f}× "
        f"({bare['bytes'] / flash['bytes']:.1f}× without mask and dropout), memory linear in length; operations "
        f"{bare['operations'] / 1e9:.0f} and {flash['operations'] / 1e9:.0f} G, not the printed 66.6 and 75.2"
    )
    return Computed(ratio, "× fewer HBM bytes", text)
