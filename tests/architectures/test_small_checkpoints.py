"""The small checkpoints have learnt: their losses on held-out text are as their cards say, and below the 5-gram's.

transformers, reading the same folders, must find the same logits. The quick lane scores a sample; the slow lane
everything, and counts the 5-gram again.
"""

import importlib.util
import json
import sys

import pytest
import torch
from tokenizers import Tokenizer

from llmstack import facts
from llmstack.architectures import pretrained
from llmstack.execution import corpus

FOLDER = facts.data_path() / "checkpoints"
DECODERS, BOTH_SIDES = ["llama-2m", "gpt2-2m", "relu-2m"], ["t5-2m"]
MARGIN = 0.03  # of the 5-gram's loss, that a decoder stays below it on all held-out text


@pytest.fixture(scope="module")
def measure():
    """data/checkpoints/measure.py, where the texts are installed."""
    spec = importlib.util.spec_from_file_location("measure", FOLDER / "measure.py")
    module = sys.modules["measure"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        corpus.plays(), corpus.verses()
    except ModuleNotFoundError as absent:
        pytest.skip(str(absent))
    return module


@pytest.fixture(scope="module")
def shared():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module", params=DECODERS + BOTH_SIDES)
def checkpoint(request):
    card = json.loads((FOLDER / request.param / "card.json").read_text(encoding="utf-8"))
    return request.param, *pretrained(request.param), card


def test_it_is_small_and_its_card_says_how_it_was_made(checkpoint):
    name, model, tokenizer, card = checkpoint
    assert sum(p.numel() for p in model.parameters()) == card["parameters"] <= 2_400_000
    assert (FOLDER / name / "model.safetensors").stat().st_size < 10e6
    assert {"seed", "steps", "seconds", "digest", "held_out"} <= card.keys() and card["seconds"] < 90 * 60
    best = min(part["kneser_ney_5"] for part in card["held_out"].values())
    assert card["held_out"]["all"]["margin"] >= MARGIN and best > 1  # a bar that means something
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, 2, 0)
    assert len(tokenizer) == model.config.vocab_size == 2048


def test_every_text_survives_the_tokenizer(shared):
    text = "Wherefore — naïve 漢字 🎭\tdef f(x):\n    return {x: 'ſ'}\n\n\n"
    assert shared.decode(shared.encode(text).ids) == text
    assert shared.encode("<|start|>the<|end|>").ids[0] == 1 and shared.encode("<|end|>").ids == [2]


def test_the_loss_of_the_sample_is_the_cards(checkpoint, measure, shared):
    name, model, _, card = checkpoint
    told = card["held_out"]["sample"]
    if model.config.kind == "decoder":
        held_out = [d for d in corpus.documents(("plays", "bible")) if d.held_out]
        texts = measure.encode(shared, [d.text for d in measure.sample(held_out)])
        nats, tokens = measure.decoder_loss(model, texts)
    else:
        pairs = measure.encode_pairs(shared, measure.verse_pairs()[1][: measure.SAMPLE])
        with torch.no_grad():
            nats, tokens = measure.pair_loss(model, pairs, "sum").item(), sum(len(t) for _, t in pairs)
    assert tokens == told["tokens"]
    assert nats / tokens == pytest.approx(told["loss"], abs=2e-4)
    assert nats / tokens < told["kneser_ney_5"]


def test_verses_get_their_capitals_and_stops_back(checkpoint, measure, shared):
    _, model, _, card = checkpoint
    if model.config.kind == "decoder":
        return
    assert card["model"]["word_errors"] < 0.6 * card["word_by_word"]["word_errors"] < 0.6 * card["copy"]["word_errors"]
    for example in card["examples"]:
        [source] = measure.encode(shared, [example["source"]])
        assert shared.decode(measure.restore(model, [source])[0]) == example["restored"]


def test_relu_leaves_most_inner_values_at_zero(checkpoint, measure, shared):
    name, model, _, card = checkpoint
    if name != "relu-2m":
        return
    parts = [d.text for d in corpus.plays() if d.held_out][:8]
    assert measure.zeros(model, measure.encode(shared, parts)) == pytest.approx(card["zeros_by_layer"], abs=1e-3)
    assert min(card["zeros_by_layer"]) > 0.6


def test_transformers_finds_the_same_logits(checkpoint):
    transformers = pytest.importorskip("transformers")
    name, model, tokenizer, _ = checkpoint
    ids = torch.tensor([tokenizer.encode("Now it came to pass, that the king spake unto HAMLET:\nHow now?")])
    with torch.no_grad():
        if model.config.kind == "decoder":
            peer = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / name)
            got, want = model(ids), peer(ids).logits
        else:
            peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(FOLDER / name)
            got, want = model(ids, ids[:, :9]), peer(input_ids=ids, decoder_input_ids=ids[:, :9]).logits
    assert (got - want).norm() <= 1e-5 * want.norm()
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER / name)
    assert theirs("Now it came to pass,").input_ids == tokenizer.encode("Now it came to pass,")
    assert (theirs.eos_token_id, theirs.pad_token_id, peer.config.eos_token_id) == (2, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS + BOTH_SIDES)
def test_all_held_out_losses_and_the_5_gram_are_the_cards(name, measure):
    told = json.loads((FOLDER / name / "card.json").read_text(encoding="utf-8"))
    here = corpus.bible() if name in BOTH_SIDES else [d for side in measure.chosen() for d in side]
    if corpus.digest(here) != told["digest"]:
        pytest.skip(
            f"the texts differ from those of the card: this Python's standard library is another ({sys.version})"
        )
    card = measure.measure(name)
    for part, want in told["held_out"].items():
        assert card["held_out"][part] == pytest.approx(want, abs=2e-4), part
    if name in BOTH_SIDES:
        for who in ("model", "copy", "word_by_word"):
            assert card[who] == pytest.approx(told[who], abs=2e-3), who
