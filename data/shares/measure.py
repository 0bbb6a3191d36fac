"""Of the time of a pass, how much is in matrices and in attention? Writes shares.json beside this file.

    OMP_NUM_THREADS=1 python data/shares/measure.py

Llama blocks, two of each width, fp32, one thread, vocabulary 512, random weights: `eager` and `sdpa` are transformers'
own code with its two attentions, `ours` is this package's. Prefill reads 256 tokens, decode one more. Every pass runs
once unmeasured and then five times (decode fifteen) with a clock around each operation, whose fastest run counts.
Shares differ from machine to machine; that they rise with the width does not. Two minutes.
"""

import json
import platform
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from llmstack.architectures import build
from llmstack.architectures.cache import ContiguousCache
from llmstack.config import ModelConfig
from llmstack.intensity.timing import Timing, fastest_of

WIDTHS, TOKENS, LAYERS, HEAD = (256, 512, 768, 1024, 2048, 4096), 256, 2, 64


def ours(width: int, inner: int):
    config = ModelConfig("llama", width, LAYERS, width // HEAD, 512, d_ff=inner, max_seq_len=512)
    model, cache = build(config), ContiguousCache(config, 1, TOKENS + 1)

    def run(ids):
        cache.length = 0 if ids.shape[1] > 1 else TOKENS
        model(ids, cache=cache)

    return run


def theirs(width: int, inner: int, attention: str):
    shape = dict(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=LAYERS, num_attention_heads=width // HEAD
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, attn_implementation=attention, **shape)).eval()
    state = {}

    def run(ids):
        if ids.shape[1] > 1:
            state["cache"] = DynamicCache(config=model.config)
        elif extra := state["cache"].get_seq_length() - TOKENS:
            state["cache"].crop(-extra)
        model(ids, cache=state["cache"], use_cache=True)

    return run


@torch.no_grad()
def main(runs: int = 5) -> None:
    torch.set_num_threads(1)
    rows = []
    for width in WIDTHS:
        inner = round(8 * width / 3 / 64) * 64
        makers = {"eager": lambda: theirs(width, inner, "eager"), "sdpa": lambda: theirs(width, inner, "sdpa")}
        for code, make in (makers | {"ours": lambda: ours(width, inner)}).items():
            run = make()
            for phase, tokens in (("prefill", TOKENS), ("decode", 1)):
                ids = torch.zeros(1, tokens, dtype=torch.long)
                run(ids)
                timings = []
                for _ in range(runs if tokens > 1 else 3 * runs):
                    with Timing() as timing:
                        run(ids)
                    timings.append(timing)
                best = fastest_of(timings)
                shares = {kind: round(share, 3) for kind, share in best.shares().items()}
                rows.append(dict(width=width, code=code, phase=phase, ms=round(1e3 * best.seconds, 2), **shares))
                print(rows[-1], flush=True)
    how = dict(tokens=TOKENS, layers=LAYERS, dtype="fp32", threads=1, torch=torch.__version__, cpu=platform.machine())
    body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    text = f'{{\n  "how": {json.dumps(how)},\n  "rows": [\n{body}\n  ]\n}}\n'
    Path(__file__).with_name("shares.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
