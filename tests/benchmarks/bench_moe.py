"""Our expert layer against transformers' Mixtral block on the same weights: ratios of medians, forward and backward.

Eight experts of three matrices, two for each token, fp32, one thread. The contestants take turns, so that a machine
that slows down slows both, and CPU seconds are counted, so that what else runs on it does not. Writes
results/bench_moe.json.
"""

import os

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402
from side_by_side import write  # noqa: E402

from llmstack.architectures.moe import MoE  # noqa: E402
from llmstack.config import ModelConfig  # noqa: E402

SHAPE = ModelConfig("bench", 512, 1, 8, 1, d_ff=1024, n_experts=8, top_k=2)
TOKENS = (1, 16, 128, 1024)
LEAST = 0.95


def pair(dispatch: str):
    """Our layer and theirs with the same weights. dispatch: "eager", a loop over experts, or "grouped_mm", which
    transformers takes by default."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    ours = MoE.of(SHAPE)
    config = MixtralConfig(hidden_size=SHAPE.d_model, intermediate_size=SHAPE.d_ff, num_local_experts=SHAPE.n_experts)
    config._experts_implementation = dispatch
    theirs = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat([ours.experts.gate, ours.experts.up], 1))
        theirs.experts.down_proj.copy_(ours.experts.down)
    return ours, theirs


def main(runs: int) -> None:
    torch.set_num_threads(int(THREADS))
    (ours, eager), (_, grouped) = pair("eager"), pair("grouped_mm")
    contestants = {"ours": ours, "transformers, eager": eager, "transformers, grouped_mm": grouped}
    results, failed = [], []
    for backward in (False, True):
        for tokens in TOKENS:
            x = torch.randn(1, tokens, SHAPE.d_model, generator=torch.Generator().manual_seed(0)).requires_grad_()
            seconds, outputs = {name: [] for name in contestants}, {}
            for run in range(runs + 1):  # the first warms up
                order = list(contestants)[run % 3 :] + list(contestants)[: run % 3]  # none always finds a cold cache
                for name in order:
                    layer = contestants[name]
                    start = time.process_time()
                    for _ in range(max(1, 24 // tokens)):
                        with torch.set_grad_enabled(backward):
                            y = layer(x)
                        if backward:
                            y.sum().backward()
                            layer.zero_grad()
                    if run:
                        seconds[name].append(time.process_time() - start)
                    outputs[name] = y.detach()
            median = {name: statistics.median(s) for name, s in seconds.items()}
            what, ratios = f"{tokens} tokens, {'forward and backward' if backward else 'forward'}", {}
            for name in list(contestants)[1:]:
                assert (outputs["ours"] - outputs[name]).abs().max() <= 1e-5 * outputs["ours"].abs().max()
                ratios[name] = median[name] / median["ours"]
                print(f"mixture of experts, {what}: {name} / ours = {ratios[name]:.2f} (at least {LEAST})")
                if ratios[name] < LEAST:
                    failed.append(f"{what}, {name}: {ratios[name]:.2f}")
            results.append({"tokens": tokens, "backward": backward, "median_s": median, "theirs / ours": ratios})
    write("bench_moe", {"threads": int(THREADS), "results": results})
    if failed:
        sys.exit("below what it must be: " + "; ".join(failed))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
