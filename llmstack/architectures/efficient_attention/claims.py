"""What the survey claims about efficient attention, recomputed. data/claims.toml names these functions."""

from llmstack.architectures.efficient_attention import masks as m
from llmstack.architectures.efficient_attention.blocks import dilated_attention, pairs
from llmstack.architectures.efficient_attention.reformer import lsh_attention
from llmstack.facts import Computed

LENGTH = 1024


def growth_of_work() -> Computed:
    """AC-13: how the pairs of each listed method grow when the length doubles; dense attention has 4 times as many."""
    patterns = {
        "Sparse Transformer": lambda s: m.strided(round(s**0.5)).nnz(s),
        "Reformer": lambda s: pairs(lambda q, k, v: lsh_attention(q, v, 64, rounds=2, chunk=32), s),
        "Longformer": lambda s: (m.window(33, ahead=32) | m.hubs([0])).nnz(s),
        "Big Bird": lambda s: m.big_bird(s, 16).nnz(s),
        "StreamingLLM": lambda s: ((m.window(60) | m.sinks(4)) & m.causal()).nnz(s),
        "PCW in 4 windows": lambda s: m.parallel_windows([s // 4] * 4, 0).nnz(s),
        "LongNet": lambda s: pairs(dilated_attention, s, patterns=[(64, 1), (256, 4)]),
    }
    work = {name: (count(LENGTH), count(2 * LENGTH)) for name, count in patterns.items()}
    growth = [b / a for a, b in work.values()]
    shown = ", ".join(f"{name} {g:.2f}" for name, g in zip(work, growth))
    return Computed(growth, "times the pairs", f"pairs at {2 * LENGTH} over pairs at {LENGTH} tokens: {shown}; dense 4")
