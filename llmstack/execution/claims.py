"""What the surveys claim about training, recomputed. data/claims.toml names these functions."""

import numpy as np

from llmstack.config import preset
from llmstack.execution.numpy_gpt import Counted, init, loss_and_gradients
from llmstack.execution.optimizers import lamb, lars, norm, sgd
from llmstack.execution.schedules import cosine
from llmstack.facts import Computed


def compute_is_six_n_d() -> Computed:
    """AC-08: counted operations of a training step over 6 N D, as the width h grows past the length s = 16."""
    ratios, tokens = {}, np.arange(17)[None] % 32
    for h in (32, 128, 512):
        config = preset("gpt2").with_(d_model=h, n_layers=2, n_heads=4, vocab_size=32, max_seq_len=16)
        w = init(config)
        matrices = sum(a.size for name, a in w.items() if a.ndim == 2 and "positions" not in name)
        loss_and_gradients(tokens[:, :-1], tokens[:, 1:], Counted.of(w), config)
        ratios[h] = Counted.operations / (6 * matrices * 16)
    chinchilla = 6 * 70e9 * 1.4e12
    shown = ", ".join(f"h = {h}: {r:.4f}" for h, r in ratios.items())
    says = f"counted / 6 N D at s = 16, {shown}; Chinchilla's 70e9 × 1.4e12 tokens give {chinchilla:.3g} operations"
    return Computed(ratios[512], "of 6 N D", says)


def layerwise_optimizers() -> Computed:
    """AC-16: how unequal a step ‖Δw‖ / ‖w‖ is between three layers: largest over smallest."""
    spread = {}
    for name, make in (("SGD", sgd), ("SGD with cosine decay", sgd), ("LARS", lars), ("LAMB", lamb)):
        draw = np.random.default_rng(0)
        w = {str(i): draw.normal(size=(8, 8)) * 10**i for i in range(3)}
        before = {n: a.copy() for n, a in w.items()}
        lr = 1e-3 * (cosine(100)(50) if "cosine" in name else 1)
        make(w, lr=lr).step({n: draw.normal(size=a.shape) for n, a in w.items()})
        moved = [norm(w[n] - before[n]) / norm(before[n]) for n in w]
        spread[name] = max(moved) / min(moved)
    shown = ", ".join(f"{name} {s:.3g}" for name, s in spread.items())
    return Computed([spread["LARS"], spread["LAMB"]], "largest / smallest ‖Δw‖/‖w‖ of three layers", shown)
