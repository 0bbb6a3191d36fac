"""Shared key-value heads: pooling a checkpoint, and what a cache keeps, against published sizes."""

import csv
from pathlib import Path

import pytest
import torch

from llmstack import preset
from llmstack.architectures import build
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.efficient_attention.grouping import kv_values, to_groups
from llmstack.config import ModelConfig

CONFIG = ModelConfig("mha", 32, 2, 8, 50, d_ff=48, max_seq_len=64, qkv_bias=True)
PUBLISHED = list(csv.DictReader((Path(__file__).parents[2] / "reference" / "kv_cache.csv").open(encoding="utf-8")))


@pytest.fixture
def model():
    model = build(CONFIG).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


def ids():
    return torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_as_many_groups_as_heads_is_the_same_model(model):
    torch.testing.assert_close(to_groups(model, 8)(ids()), model(ids()), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_that_agree_lose_nothing(model, groups):
    """When the heads of each group are equal, their mean is each of them."""
    for block in model.blocks:
        for part in (block.attention.k, block.attention.v):
            for p in (part.weight, part.bias):
                first = p.unflatten(0, (groups, 8 // groups, 4))[:, :1]
                p.copy_(first.expand(-1, 8 // groups, *first.shape[2:]).flatten(0, 2))
    pooled = to_groups(model, groups)
    assert pooled.config.n_kv_heads == groups and pooled.blocks[0].attention.k.weight.shape == (4 * groups, 32)
    torch.testing.assert_close(pooled(ids()), model(ids()), rtol=1e-4, atol=1e-5)


def test_each_head_is_the_mean_of_its_group(model):
    before = model.blocks[1].attention.v.weight.view(8, 4, 32)
    after = to_groups(model, 2).blocks[1].attention.v.weight.view(2, 4, 32)
    torch.testing.assert_close(after, torch.stack([before[:4].mean(0), before[4:].mean(0)]))
    twice, once = to_groups(to_groups(model, 4), 1), to_groups(model, 1)
    torch.testing.assert_close(twice.blocks[0].attention.k.bias, once.blocks[0].attention.k.bias)


@pytest.mark.parametrize("groups", [8, 4, 2, 1])
def test_the_cache_shrinks_by_heads_over_groups(groups):
    sizes = {K: ContiguousCache(CONFIG.with_(n_kv_heads=K), 1, 16) for K in (8, groups)}
    held = {K: cache.k.nbytes + cache.v.nbytes for K, cache in sizes.items()}
    assert held[8] == held[groups] * (8 // groups)
    assert held[groups] == 16 * 4 * kv_values(CONFIG.with_(n_kv_heads=groups))


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda r: r["preset"])
def test_bytes_for_a_token_are_the_published_ones(row):
    assert 2 * kv_values(preset(row["preset"])) == int(row["bytes_per_token_fp16"])


def test_groups_have_to_divide_the_heads(model):
    for groups in (0, 3):
        with pytest.raises(ValueError, match=f"n_kv_heads = {groups} does not divide the 8 of mha"):
            to_groups(model, groups)
