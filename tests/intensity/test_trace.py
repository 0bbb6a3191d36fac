"""The dials' count against what the models really dispatch, and against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmstack import preset
from llmstack.architectures import build
from llmstack.intensity.counts import Convention, flops, terms, total
from llmstack.intensity.trace import Trace, even, nbytes, traced

FP32 = Convention(bytes=4)
PLAIN = ("gpt2", "bert-base-uncased", "t5-small")
OTHERS = ("opt-350m", "switch-base-128", "transformer-base-en-de", "whisper-tiny.en", "bloom-560m")
GROUPED = ("llama3.1-8b", "mixtral-8x7b", "deepseek-v3", "mamba-130m")


def short(name: str):
    """Two layers of each kind that the model has, at full width."""
    config = preset(name)
    return config.with_(n_layers=config.dense_layers + 2), 48 if config.kind == "encoder-decoder" else 0


@pytest.mark.parametrize("phase", ["forward", "train", "decode"])
@pytest.mark.parametrize("name", PLAIN + GROUPED)
def test_operations_equal_the_trace(name, phase):
    config, source = short(name)
    if phase == "decode" and config.kind != "decoder":
        pytest.skip("only decoders are traced in a cache")
    assert traced(config, 2, 64, phase, source).flops == flops(config, 2, 64, phase, source=source)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_some_models_have_is_counted(name):
    """A narrow embedding's projections, experts with a capacity, computed positions, a convolutional front end."""
    config, source = short(name)
    assert traced(config, 1, 5, "forward", source).flops == flops(config, 1, 5, source=source)
    frames_gradient = 2 * 2 * source * 3 * config.n_mels * config.d_model  # nobody asks for it
    assert traced(config, 1, 5, "train", source).flops == flops(config, 1, 5, "train", source=source) - frames_gradient


@pytest.mark.parametrize("phase", ["forward", "train", "decode"])
@pytest.mark.parametrize("name", PLAIN)
def test_bytes_of_matmuls_equal_the_trace(name, phase):
    config, source = short(name)
    if phase == "decode" and config.kind != "decoder":
        pytest.skip("only decoders are traced in a cache")
    moved = lambda phase, c: total(t for t in terms(config, 2, 64, phase, c, source=source) if t.flops).bytes
    theirs = sum(row.bytes for row in traced(config, 2, 64, phase, source).matmuls())
    biases = moved("forward", FP32) - moved("forward", Convention(bytes=4, biases=False))
    # In backward a bias is neither read nor, as part of a matmul, written: its gradient is a sum.
    assert theirs == moved(phase, FP32) - (2 * biases if phase == "train" else 0)


def test_grouped_heads_are_read_once():
    """Eager PyTorch repeats shared keys and values for every head; we count them once. The difference is the copies."""
    config, _ = short("llama3.1-8b")
    ours = total(t for t in terms(config, 2, 64, "forward", FP32) if t.flops).bytes
    theirs = sum(row.bytes for row in traced(config, 2, 64).matmuls())
    copies = 2 * config.n_layers * 2 * 64 * (config.n_heads - config.n_kv_heads) * config.d_head * 4
    assert theirs - ours == copies


@pytest.mark.parametrize("name", ["gpt2", "llama3.1-8b"])
def test_torchs_counter_agrees(name):
    config = preset(name).with_(n_layers=2)
    model = build(config, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 100, dtype=torch.long, device="meta")).sum().backward()
    assert counter.get_total_flops() == flops(config, 1, 100, "train")


def test_a_real_pass_and_a_meta_pass_are_one():
    config = preset("smollm2-135m").with_(n_layers=1, vocab_size=128)
    with torch.no_grad(), Trace() as real:
        build(config)(torch.zeros(1, 7, dtype=torch.long))
    assert real.flops == traced(config, 1, 7).flops


def test_a_lookup_reads_what_it_takes_out():
    table, ids = torch.zeros(1000, 8), torch.tensor([[3, 5, 999]])
    with Trace() as trace:
        torch.nn.functional.embedding(ids, table)
        table[ids[0]]
    assert [row.bytes for row in trace.rows] == [2 * 3 * 8 * 4 + 3 * 8] * 2


def test_405_billion_parameters_cost_nothing():
    config = preset("llama3.1-405b")
    assert traced(config, 1, 128).flops == flops(config, 1, 128)


def test_helpers():
    assert even(7, 3).tolist() == [3, 2, 2]
    assert nbytes(torch.zeros(1, 3, 1).expand(5, 3, 1)) == 12
    for name, how in {
        "gpt2": dict(phase="generate"),
        "bert-base-uncased": dict(phase="decode"),
        "t5-small": {},
    }.items():
        with pytest.raises(ValueError, match="phase|source"):
            traced(preset(name), **how)
    with pytest.raises(ValueError, match="decoder"):
        traced(preset("t5-small"), 1, 3, "decode", source=4)
