"""Encoders see both ways, padding is never seen, and masks hide whole spans."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from llmstack import preset
from llmstack.architectures import build
from llmstack.architectures.encoder import span_masking

SMALL = dict(d_model=32, n_layers=2, n_heads=4, d_ff=48, vocab_size=99, max_seq_len=64)
BERT = preset("bert-base-uncased").with_(**SMALL)


def ids_of(B, T, V=99, seed=1):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def model_of(config=BERT):
    model = build(config)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_stands_in_padding_changes_nothing(side):
    model, ids = model_of(), ids_of(2, 12)
    real = torch.ones(2, 12, dtype=torch.bool)
    pad = slice(0, 4) if side == "left" else slice(8, 12)
    real[1, pad] = False
    before = model(ids, real)
    ids[1, pad] = ids[1, pad].flip(0)
    permuted = model(ids, real)
    ids[1, pad] = 7
    assert torch.equal(before[real], permuted[real]) and torch.equal(before[real], model(ids, real)[real])
    assert torch.equal(model.pooled(before, real), model.pooled(permuted, real))


@torch.no_grad()
def test_a_token_changes_what_comes_before_it():
    model, ids = model_of(), ids_of(1, 9)
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 99
    assert not torch.isclose(model(ids)[0, :8], model(changed)[0, :8]).all(-1).any()


def test_longer_than_the_position_table_or_empty():
    model = build(BERT)
    with pytest.raises(ValueError, match="position table of 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match="are empty"):
        model(torch.zeros(1, 0, dtype=torch.long))


def spans_of(T, rng):
    """Spans of one to four tokens with gaps, after a first token that none covers."""
    out, at = [], 1
    while True:
        width = int(torch.randint(1, 5, (), generator=rng))
        if at + width > T:
            return out
        out.append((at, at + width))
        at += width + int(torch.rand((), generator=rng) < 0.3)


def test_masks_cover_whole_spans_at_the_stated_rates():
    """Spans are hidden whole or not at all; 15 % of the tokens; of the spans 80 / 10 / 10; the rest untouched."""
    rng = torch.Generator().manual_seed(0)
    B, T, mask_id, V = 400, 64, 1000, 990
    ids = torch.randint(V, (B, T), generator=rng)
    spans = [spans_of(T, rng) for _ in range(B)]
    inputs, targets = span_masking(ids, spans, mask_id, vocab_size=V, rate=0.15, seed=3)
    fates = {"mask": 0, "random": 0, "same": 0}
    covered = torch.zeros(B, T, dtype=torch.bool)
    for b, row in enumerate(spans):
        for start, stop in row:
            covered[b, start:stop] = True
            hidden = targets[b, start:stop] != -100
            assert hidden.all() or not hidden.any()
            if not hidden.all():
                continue
            assert torch.equal(targets[b, start:stop], ids[b, start:stop])
            masked, same = inputs[b, start:stop] == mask_id, inputs[b, start:stop] == ids[b, start:stop]
            assert masked.all() or not masked.any()
            fates["mask" if masked.all() else "same" if same.all() else "random"] += 1
    chosen = targets != -100
    assert not chosen[~covered].any() and torch.equal(inputs[~chosen], ids[~chosen])
    assert chosen.sum() / covered.sum() == pytest.approx(0.15, abs=0.01)
    total = sum(fates.values())
    assert total > 1000
    for fate, share in (("mask", 0.8), ("random", 0.1), ("same", 0.1)):
        assert fates[fate] / total == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / total))


def test_spans_of_one_token_are_berts_masking_and_seeds_repeat():
    ids = ids_of(1, 2000)
    spans = [[(t, t + 1) for t in range(2000)]]
    inputs, targets = span_masking(ids, spans, 100, 99, rate=0.15, seed=1)
    assert (targets != -100).sum() == 300
    assert torch.equal(span_masking(ids, spans, 100, 99, seed=1)[0], inputs)
    assert not torch.equal(span_masking(ids, spans, 100, 99, seed=2)[0], inputs)


def test_spans_that_overlap_or_leave_the_text():
    for row in ([(0, 3), (2, 4)], [(4, 9)], [(3, 3)], [(-1, 2)]):
        with pytest.raises(ValueError, match="spans of row 0 must be ranges within 8 tokens, none overlapping"):
            span_masking(ids_of(1, 8), [row], 100, 99)


@pytest.mark.slow
def test_masked_training_on_real_text_beats_unigram_entropy():
    """A small BERT on the standard library's prose, letter by letter: held-out masked loss under unigram entropy."""
    from collections import Counter
    from pydoc_data import topics

    prose = " ".join(topics.topics[key] for key in sorted(topics.topics)).lower()
    names = {letter: i for i, (letter, _) in enumerate(Counter(prose).most_common(60))}
    unknown, mask_id, V, T = 60, 61, 62, 32
    text = torch.tensor([names.get(letter, unknown) for letter in prose[: len(prose) // T * T]]).view(-1, T)
    held, train = text[::40], text[torch.arange(len(text)) % 40 != 0]
    p = torch.bincount(train.flatten(), minlength=V).float() / train.numel()
    unigram = -(p[p > 0] * p[p > 0].log()).sum().item()  # what is left to guess without any context
    model = build(BERT.with_(d_model=64, d_ff=128, vocab_size=V, max_seq_len=T, mlm=True, pooler=False))
    spans = [[(t, t + 1) for t in range(T)]]

    def loss_of(rows, seed):
        inputs, targets = span_masking(rows, spans * len(rows), mask_id, V, seed=seed)
        hidden = targets != -100
        return cross_entropy(model.masked_logits(model(inputs)[hidden]), targets[hidden])

    steps, batch, rate = 500, 32, 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 50) * (1 - step / steps)
        rows = train[torch.randint(len(train), (batch,), generator=torch.Generator().manual_seed(step))]
        optimizer.zero_grad()
        loss_of(rows, step).backward()
        optimizer.step()
    with torch.no_grad():
        held_out = loss_of(held, steps).item()
    assert held_out < unigram - 0.25, (held_out, unigram)  # 2.8 against 3.2


def test_heads_and_types_that_are_not_there():
    ids, plain = torch.tensor([[1, 2]]), build(preset("bert-base-uncased").with_(**SMALL, pooler=False, mlm=False))
    hidden = plain(ids)
    for call, dial in ((plain.pooled, "pooler"), (plain.masked_logits, "mlm"), (plain.next_sentence, "mlm and pooler")):
        with pytest.raises(ValueError, match=f"has no such head; build it with {dial}"):
            call(hidden)
    with pytest.raises(IndexError, match="token_types has 2, but the table has rows 0 to 1"):
        plain(ids, token_types=torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="spans are given for 2 rows, ids have 1"):
        span_masking(ids, [[(0, 1)], [(0, 1)]], mask_id=1, vocab_size=9)
