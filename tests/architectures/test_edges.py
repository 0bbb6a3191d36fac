"""What breaks experts, patterns, states and pictures: empty batches, dials that do not go together, silent mistakes."""

import json

import numpy as np
import pytest
import torch

from llmstack.architectures import build, load, moe_1991, save
from llmstack.architectures import moe_variants as mv
from llmstack.architectures import routers as r
from llmstack.architectures.checkpoints import CheckpointError
from llmstack.architectures.efficient_attention import blocks, grouping
from llmstack.architectures.efficient_attention.streaming import SinkCache, stream_losses
from llmstack.architectures.layers import FeedForward
from llmstack.architectures.moe import Experts, MergedMoE
from llmstack.architectures.multimodal import See, VisionLanguage, projector, prumerge, salient
from llmstack.architectures.ssm import S4D, StateCache
from llmstack.architectures.vision import ViT, contrastive_loss, patchify, tower, unpatchify
from llmstack.config import ModelConfig
from llmstack.execution.pictures import caption_ids, draw_shapes
from llmstack.ops.attention import attention_torch
from llmstack.ops.banded import banded_torch
from llmstack.ops.merge import attention_lse

SMALL = ModelConfig("small", 16, 2, 4, 23, d_ff=32)
MLA = SMALL.with_(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6, d_head=8)
MAMBA = ModelConfig("m", 16, 2, 1, 23, model_type="mamba", positions="none", activation="silu").with_(
    d_state=4, d_conv=4, expand=2, dt_rank=1, d_ff=32
)
LOGITS = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "how, message",
    [
        (dict(groups=2, groups_kept=0), "groups_kept = 0"),
        (dict(groups=2, groups_kept=3), "groups_kept = 3"),
        (dict(groups=3), "groups = 3"),
        (dict(groups=4), "hold k = 2"),
        (dict(score="tanh"), "'softmax' or 'sigmoid'"),
    ],
)
def test_top_k_refuses_what_it_would_misread(how, message):
    with pytest.raises(ValueError, match=message):
        r.top_k(LOGITS, 2, **how)


def test_groups_of_one_expert_with_sigmoid_scores():
    routing = r.top_k(LOGITS, 2, score="sigmoid", groups=4, groups_kept=2)
    assert torch.equal(routing.expert, r.top_k(LOGITS, 2, score="sigmoid").expert)


def test_rows_without_groups_are_refused():
    with pytest.raises(ValueError, match=r"\[G, N, E\]"):
        r.top_k(LOGITS[0], 2)
    assert len(r.base(LOGITS[:0]).token) == 0


def test_capacity_is_not_rounded_up_by_a_rounding_error():
    assert r.capacity_for(100, 10, 1, 1.1) == 11
    assert r.capacity_for(10, 10, 1, 1.1) == 2


def test_hash_tables_name_experts_and_fit_the_ids():
    with pytest.raises(ValueError, match="0 to 3"):
        r.hashed(LOGITS, torch.zeros(1, 6).long(), torch.tensor([9]))
    with pytest.raises(ValueError, match=r"ids \[1, 2\] must be \[1, 6\]"):
        r.hashed(LOGITS, torch.zeros(1, 2).long(), torch.tensor([0]))


def test_importance_of_no_assignments_is_even():
    assert r.importance_loss(r.top_k(LOGITS, 2, capacity=0)) == 0


def test_merged_experts_on_no_tokens():
    assert MergedMoE(Experts(4, 8, 16), 3)(torch.randn(2, 0, 8)).shape == (2, 0, 8)


def test_moefied_in_fp64_and_with_impossible_k():
    ffn = FeedForward(SMALL.with_(activation="relu")).double()
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    torch.testing.assert_close(mv.MoEfied(ffn, 4, 4)(x), ffn(x))
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k = {k}"):
            mv.MoEfied(ffn, 4, k)


def test_em_on_a_constant_and_on_bad_points():
    x = np.c_[np.linspace(-1, 1, 20), np.ones(20)]
    tree, history = moe_1991.fit(x, np.zeros(20), 2, 2, 5)
    assert np.isfinite(history).all() and np.abs(tree.predict(x)).max() < 1e-6
    for bad in ((x * np.nan, x[:, 0]), (x, x[:, :1]), (x[:0], x[:0, 0])):
        with pytest.raises(ValueError, match="without NaN"):
            moe_1991.fit(*bad, 2, 2, 2)


@pytest.mark.parametrize("change", [dict(positions="alibi"), dict(positions="none"), dict(sliding_window=3)])
def test_latent_attention_refuses_dials_that_it_would_ignore(change):
    with pytest.raises(ValueError, match="latent attention"):
        build(MLA.with_(**change))


def test_sink_cache_refuses_latents_and_halves():
    with pytest.raises(ValueError, match="latents"):
        SinkCache(MLA, 2, 2, 3)
    with pytest.raises(ValueError, match="a whole 1"):
        SinkCache(SMALL, 2, 2, 3.5)


def test_stream_losses_of_one_token_and_of_two_texts():
    model = build(SMALL)
    assert len(stream_losses(model, IDS[:1, :1], SinkCache(SMALL, 1, 2, 3))) == 0
    assert len(stream_losses(model, IDS[:1], SinkCache(SMALL, 1, 2, 3), 3)) == 8
    with pytest.raises(ValueError, match=r"\[2, 9\]"):
        stream_losses(model, IDS, SinkCache(SMALL, 2, 2, 3))
    with pytest.raises(ValueError, match="chunk = 0"):
        stream_losses(model, IDS[:1], SinkCache(SMALL, 1, 2, 3), 0)


def test_patterns_on_no_tokens():
    q = torch.randn(2, 3, 0, 4)
    assert banded_torch(q, q, q, 2, 1).shape == q.shape
    assert blocks.window_attention(q, q, q, 3).shape == q.shape
    assert blocks.strided_attention(q, q, q, 3).shape == q.shape
    out, lse = attention_lse(torch.randn(2, 3, 5, 4), q, q)
    assert not out.any() and (lse == -torch.inf).all()


def test_hubs_named_twice_count_once():
    q, k, v = torch.randn(3, 2, 3, 8, 4, dtype=torch.float64)
    torch.testing.assert_close(
        blocks.window_attention(q, k, v, 2, 1, [3, 3]), blocks.window_attention(q, k, v, 2, 1, [3])
    )
    for hub in (-1, 8):
        with pytest.raises(ValueError, match="hubs"):
            blocks.window_attention(q, k, v, 2, 1, [hub])
    with pytest.raises(ValueError, match="stride = 0"):
        blocks.column_attention(q, k, v, 0)
    with pytest.raises(ValueError, match="block = 0"):
        blocks.block_attention(q, k, v, None, 0, torch.ones(2, 2, dtype=torch.bool))


def test_groups_keep_the_dtype_and_refuse_what_has_no_heads():
    model = build(SMALL, dtype=torch.float64)
    assert next(grouping.to_groups(model, 2).parameters()).dtype == torch.float64
    for config in (MLA, MAMBA):
        with pytest.raises(ValueError, match="no key-value heads"):
            grouping.to_groups(build(config), 1)
    assert grouping.kv_values(MAMBA) == 0


@pytest.mark.parametrize("change", [dict(activation="swiglu"), dict(positions="learned"), dict(positions="sinusoidal")])
def test_mamba_refuses_dials_that_it_cannot_have(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        build(MAMBA.with_(**change))


def test_mamba_refuses_padding_between_tokens():
    model, real = build(MAMBA), torch.ones(2, 9, dtype=torch.bool)
    hole = real.clone()
    hole[0, 2:5] = False
    with pytest.raises(ValueError, match="pad left"):
        model(IDS, padding=hole)
    cache = StateCache(MAMBA, 2)
    model(IDS[:, :2], padding=hole[:, :2], cache=cache)
    with pytest.raises(ValueError, match="pad left"):
        model(IDS[:, 2:], padding=hole[:, 2:], cache=cache)
    right = real.clone()
    right[0, 6:] = False
    torch.testing.assert_close(model(IDS, padding=right)[0, :6], model(IDS[:1, :6])[0])
    with pytest.raises(ValueError, match="pad left"):
        model(IDS, padding=right, cache=StateCache(MAMBA, 2))


def test_mamba_reads_left_padding_that_ends_in_a_later_chunk():
    model, real = build(MAMBA, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
    real[0, :3] = False
    cache = StateCache(MAMBA, 2, dtype=torch.float64)
    parts = [model(IDS[:, a:b], padding=real[:, a:b], cache=cache) for a, b in ((0, 2), (2, 9))]
    torch.testing.assert_close(torch.cat(parts, 1)[0, 3:], model(IDS[:1, 3:])[0])


def test_mamba_refuses_other_batches_and_shapes():
    model = build(MAMBA)
    with pytest.raises(ValueError, match="batch 1"):
        model(IDS, cache=StateCache(MAMBA, 1))
    with pytest.raises(ValueError, match="shaped as ids"):
        model(IDS, padding=torch.ones(2, 5, dtype=torch.bool))


@pytest.mark.parametrize("field, value", [("state_size", None), ("state_size", 0), ("time_step_rank", "auto")])
def test_mamba_checkpoints_with_broken_fields(tmp_path, field, value):
    model = build(MAMBA)
    save(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    if value == "auto":  # transformers: hidden_size / 16, rounded up
        torch.testing.assert_close(load(tmp_path)(IDS), model(IDS))
    else:
        with pytest.raises(CheckpointError, match="state_size"):
            load(tmp_path)


def test_s4d_on_another_width():
    layer = S4D(4, 8)
    with pytest.raises(ValueError, match=r"\[B, T, 4\]"):
        layer(torch.randn(2, 7, 1))


def test_unpatchify_refuses_sizes_that_are_not_those():
    tokens = patchify(torch.randn(2, 3, 8, 8), (4, 4))
    for sizes in ((12, 8), (9, 9)):
        with pytest.raises(ValueError, match="not those of sizes"):
            unpatchify(tokens, (4, 4), sizes)
    assert unpatchify(tokens[:0], (4, 4), (8, 8)).shape == (0, 3, 8, 8)


def test_contrast_needs_a_right_caption_for_all():
    with pytest.raises(ValueError, match=r"\[B, B\]"):
        contrastive_loss(torch.randn(2, 3))
    with pytest.raises(ValueError, match="caption"):
        contrastive_loss(torch.randn(2, 2), torch.tensor([[True, False], [False, False]]))


def test_pruning_halves_and_uneven_batches():
    tokens, keys, attention = torch.randn(2, 10, 6), torch.randn(2, 10, 4), torch.rand(2, 10)
    assert torch.equal(salient(attention.half()), salient(attention.half().float()))
    with pytest.raises(ValueError, match="zip"):
        prumerge(tokens[:1], keys, attention, 0.5)


def test_soft_tokens_take_room_in_a_position_table():
    eye = ViT(tower("eye", 16, 1, 4, 5, d_ff=32), 4)
    model = VisionLanguage(See(eye, projector(16, 16)), build(SMALL.with_(positions="learned", max_seq_len=8)))
    assert model(IDS[:, :4], torch.randn(2, 3, 8, 8)).shape == (2, 4, 23)
    with pytest.raises(ValueError, match="position table of 8"):
        model(IDS[:, :5], torch.randn(2, 3, 8, 8))
    with pytest.raises(TypeError, match="Mamba"):
        VisionLanguage(See(eye, projector(16, 16)), build(MAMBA))


@pytest.mark.parametrize("scenes", [[-1], [128], [[0]]])
def test_scenes_that_are_none(scenes):
    for make in (caption_ids, draw_shapes):
        with pytest.raises(ValueError, match="0 to 127"):
            make(torch.tensor(scenes))


def test_queries_without_a_key_in_every_form():
    q, k, v = torch.randn(3, 2, 3, 8, 4, dtype=torch.float64)
    ahead = blocks.Mask(lambda i, j: j > i)
    out = blocks.block_attention(q, k, v, ahead, 4)
    torch.testing.assert_close(out, attention_torch(q, k, v, ahead.matrix(8)))
    assert not out[:, :, -1].any()
