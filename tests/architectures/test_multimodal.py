"""Pictures before a decoder: CLIP and the projector are transformers', the rest keeps its invariants and learns."""

import copy
import math

import pytest
import torch
import transformers as t
from peers import close, ids_of, peer
from torch import nn
from torch.nn.functional import cross_entropy

from llmstack import facts, preset
from llmstack.architectures import build
from llmstack.architectures.multimodal import (
    Resampler,
    See,
    Tiled,
    TileLinear,
    VisionLanguage,
    projector,
    prumerge,
    salient,
)
from llmstack.architectures.vision import (
    CLIP,
    ViT,
    contrastive_loss,
    load_clip,
    patchify,
    start,
    tower,
    unpatchify,
    visual_tokens,
)
from llmstack.config import ModelConfig
from llmstack.execution import pictures

SIDE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
READ = dict(vocab_size=99, max_position_embeddings=16, bos_token_id=96, pad_token_id=98)
WORDS = len(pictures.WORDS)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vit(size=24, patch=6, channels=3, d_model=32, **more):
    return ViT(tower("vit", d_model, 2, 4, 1 + (size // patch) ** 2, d_ff=2 * d_model, **more), patch, channels)


def decoder(d_model=48, vocab_size=WORDS):
    return build(ModelConfig("writer", d_model, 2, 4, vocab_size, d_ff=96, max_seq_len=32))


# ---------------------------------------------------------------------------------------------------------- patches


@pytest.mark.parametrize(
    "sizes, patch", [((24, 24), (6, 6)), ((6, 9), (2, 3)), ((4, 6, 8), (2, 3, 2)), ((5,), (1,))], ids=str
)
def test_patches_are_put_together_again(sizes, patch):
    x = random(2, 3, *sizes)
    tokens = patchify(x, patch)
    assert tokens.shape == (2, math.prod(s // p for s, p in zip(sizes, patch)), 3 * math.prod(patch))
    assert torch.equal(unpatchify(tokens, patch, sizes), x)


def test_patches_are_what_a_strided_convolution_reads():
    x, w = random(2, 3, 12, 18), random(7, 3, 6, 6, seed=1)
    close(patchify(x, (6, 6)) @ w.flatten(1).T, nn.functional.conv2d(x, w, stride=6).flatten(2).transpose(1, 2))
    film, w = random(2, 3, 4, 12, 6), random(5, 3, 2, 6, 3, seed=1)
    same = nn.functional.conv3d(film, w, stride=(2, 6, 3)).flatten(2).transpose(1, 2)
    close(patchify(film, (2, 6, 3)) @ w.flatten(1).T, same)


@pytest.mark.parametrize(
    "sizes, patch", [((25, 24), (6, 6)), ((24, 4), (6, 6)), ((24, 24), (6,)), ((4, 6, 7), (2, 3, 2))], ids=str
)
def test_what_does_not_tile_is_refused(sizes, patch):
    with pytest.raises(ValueError, match="do not tile into patches.*multiple.*resize, crop or pad to"):
        patchify(torch.zeros(1, 3, *sizes), patch)


def test_a_picture_of_another_size_is_refused():
    with pytest.raises(
        ValueError, match=r"images of \[30, 24\] are 20 patches of 6, but vit has positions for 16; resize"
    ):
        vit()(torch.zeros(1, 3, 30, 24))


# ------------------------------------------------------------------------------------------------------------- CLIP


@pytest.mark.parametrize("eos, act", [(2, "quick_gelu"), (97, "gelu")])
@torch.no_grad()
def test_clip_is_transformers(eos, act, tmp_path):
    see, read = (
        dict(SIDE, image_size=24, patch_size=6, hidden_act=act),
        dict(SIDE, **READ, eos_token_id=eos, hidden_act=act),
    )
    theirs = peer(lambda: t.CLIPModel(t.CLIPConfig(vision_config=see, text_config=read, projection_dim=20)))
    theirs.save_pretrained(tmp_path)
    ours = load_clip(tmp_path)
    images, ids = random(3, 3, 24, 24), ids_of(4, 9, V=90)
    ids[0, 4:], ids[1, 8], ids[2, 2], ids[3, 5] = 97, 97, 97, 97
    want = theirs(ids, images)
    close(ours(images, ids), want.logits_per_image)
    close(ours.pictures(images), want.image_embeds)
    close(ours.sentences(ids), want.text_embeds)
    close(ours.vision(images), want.vision_model_output.last_hidden_state)
    close(ours.vision.pooled(images), theirs.vision_model(images).pooler_output)
    count = lambda model: sum(p.numel() for p in model.parameters())
    assert count(ours) == count(theirs)


def test_contrastive_loss_is_transformers():
    from transformers.models.clip.modeling_clip import image_text_contrastive_loss

    logits = random(5, 5)
    torch.testing.assert_close(contrastive_loss(logits), image_text_contrastive_loss(logits.T))
    same = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).bool()
    sure = torch.where(same, 0.0, -1e4)
    torch.testing.assert_close(contrastive_loss(sure, same), torch.tensor(2 * math.log(2) / 3))


def test_what_the_class_token_attends_to_is_what_transformers_says(tmp_path):
    see, read = dict(SIDE, image_size=24, patch_size=6), dict(SIDE, **READ, eos_token_id=2)
    config = t.CLIPConfig(vision_config=see, text_config=read, attn_implementation="eager")
    theirs = peer(lambda: t.CLIPModel(config))
    theirs.save_pretrained(tmp_path)
    images = random(2, 3, 24, 24)
    with torch.no_grad():
        want = theirs.vision_model(images, output_attentions=True)
        tokens, keys, attention = load_clip(tmp_path).vision.salience(images)
    close(attention, want.attentions[-1].mean(1)[:, 0, 1:])
    close(tokens, want.last_hidden_state[:, 1:])
    assert keys.shape == (2, 16, 32)


def train(parameters, loss, steps, lr=3e-3):
    optimizer = torch.optim.AdamW(parameters, lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        schedule.step()


def test_a_clip_learns_digits_in_seconds():
    """Real pictures: after 200 batches it names unseen digits by the nearest of ten sentences."""
    try:
        images, labels = pictures.digits()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    assert images.shape == (5000, 1, 28, 28) and labels.bincount().tolist() == [500] * 10
    captions = torch.tensor([[1, 2, 3 + d, 13] for d in range(10)])
    model = CLIP(vit(28, 7, 1, 48), tower("names", 32, 1, 4, 4, 14), d_shared=16)

    def loss(step):
        at = slice(64 * step % 4032, 64 * step % 4032 + 64)
        return contrastive_loss(model(images[at], captions[labels[at]]), labels[at, None] == labels[at])

    train(model.parameters(), loss, 200)
    with torch.no_grad():
        named = model(images[4500:], captions).argmax(-1)
    assert (named == labels[4500:]).float().mean() > 0.7, "chance is 0.1"


# ------------------------------------------------------------------------------------------------------- connectors


def test_the_projector_is_llavas():
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**SIDE), text_config=t.LlamaConfig(hidden_size=24, num_attention_heads=4)
    )
    theirs, ours, x = LlavaMultiModalProjector(config), projector(32, 24), random(2, 5, 32)
    ours[0].load_state_dict(theirs.linear_1.state_dict())
    ours[2].load_state_dict(theirs.linear_2.state_dict())
    close(ours(x), theirs(x))
    ours(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in ours.parameters())


def test_the_resampler_gives_q_tokens_for_any_number_in_any_order():
    model = Resampler(12, 32, queries=5, n_layers=2)
    for N in (1, 7, 40):
        x = random(2, N, 12)
        assert model(x).shape == (2, 5, 32)
        close(model(x[:, torch.randperm(N)]), model(x))
    assert not torch.allclose(model(x), model(x + 1)), "it reads them"


def test_salient_tokens_are_the_outliers():
    attention = torch.full((2, 20), 0.01) + torch.arange(20) * 1e-4
    attention[0, 3], attention[0, 11] = 0.3, 0.2
    keep = salient(attention)
    assert keep[0].nonzero().flatten().tolist() == [3, 11]
    assert keep[1].nonzero().flatten().tolist() == [19], "no outlier: the largest alone"
    low, high = (torch.tensor(__import__("numpy").percentile(attention[0], q)) for q in (25, 75))
    assert torch.equal(keep[0], attention[0] > high + 1.5 * (high - low))
    assert salient(attention, 0.25).sum(-1).tolist() == [5, 5] and salient(attention, 1).all()
    with pytest.raises(ValueError, match="ratio = 0.*over 0 and at most 1"):
        salient(attention, 0)


def test_prumerge():
    x, keys, attention = random(2, 20, 6), random(2, 20, 4, seed=1), random(2, 20, seed=2).softmax(-1)
    merged, real = prumerge(x, keys, attention, ratio=1)
    assert torch.equal(merged, x) and real.all(), "nothing dropped, nothing changed"
    counts = [prumerge(x, keys, attention, ratio=r)[0].shape[1] for r in (0.1, 0.25, 0.5)]
    assert counts == [2, 5, 10]
    attention[0, 3], attention[0, 5], attention[1, 7] = 2.0, 2.0, 3.0
    merged, real = prumerge(x, keys, attention, neighbours=2)
    assert real.tolist() == [[True, True], [True, False]] and merged.shape == (2, 2, 6)
    likeness = nn.functional.cosine_similarity(keys[1, 7], keys[1], dim=-1)
    group = [7, *[j for j in likeness.argsort(descending=True).tolist() if j != 7][:2]]
    weights = attention[1, group] / attention[1, group].sum()
    close(merged[1, 0], weights @ x[1, group])


@torch.no_grad()
def test_monkeys_tiles():
    """Tokens = (tiles + 1) × queries; with the paper's sizes 896 × 1344 by 448 and 256 queries, 1792."""
    encoder, resampler = vit(12, 4), Resampler(32, 24, queries=3)
    model, images = Tiled(encoder, resampler, 12), random(2, 3, 24, 36)
    out = model(images)
    assert out.shape == (2, (6 + 1) * 3, 24)
    close(out[:, 9:12], resampler(encoder(images[:, :, 12:, :12])[:, 1:]))
    assert (visual_tokens(896, 1344, 448) + 1) * 256 == 1792
    with pytest.raises(ValueError, match=r"sizes \[24, 30\] do not tile into patches of \[12, 12\]"):
        model(images[..., :30])


def test_each_tile_has_its_adapter():
    """At first they add nothing. Then tile t of a picture is seen as an encoder sees it into whose matrices the
    adapters of tile t are merged; the frozen encoder gets no gradient."""
    plain, images = vit(12, 4), random(2, 3, 12, 24)
    resampler = Resampler(32, 24, queries=3)
    want = Tiled(plain, resampler, 12)(images)
    model = Tiled(copy.deepcopy(plain), resampler, 12, rank=2, tiles=2)
    close(model(images), want)
    adapters = [m for m in model.encoder.modules() if isinstance(m, TileLinear)]
    assert len(adapters) == 6 * plain.config.n_layers  # q, k, v, o, up, down
    for i, adapter in enumerate(adapters):
        nn.init.normal_(adapter.B, std=0.1, generator=torch.Generator().manual_seed(i))
    out = model(images)
    assert (out - want).abs().max() > 1e-3
    for at, tile in enumerate((images[..., :12], images[..., 12:])):
        merged = copy.deepcopy(plain)
        linears = [m for b in merged.blocks for part in (b.attention, b.ffn) for m in part.children()]
        for linear, adapter in zip([m for m in linears if isinstance(m, nn.Linear)], adapters):
            linear.weight.data += (adapter.B[at] @ adapter.A[at]).detach()
        close(out[:, 3 * at : 3 * at + 3], resampler(merged(tile)[:, 1:]))
    out.sum().backward()
    for name, p in model.encoder.named_parameters():
        assert (p.grad is not None) == name.endswith((".A", ".B")), name


# --------------------------------------------------------------------------------------------- the model that captions


def seeing(connector="projector", ratio=1.0):
    torch.manual_seed(0)
    link = projector(32, 48) if connector == "projector" else Resampler(32, 48, queries=4)
    return VisionLanguage(See(vit(), link, ratio), decoder())


@torch.no_grad()
def test_without_pictures_it_is_the_decoder():
    model, ids = seeing(), ids_of(2, 7, V=WORDS)
    assert torch.equal(model(ids), model.decoder(ids))
    seen = model(ids, random(2, 3, 24, 24))
    assert seen.shape == (2, 7, WORDS) and not torch.allclose(seen, model(ids))


@torch.no_grad()
@pytest.mark.parametrize("ratio", [0.25, None])
def test_soft_tokens_stand_before_the_text(ratio):
    """The logits are those of a decoder whose embedding holds the soft tokens as words; pruned ones are not seen."""
    model, ids, images = seeing(ratio=ratio), ids_of(1, 5, V=WORDS), random(1, 3, 24, 24)
    soft, real = model.see(images)
    assert real.all() and soft.shape[1] < 16
    wide = build(model.decoder.config.with_(vocab_size=WORDS + soft.shape[1]))
    state = {k: v for k, v in model.decoder.state_dict().items() if "tokens" not in k and "head" not in k}
    wide.load_state_dict(state, strict=False)
    wide.embed.tokens.weight.copy_(torch.cat([model.decoder.embed.tokens.weight, soft[0]]))
    wide.out.head.weight[:WORDS] = model.decoder.out.head.weight
    whole = torch.cat([WORDS + torch.arange(soft.shape[1])[None], ids], 1)
    close(model(ids, images), wide(whole)[:, soft.shape[1] :, :WORDS])


@torch.no_grad()
def test_pictures_with_fewer_tokens_are_padded():
    model, ids, images = seeing(ratio=None), ids_of(4, 5, V=WORDS), random(4, 3, 24, 24)
    images[1] *= 0
    soft, real = model.see(images)
    assert real.sum(-1).unique().numel() > 1, "counts differ"
    for b in range(4):
        close(model(ids, images)[b : b + 1], model(ids[b : b + 1], images[b : b + 1]))


def test_a_frozen_decoder_stays_as_it_was():
    """LLaVA's first stage trains the connector alone."""
    model, ids, images = seeing(), ids_of(4, 7, V=WORDS), random(4, 3, 24, 24)
    before = model(ids).detach()
    model.decoder.requires_grad_(False)
    loss = lambda step: cross_entropy(model(ids, images)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    first = loss(0).item()
    train([p for p in model.parameters() if p.requires_grad], loss, 3)
    assert loss(0).item() < first and torch.equal(model(ids), before)


def test_drawn_shapes_are_what_their_captions_say():
    scenes = torch.arange(len(pictures.SCENES))
    images, ids = pictures.draw_shapes(scenes), pictures.caption_ids(scenes)
    assert images.shape == (128, 3, 24, 24) and ids.shape == (128, 7) and 0 <= images.min() and images.max() <= 1
    assert torch.equal(images, pictures.draw_shapes(scenes)) and not torch.equal(
        images, pictures.draw_shapes(scenes, seed=1)
    )
    assert all(0 <= part <= 1 for colour in pictures.COLOURS.values() for part in colour)
    coloured = images.amax(1) > 0.3  # [128, 24, 24]
    y, x = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    middle = lambda at: (coloured * at).sum((1, 2)) / coloured.sum((1, 2))
    for number, (_, _, _, vertical, horizontal) in enumerate(pictures.SCENES):
        assert (middle(x)[number] > 11.5) == (horizontal == "right") and (middle(y)[number] > 11.5) == (
            vertical == "bottom"
        )
    large = torch.tensor([s[0] == "large" for s in pictures.SCENES])
    assert coloured.sum((1, 2))[large].float().mean() > 2 * coloured.sum((1, 2))[~large].float().mean()
    assert [pictures.WORDS[i] for i in ids[0]] == ["<start>", *pictures.SCENES[0], "<end>"]


@pytest.mark.slow
@pytest.mark.parametrize("connector, least", [("projector", 0.5), ("resampler", 0.3)])
def test_it_learns_captions_that_it_has_not_seen(connector, least):
    """Captions of held-out combinations of words; chance is 1 in 128. Other pictures, or none, and it must guess."""
    model = seeing(connector)
    start(model.decoder, 0)
    seen = torch.tensor([s for s in range(len(pictures.SCENES)) if s not in pictures.UNSEEN])
    rng = torch.Generator().manual_seed(0)

    def loss(step):
        scenes = seen[torch.randint(len(seen), (64,), generator=rng)]
        ids, images = pictures.caption_ids(scenes), pictures.draw_shapes(scenes, seed=step + 1)
        return cross_entropy(model(ids, images)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    train(model.parameters(), loss, 400)
    scenes = torch.tensor(pictures.UNSEEN * 5)
    ids, images = pictures.caption_ids(scenes), pictures.draw_shapes(scenes)
    right = lambda images: (model.caption(ids[:, :1], images, 6) == ids).all(-1).float().mean().item()
    assert right(images) > least
    assert right(None) < 0.05 and right(images.roll(1, 0)) < 0.05 and right(torch.full_like(images, 0.5)) < 0.1


@torch.no_grad()
def test_the_stored_models_find_and_caption_what_they_have_not_seen():
    """data/checkpoints/train_shapes.py has trained them; the fewer tokens PruMerge leaves, the less is right."""
    clip, model = pictures.shape_models(trained=True)
    scenes = torch.tensor(pictures.UNSEEN * 4)
    ids, images = pictures.caption_ids(scenes), pictures.draw_shapes(scenes)
    found = clip(images, pictures.caption_ids(torch.arange(len(pictures.SCENES)))).argmax(-1)
    assert (found == scenes).float().mean() > 0.9, "among 128 captions"

    def right(images, ratio=1.0):
        model.see.ratio = ratio
        return (model.caption(ids[:, :1], images, 6) == ids).all(-1).float().mean().item()

    whole, half, eighth = (right(images, ratio) for ratio in (1.0, 0.5, 0.125))
    assert whole > 0.85 and whole > half > eighth
    assert right(None) < 0.05 and right(images.roll(1, 0)) < 0.05, "no picture, or another's"


# ------------------------------------------------------------------------------------------------------ other senses


@torch.no_grad()
def test_a_film_and_a_sound_stand_before_the_text_too():
    """Any module that gives [B, Q, D] will do: films' patches through a resampler, Whisper's encoder after log-mel."""
    from llmstack.architectures.audio import log_mel

    model, ids = decoder(), ids_of(2, 7, V=WORDS)
    film = nn.Sequential(nn.Linear(3 * 2 * 6 * 6, 32), Resampler(32, 48, queries=4))
    logits = VisionLanguage(film, model)(ids, patchify(random(2, 3, 4, 12, 12), (2, 6, 6)))
    assert logits.shape == (2, 7, WORDS)
    whisper = build(
        ModelConfig(
            "ear", 32, 1, 4, 9, kind="encoder-decoder", model_type="whisper", norm="layernorm", norm_bias=True,
            activation="gelu", positions="learned", n_mels=80, max_source_len=50, max_seq_len=8, qkv_bias=True,
        )
    )  # fmt: skip
    frames = torch.from_numpy(log_mel(0.1 * random(2 * 16000).numpy(), seconds=1))[None].expand(2, -1, -1)
    listening = VisionLanguage(Hear(whisper, Resampler(32, 48, queries=4)), model)
    heard = listening(ids, frames)
    assert heard.shape == (2, 7, WORDS) and not torch.allclose(heard, model(ids))


class Hear(nn.Module):
    def __init__(self, whisper, connector):
        super().__init__()
        self.whisper, self.connector = whisper, connector

    def forward(self, frames):
        return self.connector(self.whisper.encode(frames))


@pytest.mark.parametrize("name", ["gemini", "gpt-4", "gpt-4o", "sora"])
def test_closed_models_have_no_shape(name):
    assert facts.table("models")["undisclosed"][name]["source"]
    with pytest.raises(KeyError, match="has not published its shape"):
        preset(name)


def test_visual_tokens_are_the_published_ones():
    assert visual_tokens(224, 224, 16) == 196 and visual_tokens(224, 224, 32) == 49, "ViT-B/16 and B/32"
    assert visual_tokens(336, 336, 14) == 576 and 5 * visual_tokens(336, 336, 14) == 2880, "LLaVA-1.5, LLaVA-NeXT"
