"""Losses are transformers' on the same weights; what is hidden or cut out has the published shares and lengths."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmstack.architectures import build, load
from llmstack.config import ModelConfig
from llmstack.execution.data import IGNORE, packed, padded, windows
from llmstack.execution.objectives import corrupting, masked_token, masking, next_token, pair, text_to_text

V = 99
EXAMPLES = [torch.randint(3, V, (n,), generator=torch.Generator().manual_seed(n)) for n in (13, 4, 9, 2)]


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """(theirs, ours) of a decoder, an encoder with its head and an encoder-decoder, with the same random weights."""
    import transformers as t

    small = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    makes = dict(
        decoder=lambda: t.LlamaForCausalLM(t.LlamaConfig(**small, pad_token_id=0)),
        encoder=lambda: t.BertForMaskedLM(t.BertConfig(**small)),
        both=lambda: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
    )
    out = {}
    for name, make in makes.items():
        torch.manual_seed(0)
        theirs = make().eval()
        theirs.save_pretrained(folder := tmp_path_factory.mktemp(name))
        out[name] = theirs, load(folder)
    return SimpleNamespace(**out)


def close(ours, theirs, count):
    total, n = ours
    assert n == count
    torch.testing.assert_close(total, theirs.loss * count, rtol=1e-5, atol=0)


def test_next_token(peers):
    theirs, ours = peers.decoder
    batch = padded(EXAMPLES, 4)(0)
    real = batch["padding"].long()
    labels = torch.cat([torch.full((4, 1), IGNORE), batch["targets"]], 1)  # theirs shift by one: ids have one more
    ids, real = (torch.cat([x, x[:, :1]], 1) for x in (batch["ids"], real))
    close(next_token(ours, batch), theirs(ids, attention_mask=real, labels=labels), 24)


def test_masked_token(peers):
    theirs, ours = peers.encoder
    batch = masking(padded(EXAMPLES, 4), mask_id=1, vocab_size=V, rate=0.4)(5)
    peer = theirs(batch["ids"], attention_mask=batch["padding"].long(), labels=batch["targets"])
    close(masked_token(ours, batch), peer, int((batch["targets"] != IGNORE).sum()))
    assert (batch["targets"] != IGNORE).sum() > 3


def test_text_to_text(peers):
    theirs, ours = peers.both
    batch = padded([pair(x[:-2], x[-5:]) for x in EXAMPLES if len(x) > 2], 3)(0)
    peer = theirs(batch["source"], attention_mask=batch["source_padding"].long(), labels=batch["targets"])
    close(text_to_text(ours, batch), peer, 5 + 4 + 5 + 3)  # `pair` shifts right as theirs does from the labels


def test_a_batch_in_two_halves_has_the_same_sum():
    model, batch = build(ModelConfig("tiny", 16, 1, 2, V)), padded(EXAMPLES, 4)(0)
    whole, count = next_token(model, batch)
    halves = [next_token(model, {key: x[half] for key, x in batch.items()}) for half in (slice(2), slice(2, 4))]
    assert count == sum(n for _, n in halves) and len({n for _, n in halves}) == 2
    torch.testing.assert_close(whole, sum(loss for loss, _ in halves), rtol=1e-5, atol=0)


def runs(hidden):
    """Lengths of the runs of True in each row."""
    edges = np.diff(np.pad(hidden.numpy().astype(int), ((0, 0), (1, 1))), axis=1)
    return np.argwhere(edges == -1)[:, 1] - np.argwhere(edges == 1)[:, 1]


@pytest.mark.parametrize("p", [1.0, 0.2], ids=["tokens", "spans"])
def test_masking_has_berts_shares(p):
    plain = windows(torch.randint(10, 1000, (40_001,), generator=torch.Generator().manual_seed(0)), 400, 100)
    batch, before = masking(plain, mask_id=3, vocab_size=1000, p=p)(2), plain(2)["ids"]
    hidden = batch["targets"] != IGNORE  # [100, 400]
    assert torch.equal(batch["targets"][hidden], before[hidden]) and torch.equal(batch["ids"][~hidden], before[~hidden])
    assert hidden.float().mean() == pytest.approx(0.15, abs=0.004)
    fate = lambda x: x[hidden].float().mean().item()
    assert fate(batch["ids"] == 3) == pytest.approx(0.8, abs=0.03)
    assert fate((batch["ids"] != 3) & (batch["ids"] != before)) == pytest.approx(0.1, abs=0.025)
    assert fate(batch["ids"] == before) == pytest.approx(0.1, abs=0.025)
    assert len({x for x in batch["ids"][hidden & (batch["ids"] != 3) & (batch["ids"] != before)].tolist()}) > 50


def test_spans_are_as_long_as_spanberts():
    """At a rate so low that two hidden spans hardly touch, the runs of hidden tokens are the spans."""
    batch = masking(windows(torch.arange(400_001) % 50, 4000, 100), mask_id=60, vocab_size=50, rate=0.01, p=0.2)(0)
    lengths = runs(batch["targets"] != IGNORE)
    share = np.array([0.2 * 0.8**k for k in range(10)]) / (1 - 0.8**10)  # geometric, drawn again above 10: mean 3.797
    seen = np.array([Counter(lengths.tolist())[k] for k in range(1, 11)]) / len(lengths)
    assert share @ np.arange(1, 11) == pytest.approx(3.8, abs=0.01)  # SpanBERT, section 3.1
    assert lengths.mean() == pytest.approx(3.8, abs=0.3)
    assert abs(seen - share).max() < 0.05


def test_padding_and_what_is_never_hidden_stay():
    examples = [[1, *range(10, 10 + n), 2] for n in (3, 30, 17)]
    plain = padded(examples, 3, pad=0)
    for p in (1.0, 0.3):
        hide = masking(plain, mask_id=5, vocab_size=50, rate=0.9, p=p, never=(1, 2))
        for step in range(5):
            before, batch = plain(step), hide(step)
            stay = ~before["padding"] | (before["ids"] < 3)
            assert (batch["targets"][stay] == IGNORE).all() and torch.equal(batch["ids"][stay], before["ids"][stay])
            assert torch.equal(batch["ids"], hide(step)["ids"])
        assert not torch.equal(hide(0)["ids"][0], hide(3)["ids"][0])


def test_corruption_has_t5s_lengths_and_can_be_undone():
    """568 tokens at 15 % and spans of 3 make 512 of source and 114 of target, ends included (T5's default task)."""
    plain = windows(torch.arange(568 * 7 + 1) % 400, 568, 3)
    corrupt = corrupting(plain, sentinel=999)
    for step in range(3):
        batch, before = corrupt(step), plain(step)["ids"]
        assert batch["source"].shape == (3, 512) and batch["targets"].shape == batch["ids"].shape == (3, 114)
        assert torch.equal(batch["ids"][:, 1:], batch["targets"][:, :-1]) and (batch["ids"][:, 0] == 0).all()
        for source, target, ids in zip(batch["source"].tolist(), batch["targets"].tolist(), before.tolist()):
            spans, at = {}, None
            for token in target[:-1]:
                at = token if token > 500 else at
                spans.setdefault(at, []).extend([token] if token < 500 else [])
            assert list(spans) == list(range(999, 999 - 28, -1)) and all(spans.values())
            assert [t for token in source[:-1] for t in (spans[token] if token > 500 else [token])] == ids
            assert source[-1] == target[-1] == 1
        assert not torch.equal(corrupt(0)["source"] > 500, corrupt(1)["source"] > 500)


def test_packed_rows_are_not_for_a_state_space_model():
    """Its state would run on from one document into the next."""
    model = build(
        ModelConfig("m", 16, 1, 2, 30, activation="silu", positions="none", d_state=4, d_conv=2, expand=2, dt_rank=2)
    )
    data = packed([[1, 2, 3], [4, 5, 6]], 8, 1)
    with pytest.raises(ValueError, match="m carries a state .* windows or padded"):
        next_token(model, data(0))


def test_short_rows_are_corrupted_or_refused():
    batch = corrupting(padded([[7, 8, 9], [7] * 12], 2), sentinel=99)(0)
    assert batch["source"].shape[0] == 2 and (batch["source"] == 99).sum() == 2
    with pytest.raises(ValueError, match="1 tokens cannot be both kept and lost"):
        corrupting(padded([[7, 8]], 1), sentinel=99)(0)


def test_a_mask_of_whole_numbers_is_a_mask():
    """Tokenizers give ones and zeros, which as an index would pick the first two tokens again and again."""
    batch = padded([[7, 8, 9], [7] * 12], 2)(0)
    whole = batch | {"padding": batch["padding"].long()}
    want, got = (corrupting(lambda step: given, sentinel=99)(0) for given in (batch, whole))
    assert all(torch.equal(got[key], want[key]) for key in want)
