"""Training and encoding of our BPE against `tokenizers`' on the same text: ratios of CPU seconds.

Up to 5 MB of the texts that pip brings, 8,192 ids, one thread each; the contestants take turns, and the ids must be
equal. Theirs is compiled, ours is Python. Writes results/bench_bpe.json.
"""

import os

os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = "1", "false"

import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

from side_by_side import write  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402

from llmstack.execution import corpus  # noqa: E402
from llmstack.execution.bpe import BPE  # noqa: E402

LIMIT, SIZE, SPECIAL = 5_000_000, 8192, ["<|end|>"]


def theirs(texts: list[str]) -> Tokenizer:
    out = Tokenizer(models.BPE())
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = dict(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    out.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=SIZE, **how))
    return out


def timed(fn):
    start = time.process_time()
    out = fn()
    return out, time.process_time() - start


def main(runs: int) -> None:
    texts, total = [], 0
    for d in corpus.documents(["plays", "bible"]):
        if total + len(d.text) <= LIMIT:
            texts.append(d.text)
            total += len(d.text)
    seconds = {name: [] for name in ("train ours", "train theirs", "encode ours", "encode theirs")}
    for _ in range(runs):
        ours, s = timed(lambda: BPE.train(texts, SIZE, SPECIAL))
        seconds["train ours"].append(s)
        peer, s = timed(lambda: theirs(texts))
        seconds["train theirs"].append(s)
        mine, s = timed(lambda: [ours.encode(t) for t in texts])
        seconds["encode ours"].append(s)
        want, s = timed(lambda: [peer.encode(t).ids for t in texts])
        seconds["encode theirs"].append(s)
        assert mine == want, "the ids differ"
    median = {name: statistics.median(s) for name, s in seconds.items()}
    ratios = {what: median[f"{what} theirs"] / median[f"{what} ours"] for what in ("train", "encode")}
    for what, ratio in ratios.items():
        rate = total / median[f"{what} ours"] / 1e6
        print(f"bpe {what}: tokenizers / ours = {ratio:.2f}; ours {rate:.1f} MB/s of {total / 1e6:.1f} MB")
    write("bench_bpe", {"characters": total, "ids": SIZE, "median_s": median, "ratios": ratios})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
