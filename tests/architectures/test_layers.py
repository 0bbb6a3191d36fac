"""The parts of a block, each against PyTorch's own or against what must hold of it."""

import pytest
import torch
from torch import nn

from llmstack import preset
from llmstack.architectures import build, save
from llmstack.architectures.ends import prepare
from llmstack.architectures.layers import Attention, Block, FeedForward, Pass
from llmstack.config import ModelConfig, ffn_width
from llmstack.ops.attention import attention_formula
from llmstack.ops.deepnorm import deepnorm_constants

BIASED = dict(norm="layernorm", norm_bias=True, qkv_bias=True, out_bias=True, ffn_bias=True, activation="relu")
BASE = ModelConfig("small", 32, 2, 4, 50, positions="none", **BIASED)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def shaken(module, seed=0):
    rng = seeded(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=rng) + (p.ndim == 1))
    return module


def zeroed(block):
    """Sublayers that give zeros."""
    for sub in (block.attention.o, block.ffn.down, *([block.cross.o] if hasattr(block, "cross") else [])):
        nn.init.zeros_(sub.weight)
        nn.init.zeros_(sub.bias)
    return block


def torch_attention(attention, config):
    """nn.MultiheadAttention with the same weights; its mask is True where attention is not allowed."""
    peer = nn.MultiheadAttention(config.d_model, config.n_heads, batch_first=True)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]))
        peer.in_proj_bias.copy_(torch.cat([attention.q.bias, attention.k.bias, attention.v.bias]))
        peer.out_proj.load_state_dict(attention.o.state_dict())
    return peer


@pytest.mark.parametrize("place", ["pre", "none"])
@pytest.mark.parametrize("parallel", [False, True])
def test_with_zeroed_sublayers_a_block_is_the_identity(place, parallel):
    if parallel and place == "none":
        pytest.skip("a parallel block has its norm")
    config = BASE.with_(norm_place=place, parallel=parallel)
    x = torch.randn(2, 5, 32, generator=seeded())
    block = zeroed(shaken(Block(config)))
    assert torch.equal(block(x, Pass(causal=True)), x)
    cross = zeroed(shaken(Block(BASE.with_(norm_place=place), cross=True)))
    assert torch.equal(cross(x, Pass(causal=True, memory=x)), x)


def test_after_zeroed_sublayers_a_post_norm_block_is_its_norms():
    block = zeroed(shaken(Block(BASE.with_(norm_place="post"))))
    x = torch.randn(2, 5, 32, generator=seeded())
    torch.testing.assert_close(block(x, Pass()), block.norm2(block.norm1(x)))


def test_the_gradient_through_the_identity_path_is_one():
    x = torch.randn(2, 5, 32, generator=seeded(), requires_grad=True)
    dy = torch.randn(2, 5, 32, generator=seeded(1))
    (dx,) = torch.autograd.grad(zeroed(shaken(Block(BASE)))(x, Pass(causal=True)), x, dy)
    assert torch.equal(dx, dy)
    block = shaken(Block(BASE))  # with live sublayers: the identity's gradient, and theirs on top
    (whole,) = torch.autograd.grad(block(x, Pass(causal=True)), x, dy)
    branches = lambda x: block(x, Pass(causal=True)) - x
    (theirs,) = torch.autograd.grad(branches(x), x, dy)
    torch.testing.assert_close(whole - dy, theirs, rtol=1e-4, atol=1e-4)
    assert theirs.abs().max() > 0.1


@pytest.mark.parametrize("mask", ["all", "causal", "padded"])
def test_multi_head_attention_is_pytorchs(mask):
    attention = shaken(Attention(BASE))
    peer = torch_attention(attention, BASE)
    x = torch.randn(3, 7, 32, generator=seeded())
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3, [True] * 2 + [False] * 5])
    now, hidden, blocked = Pass(), None, None
    if mask == "causal":
        now.causal, blocked = True, torch.ones(7, 7, dtype=torch.bool).triu(1)
    if mask == "padded":
        now.mask, hidden = real[:, None, None], ~real
    want, _ = peer(x, x, x, key_padding_mask=hidden, attn_mask=blocked, need_weights=False)
    torch.testing.assert_close(attention(x, now), want)


def test_one_head_is_the_formula():
    config = BASE.with_(n_heads=1)
    attention = shaken(Attention(config))
    x = torch.randn(2, 6, 32, generator=seeded())
    q, k, v = (y[:, None] for y in attention.project(x))
    torch.testing.assert_close(attention(x, Pass()), attention.o(attention_formula(q, k, v)[:, 0]))


def test_cross_attention_is_pytorchs_and_as_long_as_its_queries():
    attention = shaken(Attention(BASE, cross=True))
    x, memory = torch.randn(2, 4, 32, generator=seeded()), torch.randn(2, 9, 32, generator=seeded(1))
    real = torch.arange(9)[None] < torch.tensor([[9], [5]])
    got = attention(x, Pass(memory=memory, memory_mask=real[:, None, None]))
    want, _ = torch_attention(attention, BASE)(x, memory, memory, key_padding_mask=~real, need_weights=False)
    assert got.shape == x.shape
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("biases", ["all", "none", "no key"])
def test_fused_projections_are_the_separate_ones(heads, biases, tmp_path):
    config = BASE.with_(n_kv_heads=heads, qkv_bias=biases != "none", k_bias=biases != "no key")
    attention = shaken(Attention(config))
    x = torch.randn(2, 6, 32, generator=seeded())
    want = attention(x, Pass(causal=True))
    parameters = sum(p.numel() for p in attention.parameters())
    attention.fuse()
    torch.testing.assert_close(attention(x, Pass(causal=True)), want)
    assert [name for name, _ in attention.named_children()] == ["o", "qkv"]
    assert sum(p.numel() for p in attention.parameters()) == parameters + 8 * heads * (biases == "no key")
    model = build(config)
    model.blocks[0].attention.fuse()
    with pytest.raises(ValueError, match="save the model before it is fused"):
        save(model, tmp_path)


def test_grouped_heads_are_repeated_heads():
    """GQA equals MHA whose keys and values are copies within a group."""
    config = BASE.with_(n_kv_heads=2)
    grouped, full = shaken(Attention(config)), Attention(BASE)
    copy = lambda t: t.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    state = grouped.state_dict()
    full.load_state_dict({k: copy(v) if k[0] in "kv" else v for k, v in state.items()})
    x = torch.randn(2, 6, 32, generator=seeded())
    torch.testing.assert_close(grouped(x, Pass(causal=True)), full(x, Pass(causal=True)))


def test_ffn_is_pytorchs_sequential():
    ffn = shaken(FeedForward(BASE))
    peer = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
    peer[0].load_state_dict(ffn.up.state_dict())
    peer[2].load_state_dict(ffn.down.state_dict())
    x = torch.randn(2, 5, 32, generator=seeded())
    torch.testing.assert_close(ffn(x), peer(x))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "geglu_tanh", "swiglu"])
def test_ffn_sees_each_token_alone(activation):
    """In double precision, since a product of fewer rows may sum in another order."""
    ffn = shaken(FeedForward(BASE.with_(activation=activation))).double()
    x = torch.randn(2, 9, 32, generator=seeded(), dtype=torch.float64)
    order = torch.randperm(9, generator=seeded())
    torch.testing.assert_close(ffn(x[:, order]), ffn(x)[:, order])
    torch.testing.assert_close(ffn(x[:, 3]), ffn(x)[:, 3])


def test_ffn_holds_two_thirds_of_a_classic_block():
    config = ModelConfig("classic", 96, 1, 4, 50, norm="rmsnorm", activation="relu", positions="none")
    block = Block(config)
    count = lambda module: sum(p.numel() for name, p in module.named_parameters() if "norm" not in name)
    assert count(block.ffn) == 8 * 96**2 and count(block) == 12 * 96**2
    gated = FeedForward(config.with_(activation="swiglu", d_ff=8 * 96 // 3))
    assert count(gated) == count(block.ffn)


@pytest.mark.parametrize(
    "name, multiple_of, multiplier",
    [
        ("llama-7b", 256, 1.0),
        ("llama-13b", 256, 1.0),
        ("llama-33b", 256, 1.0),
        ("llama-65b", 256, 1.0),
        ("llama2-70b", 4096, 1.3),
        ("llama3-8b", 1024, 1.3),
    ],
)
def test_the_width_rule_gives_the_published_widths(name, multiple_of, multiplier):
    config = preset(name)
    width = ffn_width(config.d_model, multiple_of, multiplier)
    known = {4096: 11008, 5120: 13824, 6656: 17920, 8192: 22016}
    assert width == config.d_ff == {"llama2-70b": 28672, "llama3-8b": 14336}.get(name, known[config.d_model])
    assert 2.6875 <= width / config.d_model <= (2.7 if multiplier == 1.0 else 3.5)


def update(norm, layers, rate=1e-3):
    """How far one step of gradient descent on the matrices moves the output of an encoder (root mean square)."""
    shape = dict(kind="encoder", norm_bias=True, norm_place="post", final_norm=False, positions="none", d_ff=32)
    config = ModelConfig("deep", 16, layers, 2, 32, norm="deepnorm", activation="relu", **shape)
    model = build(config, seed=1)
    if norm == "layernorm":  # the same draw without β
        state = model.state_dict()
        for name, weight in state.items():
            if name.split(".")[-2] in ("v", "o", "up", "down"):
                weight /= deepnorm_constants(layers)[1]
        model = build(config.with_(norm="layernorm"))
        model.load_state_dict(state)
    ids, target = (torch.randint(16, (4, 8), generator=seeded(s)) for s in (0, 3))
    y = model(ids)
    nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()).backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("blocks") and "norm" not in name:
                p -= rate * p.grad
        return (model(ids) - y).pow(2).mean().sqrt().item()


def test_deepnorm_bounds_the_update_as_depth_grows():
    """Post-LN's grows and jumps with depth; DeepNorm's is the same at 10 layers and at 100 (arXiv:2203.00555, § 3)."""
    deep = [update("deepnorm", n) for n in (10, 40, 100)]
    post = [update("layernorm", n) for n in (10, 40, 100)]
    assert max(deep) < 1.1 * min(deep)
    assert min(post) > 100 * max(deep) and post[-1] > 10 * post[0]


@pytest.mark.slow
def test_deepnorm_bounds_the_update_at_a_thousand_layers():
    assert update("deepnorm", 1000) == pytest.approx(update("deepnorm", 10), rel=0.1)


def test_a_deepnorm_block_is_the_formula():
    config = BASE.with_(norm="deepnorm", norm_place="post", n_layers=18)
    block = shaken(Block(config))
    alpha, beta = (2 * 18) ** 0.25, (8 * 18) ** -0.25
    x = torch.randn(2, 5, 32, generator=seeded())
    norm = lambda n, y: nn.functional.layer_norm(y, (32,), n.weight, n.bias, config.norm_eps)
    h = norm(block.norm1, alpha * x + block.attention(x, Pass()))
    torch.testing.assert_close(block(x, Pass()), norm(block.norm2, alpha * h + block.ffn(h)))
    built = build(config.with_(d_ff=32)).blocks[0]  # with fan-in = fan-out = 32 Xavier's variance is 1/32
    assert built.attention.v.weight.std().item() == pytest.approx(beta * 32**-0.5, rel=0.1)
    assert built.attention.q.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)


def test_padding_is_shaped_as_ids():
    with pytest.raises(ValueError, match=r"padding must be shaped as ids, \[2, 3\].*got \[2, 4\]"):
        prepare(BASE, torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4))
