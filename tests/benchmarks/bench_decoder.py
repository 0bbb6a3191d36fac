"""Forward of our decoder against transformers' on the same weights, and NumPy against PyTorch: ratios of medians.

SmolLM2-135M's shape with random weights, fp32, one thread, logits at every position, batch 1 of 512 tokens and 8 of
128. The contestants take turns, so that a machine that slows down slows both, and CPU seconds are counted, so that what
else runs on it does not. Writes results/bench_decoder.json.
"""

import os

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = THREADS  # before the first import of numpy

import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from side_by_side import write  # noqa: E402

from llmstack import architectures  # noqa: E402
from llmstack.architectures import decoder_np  # noqa: E402
from llmstack.config import ModelConfig  # noqa: E402

SHAPE = ModelConfig(
    "smollm2-135m", 576, 30, 9, 49152, n_kv_heads=3, d_ff=1536, max_seq_len=8192, rope_theta=1e5, tied=True
)
SIZES = [(1, 512), (8, 128)]
LEAST = {"transformers / ours": 0.95, "torch / numpy": 0.4}


def main(runs: int) -> None:
    from transformers import LlamaForCausalLM

    torch.set_num_threads(int(THREADS))
    model = architectures.build(SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        architectures.save(model, folder)
        peer = LlamaForCausalLM.from_pretrained(folder).eval()
    weights = decoder_np.weights_of(model)
    contestants = {
        "ours": lambda ids: model(ids),
        "transformers": lambda ids: peer(ids, use_cache=False).logits,
        "numpy": lambda ids: decoder_np.forward(ids.numpy(), weights, SHAPE),
    }
    results, failed = [], []
    for B, T in SIZES:
        ids = torch.randint(0, SHAPE.vocab_size, (B, T), generator=torch.Generator().manual_seed(0))
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        logits = {}
        for run in range(runs + 1):  # the first warms up
            for name, forward in contestants.items():
                with torch.inference_mode():
                    start = time.process_time()
                    out = forward(ids)
                    if run:
                        seconds[name].append(time.process_time() - start)
                    else:
                        logits[name] = np.asarray(out)
        for name in ("transformers", "numpy"):
            scale = np.abs(logits["ours"]).max()
            assert np.abs(logits[name] - logits["ours"]).max() <= 1e-5 * scale, f"{name} computes something else"
        median = {name: statistics.median(s) for name, s in seconds.items()}
        ratios = {
            "transformers / ours": median["transformers"] / median["ours"],
            "torch / numpy": median["ours"] / median["numpy"],
        }
        results.append({"batch": B, "tokens": T, "median_s": median, "ratios": ratios})
        for name, ratio in ratios.items():
            print(f"decoder {B} x {T}: {name} = {ratio:.2f} (at least {LEAST[name]})")
            if ratio < LEAST[name]:
                failed.append(f"{B} x {T}: {name} = {ratio:.2f}")
    write("bench_decoder", {"threads": int(THREADS), "results": results})
    if failed:
        sys.exit("below what it must be: " + "; ".join(failed))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
