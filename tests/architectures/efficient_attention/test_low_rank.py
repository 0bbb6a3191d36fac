"""Linformer and Nyström attention, and Longformer, against exact attention and against transformers' models."""

import pytest
import torch
import transformers as t

from llmstack.architectures.efficient_attention.blocks import pairs, window_attention
from llmstack.architectures.efficient_attention.lowrank import linformer_attention, newton_inverse, nystrom_attention

WIDE = dict(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=8)


def qkv(T=24, H=2, Dh=8):
    return [torch.randn(2, H, T, Dh, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(3)]


def dense(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def shaken(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.4 * torch.randn_like(p))
    return module.eval()


def heads(linear, x, H=4):
    return linear(x).unflatten(-1, (H, -1)).transpose(1, 2)  # [B, H, T, Dh]


def test_linformer_with_all_rows_is_exact_in_any_order():
    q, k, v = qkv()
    I = torch.eye(24, dtype=torch.float64)
    torch.testing.assert_close(linformer_attention(q, k, v, I, I), dense(q, k, v))
    shuffled = I[torch.randperm(24, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(linformer_attention(q, k, v, shuffled, shuffled), dense(q, k, v))
    E, F = torch.randn(2, 6, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linformer_attention(q, k, v, E, F), dense(q, E @ k, F @ v))


def test_nystrom_with_a_landmark_for_each_token_is_exact():
    q, k, v = qkv(T=12)
    torch.testing.assert_close(nystrom_attention(q, k, v, 12, iterations=0), dense(q, k, v))
    torch.testing.assert_close(nystrom_attention(q, k, v, 12, iterations=40), dense(q, k, v), rtol=1e-4, atol=1e-5)


def test_nystrom_is_exact_where_queries_agree_within_segments():
    q, k, v = qkv()
    q = q[:, :, ::6].repeat_interleave(6, 2)  # four segments
    torch.testing.assert_close(nystrom_attention(q, k, v, 4, iterations=0), dense(q, k, v))
    assert (nystrom_attention(q, k, v, 2, iterations=0) - dense(q, k, v)).abs().max() > 0.01


def test_the_inverse_by_products():
    A = torch.randn(3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    off = [float((newton_inverse(A, n) @ A - torch.eye(5)).norm()) for n in (2, 10, 30)]
    assert off[0] > off[1] > off[2] and off[2] < 1e-8


@pytest.mark.parametrize("conv", [None, 5])
def test_nystrom_equals_transformers(conv):
    config = t.NystromformerConfig(**WIDE, num_landmarks=6, segment_means_seq_len=24, conv_kernel_size=5)
    theirs = shaken(t.models.nystromformer.modeling_nystromformer.NystromformerSelfAttention(config))
    theirs.double().conv_kernel_size = conv
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = (heads(part, x) for part in (theirs.query, theirs.key, theirs.value))
    out = nystrom_attention(q, k, v, 6, conv=theirs.conv.weight if conv else None)
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), theirs(x)[0])


@pytest.mark.parametrize("hubs", [[], [0], [0, 5, 23]], ids=str)
def test_window_and_globals_equal_transformers_longformer(hubs):
    config = t.LongformerConfig(**WIDE, attention_window=[8])
    theirs = shaken(t.models.longformer.modeling_longformer.LongformerSelfAttention(config, 0))
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0))
    kind = torch.zeros(2, 24)
    kind[:, hubs] = 10000.0
    how = dict(is_index_masked=kind < 0, is_index_global_attn=kind > 0, is_global_attn=bool(hubs))
    expected = theirs(x, attention_mask=kind, **how)[0]
    q, k, v = (heads(part, x) for part in (theirs.query, theirs.key, theirs.value))
    own = tuple(heads(part, x) for part in (theirs.query_global, theirs.key_global, theirs.value_global))
    out = window_attention(q, k, v, 5, ahead=4, hubs=hubs, hub_qkv=own)
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), expected, rtol=1e-4, atol=1e-5)


def test_work_is_linear_in_length():
    E = {T: torch.ones(8, T) / T for T in (128, 256)}
    linformer = {T: pairs(lambda q, k, v, T=T: linformer_attention(q, k, v, E[T], E[T]), T) for T in E}
    assert linformer[256] == 2 * linformer[128] <= 256 * 8 * 3
    work = {T: pairs(nystrom_attention, T, landmarks=8, iterations=0) for T in (128, 256, 512)}
    assert work[512] - work[256] == 2 * (work[256] - work[128])


def test_bad_input():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"E and F are \[n, S\] for S = 24 keys, got \[6, 20\].*pad the sequence"):
        linformer_attention(q, k, v, torch.ones(6, 20), torch.ones(6, 20))
    for landmarks in (0, 7):
        with pytest.raises(ValueError, match=f"landmarks = {landmarks} does not divide T = 24"):
            nystrom_attention(q, k, v, landmarks)
