"""A model is an object that people copy, pickle and send to other processes, before and after it has learnt."""

import copy
import io
import pickle

import pytest
import torch

from llmstack.architectures import build
from llmstack.config import preset

TINY = dict(d_model=16, n_layers=2, n_heads=2, d_head=8, n_kv_heads=2, d_ff=24, vocab_size=50, max_seq_len=32)
SIZES = {
    "gpt2": TINY,
    "llama3.1-8b": TINY,
    "bert-base-uncased": TINY,
    "t5-small": TINY,
    "mixtral-8x7b": TINY | dict(n_experts=4, d_expert=8),
    "deepseek-v2-lite": TINY | dict(n_layers=3, n_experts=4, d_expert=8, top_k=2, kv_lora_rank=8, qk_rope_head_dim=4),
    "mamba-130m": dict(d_model=16, n_layers=2, vocab_size=50, dt_rank=4),
}


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, through_pickle, through_a_file])
@pytest.mark.parametrize("name", SIZES)
def test_a_copy_of_a_model_that_has_learnt_says_the_same(name, again):
    model = build(preset(name).with_(**SIZES[name]))
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    inputs = (ids, ids) if model.config.kind == "encoder-decoder" else (ids,)
    out = model(*inputs)
    out.square().mean().backward()
    twin = again(model)
    assert torch.equal(twin(*inputs), out)
    assert all(a is not b for a, b in zip(twin.parameters(), model.parameters()))
