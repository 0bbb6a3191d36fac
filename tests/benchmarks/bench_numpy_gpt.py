"""A training step of the GPT in NumPy against the same step in eager PyTorch: a ratio of medians.

Forward, hand-written backward and AdamW on a GPT-2 of 4 layers and width 256 with the same weights, fp32, one thread,
batches of 2 x 128 tokens; PyTorch has autograd, its own fused functions and its own optimizer. The two take turns, so
that a machine that slows down slows both, and CPU seconds are counted, so that what else runs on it does not. Writes
results/bench_numpy_gpt.json.
"""

import os

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = THREADS  # before the first import of numpy

import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from side_by_side import write  # noqa: E402

from llmstack import architectures, preset  # noqa: E402
from llmstack.architectures import decoder_np  # noqa: E402
from llmstack.execution import numpy_gpt  # noqa: E402
from llmstack.execution.optimizers import adamw  # noqa: E402

SHAPE = preset("gpt2").with_(d_model=256, n_layers=4, n_heads=8, vocab_size=2048, max_seq_len=128)
LEAST, B, T, LR = 0.4, 2, 128, 1e-3


def main(runs: int) -> None:
    torch.set_num_threads(int(THREADS))
    model = architectures.build(SHAPE)
    weights = {name: w.copy() for name, w in decoder_np.weights_of(model).items()}
    optimizer, peer = adamw(weights, LR), torch.optim.AdamW(model.parameters(), LR, weight_decay=0.01)
    rows = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (runs + 1, B, T + 1))

    def by_hand(row):
        return numpy_gpt.train(weights, SHAPE, [row], optimizer)[0]

    def eager(row):
        ids = torch.from_numpy(row)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        peer.zero_grad()
        loss.backward()
        peer.step()
        return loss.item()

    seconds, losses = {"numpy": [], "torch": []}, {"numpy": [], "torch": []}
    for run, row in enumerate(rows):  # the first warms up
        for name, step in [("numpy", by_hand), ("torch", eager)][:: (-1) ** run]:
            start = time.process_time()
            losses[name].append(step(row))
            if run:
                seconds[name].append(time.process_time() - start)
    assert np.allclose(losses["numpy"], losses["torch"], rtol=1e-3), f"these are not one training: {losses}"
    median = {name: statistics.median(s) for name, s in seconds.items()}
    ratio = median["torch"] / median["numpy"]
    print(f"training step: torch / numpy = {ratio:.2f} (at least {LEAST})")
    write("bench_numpy_gpt", {"threads": int(THREADS), "median_s": median, "torch / numpy": ratio})
    if ratio < LEAST:
        sys.exit(f"below what it must be: {ratio:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
