"""Every optimisation raises the intensity or lowers the operations, and keeps its results within its tolerance."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm

from llmstack.architectures import build
from llmstack.architectures.cache import ContiguousCache
from llmstack.config import preset
from llmstack.facts import accelerator
from llmstack.intensity import flops, params, roofline
from llmstack.intensity.fusion import capture, fuse
from llmstack.intensity.optimisations import MODEL, NF4_BITS, TOKENS, Optimisation, chain, optimisations
from llmstack.intensity.roof import Point
from llmstack.ops import flash, fused
from llmstack.ops.attention import attention_formula
from llmstack.ops.packed import NFLinear

ROWS = {row.name: row for row in optimisations()}
randn = lambda *shape, seed=0: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
X, Y, G, W = randn(20, 64), randn(20, 64, seed=1), randn(64, seed=2), randn(300, 64, seed=3)


def pointwise():
    graph = capture(chain, X, G, Y)
    fuse(graph)
    return chain(X, G, Y), graph(X, G, Y)


def attention():
    q, k, v = (randn(1, 2, 50, 16, seed=i) for i in range(3))
    return attention_formula(q, k, v), torch.as_tensor(flash.flash_np(*(x.numpy() for x in (q, k, v))))


def few_bits():
    layer = nn.Linear(64, 300, bias=False)
    layer.weight.data = W
    return X @ W.T, NFLinear(layer)(X)


def precision():
    narrow = lambda x: x.bfloat16().float()  # operands of 16 bits, sums of 32, as a matrix unit does it
    return X @ W.T, narrow(X) @ narrow(W).T


def cache():
    sizes = dict(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_head=8, d_ff=48, vocab_size=50)
    model, ids = build(replace(preset(MODEL), **sizes)), torch.arange(12)[None]
    kept = ContiguousCache(model.config, 1, 12)
    model(ids[:, :-1], cache=kept)
    return model(ids)[:, -1], model(ids[:, -1:], cache=kept)[:, -1]


IDS = torch.arange(20)
RUNS = {  # results before and after, and how far they may be apart
    "pointwise fusion": (pointwise, 1e-6),
    "residual + RMSNorm": (lambda: (rms_norm(X + Y, G.shape, G, 1e-6), fused.add_norm_torch(X, Y, G)[1]), 1e-6),
    "FlashAttention": (attention, 1e-6),
    "linear + cross-entropy": (
        lambda: (cross_entropy(X @ W.T, IDS), fused.linear_cross_entropy_torch(X, W, IDS)),
        1e-6,
    ),
    "4-bit weights": (few_bits, 0.15),
    "mixed precision": (precision, 1e-2),
    "KV cache": (cache, 1e-5),
}


@pytest.mark.parametrize("name", ROWS)
def test_fewer_operations_or_more_for_each_byte_and_the_same_results(name):
    row, (run, tolerance) = ROWS[name], RUNS[name]
    assert row.after.flops <= row.before.flops and row.after.bytes < row.before.bytes
    assert row.after.flops < row.before.flops or row.after.intensity > row.before.intensity
    assert row.gain > 1.2
    roof = roofline(accelerator("h100-sxm5"), [row.before, row.after])
    assert roof.seconds(row.after) <= roof.seconds(row.before)
    with torch.no_grad():
        before, after = run()
    assert (after - before).norm() <= tolerance * before.norm()


def test_what_each_saves_is_what_it_says():
    c, saved = preset(MODEL), {name: row.before.bytes - row.after.bytes for name, row in ROWS.items()}
    assert saved["residual + RMSNorm"] == 2 * TOKENS * c.d_model  # the sum, read once less
    assert saved["FlashAttention"] == pytest.approx(2 * 4 * c.n_layers * c.n_heads * TOKENS**2)  # S, P: out and back
    assert saved["linear + cross-entropy"] == 2 * 2 * TOKENS * c.vocab_size
    assert saved["pointwise fusion"] == 4 * 64 * 256 * 6  # three intermediates, written and read
    assert ROWS["mixed precision"].before.bytes == 2 * ROWS["mixed precision"].after.bytes
    assert 3 < ROWS["4-bit weights"].gain < 16 / NF4_BITS  # the cache stays
    assert NFLinear(nn.Linear(1024, 1024)).bits == pytest.approx(NF4_BITS, abs=1e-3)
    assert ROWS["KV cache"].before.flops == pytest.approx(TOKENS * ROWS["KV cache"].after.flops)


def test_points_by_hand():
    """Operations and bytes of each row, from shapes: Llama-3.1-8B at 8,192 tokens, 2 bytes a value."""
    c, R, pair = preset(MODEL), TOKENS, lambda name: (ROWS[name].before, ROWS[name].after)
    D, V, L = c.d_model, c.vocab_size, c.n_layers
    before, after = pair("residual + RMSNorm")
    assert before.flops == after.flops == 5 * R * D + 3 * R  # add; square, sum, scale, gain; a mean, ε and root a row
    assert before.bytes == after.bytes + 2 * R * D == 5 * 2 * R * D + 2 * D
    before, after = pair("linear + cross-entropy")
    assert before.flops == after.flops == 2 * R * V * D + 4 * R * V
    assert after.bytes == 2 * R * D + 2 * V * D
    before, after = pair("pointwise fusion")
    assert before.flops == after.flops == 7 * 64 * 256
    assert after.bytes == 4 * (3 * 64 * 256 + 256)  # x, r, out and b
    before, after = pair("4-bit weights")
    matrices = params(c).total - V * D  # of the table one row is read
    assert before.bytes - after.bytes == pytest.approx(2 * matrices * (1 - NF4_BITS / 16), rel=1e-12)
    assert before.flops == after.flops == flops(c, 1, R, "decode")
    before, after = pair("FlashAttention")
    assert before.flops == after.flops == 4 * L * c.n_heads * c.d_head * R**2  # two products
    assert after.bytes == 2 * L * R * c.d_head * 2 * (c.n_heads + c.n_kv_heads)  # q and out, k and v
    before, after = pair("mixed precision")
    assert before.flops == after.flops == flops(c, 1, R, "train")
    before, after = pair("KV cache")
    assert (before.flops, after.flops) == (flops(c, 1, R), flops(c, 1, R, "decode"))


def test_gain_is_the_larger_of_two():
    assert [row.name for row in optimisations()] == list(RUNS)
    more = Optimisation("", Point("", 8.0, 4.0), Point("", 8.0, 1.0))
    fewer = Optimisation("", Point("", 8.0, 4.0), Point("", 2.0, 1.0))
    assert (more.gain, fewer.gain) == (4, 4)
    assert ROWS["KV cache"].gain == pytest.approx(TOKENS)
