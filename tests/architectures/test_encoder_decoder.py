"""The two-sided models: PyTorch's nn.Transformer, gradients across and along, what is computed once, a copying task."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from llmstack import preset
from llmstack.architectures import build
from llmstack.architectures.cache import ContiguousCache
from llmstack.execution import generate
from llmstack.ops.positions import sinusoidal

SMALL = dict(d_model=32, n_layers=2, n_heads=4, d_ff=48, vocab_size=99)
ORIGINAL = preset("transformer-base-en-de").with_(**SMALL, embedding_scale=32**0.5)
T5 = preset("t5-small").with_(**SMALL, d_head=8, head_scale=32**-0.5)
WHISPER = preset("whisper-tiny.en").with_(**SMALL, n_mels=8, max_source_len=12, max_seq_len=20)
MODELS = {"2017": ORIGINAL, "t5": T5, "whisper": WHISPER}


def ids_of(B, T, seed=1):
    return torch.randint(99, (B, T), generator=torch.Generator().manual_seed(seed))


def source_of(config, B=2, S=10):
    if config.n_mels:
        return torch.randn(B, config.n_mels, 20, generator=torch.Generator().manual_seed(5))
    return ids_of(B, S, seed=5)


def model_of(name):
    model = build(MODELS[name], seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * p.requires_grad
    return model


def torch_state(stack):
    """Our stack's weights under the names of nn.TransformerEncoder and nn.TransformerDecoder."""
    state = {}
    for n, block in enumerate(stack.blocks):
        parts = {"self_attn": block.attention}
        norms = [block.norm1, block.norm2]
        if hasattr(block, "cross"):
            parts["multihead_attn"] = block.cross
            norms.insert(1, block.norm_cross)
        for name, at in parts.items():
            state[f"layers.{n}.{name}.in_proj_weight"] = torch.cat([at.q.weight, at.k.weight, at.v.weight])
            state[f"layers.{n}.{name}.out_proj.weight"] = at.o.weight
        for name, linear in (("linear1", block.ffn.up), ("linear2", block.ffn.down)):
            state |= {f"layers.{n}.{name}.{k}": v for k, v in linear.state_dict().items()}
        for i, norm in enumerate(norms):
            state |= {f"layers.{n}.norm{i + 1}.{k}": v for k, v in norm.state_dict().items()}
    return state


@torch.no_grad()
@pytest.mark.parametrize("padding", [False, True])
def test_the_2017_transformer_is_pytorchs(padding):
    ours = model_of("2017")
    how = dict(dim_feedforward=48, dropout=0.0, activation="relu", layer_norm_eps=1e-6, batch_first=True)
    peer = nn.Transformer(32, 4, 2, 2, **how).eval()
    peer.encoder.use_nested_tensor = False
    peer.encoder.norm = peer.decoder.norm = None  # the paper ends a stack with its last layer's norm
    for side in ("encoder", "decoder"):
        result = getattr(peer, side).load_state_dict(torch_state(getattr(ours, side)), strict=False)
        assert not result.unexpected_keys
        assert all(name.endswith(("in_proj_bias", "out_proj.bias")) for name in result.missing_keys)
    for name, p in peer.named_parameters():
        if name.endswith(("in_proj_bias", "out_proj.bias")):
            p.zero_()
    source, target = ids_of(3, 10), ids_of(3, 7, seed=2)
    real = torch.arange(10)[None] < torch.tensor([[10], [6], [3]]) if padding else None
    x, y = (
        ours.embed.tokens(ids) * 32**0.5 + sinusoidal(ids.shape[1], 32, interleaved=False) for ids in (source, target)
    )
    hidden = None if real is None else ~real
    order = torch.ones(7, 7, dtype=torch.bool).triu(1)
    want = peer(x, y, tgt_mask=order, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
    got = ours(source, target, real)
    torch.testing.assert_close(got, want @ ours.embed.tokens.weight.T, rtol=1e-4, atol=1e-4)
    if real is None:
        encoder, decoder = ours.hidden_states(source, target)
        torch.testing.assert_close(decoder[-1], want, rtol=1e-4, atol=1e-5)
        assert len(encoder) == len(decoder) == 3


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_the_source_and_never_the_future(name):
    """Of the loss at target position t: non-zero at every source position, exactly zero after t in the target."""
    model, target = model_of(name), ids_of(2, 6)
    seen = {}
    keep = lambda module, args, x: seen.setdefault("source" if "source" not in seen else "target", x).retain_grad()
    if MODELS[name].n_mels:
        model.frontend.register_forward_hook(keep)
    model.embed.register_forward_hook(keep)
    logits = model(source_of(MODELS[name]), target)
    cross_entropy(logits[:, 2], target[:, 3]).backward()
    assert (seen["source"].grad.abs().sum(-1) > 0).all()
    along = seen["target"].grad.abs().sum(-1)  # [B, T]
    assert (along[:, :3] > 0).all() and (along[:, 3:] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_target_token_changes_nothing_before_it_and_a_source_token_everything(name):
    model, source, target = model_of(name), source_of(MODELS[name]), ids_of(2, 6)
    before = model(source, target)
    changed = target.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 99
    after = model(source, changed)
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.isclose(before[:, 4:], after[:, 4:]).all(-1).any()
    if MODELS[name].n_mels:
        source[:, :, -1] += 1
    else:
        source[:, -1] = (source[:, -1] + 1) % 99
    assert not torch.isclose(before, model(source, target)).all(-1).any()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_the_encoder_runs_once_a_generation(name):
    """And so do the projections of what it made: cross-attention's keys and values are computed in the first pass."""
    model, calls = model_of(name), {"encoder": 0, "cross": 0, "decoder": 0}
    count = lambda which: lambda *_: calls.__setitem__(which, calls[which] + 1)
    model.encoder.blocks[0].register_forward_hook(count("encoder"))
    model.decoder.blocks[0].register_forward_hook(count("decoder"))
    model.decoder.blocks[0].cross.k.register_forward_hook(count("cross"))
    out = generate(model, ids_of(2, 1), 7, source=source_of(MODELS[name]))
    assert out.shape == (2, 8)
    assert calls == {"encoder": 1, "cross": 1, "decoder": 7}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_is_a_whole_pass(name):
    model, target = model_of(name), ids_of(2, 9)
    source = source_of(MODELS[name])
    real = None if MODELS[name].n_mels else torch.arange(10)[None] < torch.tensor([[10], [6]])
    memory = model.encode(source, real)
    whole = model.decode(target, memory, real)
    torch.testing.assert_close(whole, model(source, target, real))
    cache = ContiguousCache(model.config, 2, 9)
    parts = [model.decode(target[:, s], memory, real, cache) for s in (slice(0, 4), slice(4, 5), slice(5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padding_of_the_source_changes_nothing():
    for name in ("2017", "t5"):
        model, target, source = model_of(name), ids_of(1, 5), ids_of(1, 6, seed=5)
        alone = model(source, target)
        for left, right in ((0, 4), (3, 0)):
            wide = torch.cat([ids_of(1, left), source, ids_of(1, right)], 1)
            at = torch.arange(wide.shape[1])
            real = ((at >= left) & (at < left + 6))[None]
            torch.testing.assert_close(model(wide, target, real), alone, rtol=1e-4, atol=1e-4)


def test_refusals():
    model = model_of("whisper")
    with pytest.raises(ValueError, match=r"frames of shape \[B, 8, 1 to 24\], got \[1, 8, 25\]"):
        model(torch.zeros(1, 8, 25), ids_of(1, 2))
    with pytest.raises(ValueError, match="target ids end at position 21"):
        model(torch.zeros(1, 8, 24), torch.zeros(1, 21, dtype=torch.long))
    with pytest.raises(ValueError, match="source ids are empty"):
        model_of("t5")(torch.zeros(1, 0, dtype=torch.long), ids_of(1, 2))
    with pytest.raises(ValueError, match="target ids hold token 99"):
        model_of("t5")(ids_of(1, 2), torch.tensor([[99]]))


@pytest.mark.parametrize("name, published", [("base", 65e6), ("big", 213e6)])
def test_the_published_sizes_of_2017(name, published):
    model = build(preset(f"transformer-{name}-en-de"), device="meta")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(published, rel=0.04)


@pytest.mark.slow
def test_a_tiny_2017_transformer_learns_to_copy():
    """Ten random symbols to be said again: nearly all of them right, generated token by token from unseen input."""
    start, V, S = 0, 12, 10
    config = ORIGINAL.with_(vocab_size=V, d_ff=64)
    model = build(config, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, betas=(0.9, 0.98))
    rng = torch.Generator().manual_seed(0)
    steps = 600
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 100) * (1 - step / steps)
        source = torch.randint(1, V, (32, S), generator=rng)
        target = torch.cat([torch.full((32, 1), start), source], 1)
        loss = cross_entropy(model(source, target[:, :-1]).flatten(0, 1), source.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    source = torch.randint(1, V, (100, S), generator=rng)
    said = generate(model, torch.full((100, 1), start), S, source=source)[:, 1:]
    assert (said == source).float().mean() > 0.99, (said == source).float().mean()


@pytest.mark.parametrize("name", MODELS)
def test_a_mask_of_whole_numbers_is_a_mask(name):
    model = model_of(name)
    source = torch.randn(2, 8, 24) if name == "whisper" else torch.randint(0, 50, (2, 12))
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    assert torch.equal(model.encode(source, mask.long()), model.encode(source, mask))
