"""LoRA without PEFT: what is drawn at first, what it adds, what stands there once merged, ranks that cannot be."""

import copy

import pytest
import torch
from torch import nn

from llmstack.architectures import build
from llmstack.config import ModelConfig
from llmstack.execution.finetune.lora import LoRA, dense, lora

SMALL = ModelConfig("small", 32, 2, 4, 99, n_kv_heads=2, d_ff=48, max_seq_len=64, qkv_bias=True)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_at_first_nothing_changes_and_a_is_uniform():
    base = nn.Linear(400, 30)
    layer, x = LoRA(base, 20, 5.0, rng()), torch.randn(3, 400, generator=rng(1))
    assert torch.equal(layer(x), base(x)) and not layer.b.any()
    bound = 400**-0.5
    assert layer.a.shape == (20, 400) and layer.b.shape == (30, 20)
    assert 0.99 * bound < layer.a.max() <= bound and -bound <= layer.a.min() < -0.99 * bound
    assert layer.a.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_and_b_have_the_dtype_of_the_weight(dtype):
    layer = LoRA(nn.Linear(6, 4, dtype=dtype), 2, 1.0, rng())
    assert layer.a.dtype == layer.b.dtype == layer(torch.ones(1, 6, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("bias", [True, False])
def test_the_update_is_scaled_by_alpha_over_r_and_merges(bias):
    base = nn.Linear(7, 5, bias=bias, dtype=torch.float64)
    layer, x = LoRA(base, 3, 12.0, rng()), torch.randn(2, 7, dtype=torch.float64, generator=rng(1))
    with torch.no_grad():
        layer.b.normal_(generator=rng(2))
        update = (12 / 3) * layer.b @ layer.a
        torch.testing.assert_close(layer(x), base(x) + x @ update.T)
        torch.testing.assert_close(layer.weight, base.weight + update)
    merged = layer.merged()
    assert type(merged) is nn.Linear and (merged.bias is not None) == bias
    torch.testing.assert_close(merged(x), layer(x))
    alone = dense(base.weight, base.bias)
    assert torch.equal(alone(x), base(x)) and alone.weight is not base.weight


def test_queries_and_values_are_tuned_with_rank_8_and_twice_that():
    """The defaults: 4 r D a layer for equal widths, here with fewer values' heads."""
    tuned = lora(build(SMALL))
    assert {name.rsplit(".", 2)[-2] for name in tuned.trainable} == {"q", "v"}
    assert tuned.count == SMALL.n_layers * 8 * ((32 + 32) + (32 + 16))
    assert all(module.scale == 2 for module in tuned.model.modules() if isinstance(module, LoRA))
    same, other = lora(build(SMALL)), lora(build(SMALL), seed=1)
    first = next(iter(tuned.trainable))
    assert torch.equal(tuned.trainable[first], same.trainable[first])
    assert not torch.equal(tuned.trainable[first], other.trainable[first])
    assert not torch.equal(*[p for name, p in tuned.trainable.items() if name.endswith("q.a")])  # each its own


def test_merging_leaves_the_model_that_was():
    model, ids = build(SMALL), torch.arange(9)[None]
    plain, tuned = copy.deepcopy(model), lora(model, r=2)
    with torch.no_grad():
        for p in tuned.trainable.values():
            p.add_(0.1)
        before = model(ids)
        merged = tuned.merge()
        assert merged is model and not any(isinstance(module, LoRA) for module in model.modules())
        torch.testing.assert_close(model(ids), before)
        assert not torch.allclose(before, plain(ids))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


@pytest.mark.parametrize("r", [0, 17, 2.5])
def test_ranks_that_no_matrix_has(r):
    with pytest.raises(ValueError, match="v is 16×32: a rank is a whole number from 1 to 16|q is .* 1 to 32"):
        lora(build(SMALL), r=r)
    assert lora(build(SMALL), r=16).count == SMALL.n_layers * 16 * ((32 + 32) + (32 + 16))
