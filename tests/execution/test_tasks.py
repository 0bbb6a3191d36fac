"""The tasks are what they say, their losses count the right targets, and small models beat what needs no model."""

import re
import runpy
from random import Random

import pytest
import torch
from torch.nn.functional import cross_entropy

from llmstack import facts
from llmstack.config import ModelConfig
from llmstack.execution import corpus, data, tasks

FOLDER = facts.data_path() / "tasks"
MARGINS = {"translation": 0.3, "summary": 0.3, "sentiment": 0.3, "extraction": 0.3}  # above the best bar
SMALL = dict(n_heads=2, d_model=16, n_layers=1, max_seq_len=64)


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(FOLDER / "train.py"))


@pytest.fixture(scope="module")
def results():
    return facts.table("tasks/results")


# --- examples


def test_cipher_and_summary():
    assert tasks.cipher("the lord said") == ("the lord said", "rug qeby qvnf")
    assert tasks.summary("and god said let there be light").target == "god said let light"


def test_verses_keep_to_their_side():
    """As many as the corpus' chapters of that side have, and nothing but small letters."""
    try:
        held = {d.name for d in corpus.documents("bible") if d.held_out}
    except ModuleNotFoundError as absent:
        pytest.skip(str(absent))
    of = [(name in held, text) for name, text in corpus.verses()]
    for side in (False, True):
        found = tasks.verses(3, side)
        assert len(found) == sum(here == side for here, _ in of) and len(found) > 1000
        assert set("".join(found)) <= set(tasks.SMALL) and max(len(v.split()) for v in found) == 3


def test_a_review_means_its_label():
    for seed in range(100):
        text, label = tasks.review(Random(seed))
        clauses = re.split(" (?:but|and) ", text)
        means = [(c.split()[-1] in tasks.OF["good"]) != (" not " in c) for c in clauses]
        assert means[1] == (label == "good") and (means[0] == means[1]) == (" and " in text)


def test_a_passage_holds_its_answer_once():
    for seed in range(100):
        text, place = tasks.passage(Random(seed))
        name = text.split()[2]
        assert text.count(f"{name} is at {place} .") == 1 and text.count(f"{name} is") == 1


@pytest.mark.parametrize("digits", [1, 4])
def test_written_steps_are_a_right_addition(digits):
    for seed in range(50):
        source, target = tasks.addition(Random(seed), digits)
        a, b = source.rstrip("!").split("+")
        *columns, total = target.split()
        assert int(total) == int(a) + int(b) and len(columns) == digits and len(a) == len(b) == digits
        written = ""
        for column in columns:
            left, right = column.split("=")
            assert sum(map(int, left.split("+"))) == int(right)
            written = right[-1] + written
        assert int(right[0] + written) == int(total)
        assert tasks.addition(Random(seed), digits, steps=False) == (source.replace("!", "?"), total)


def test_shots_follow_a_mapping_and_new_ones_are_never_trained_on():
    for seed in range(50):
        for new in (False, True):
            text = tasks.shots(Random(seed), 60, new).target
            pairs = dict(zip(text[::2], text[1::2]))
            assert text == "".join(k + pairs[k] for k in text[::2])
            if len(pairs) == len(tasks.KEYS):
                assert (sum(tasks.VALUES.index(v) for v in pairs.values()) % 4 == 0) == new


# --- batches and answers


def test_alphabet_goes_both_ways_and_refuses():
    letters, words = tasks.Alphabet(["abc "]), tasks.Alphabet(["the red mill"], str.split)
    assert letters.decode([tasks.START, *letters.encode("a cab"), tasks.END, 0]) == "a cab" and len(letters) == 7
    assert words.decode(words.encode("mill the")) == "mill the"
    with pytest.raises(ValueError, match=r"'x'.*6|\['x'\].*4 symbols"):
        letters.encode("ax")


def test_a_decoder_learns_the_answer_alone():
    alphabet = tasks.Alphabet(["0123456789+=!? "])
    row = tasks.encoded(tasks.Example("1+2?", "03"), alphabet, "decoder")
    assert row["ids"] == [tasks.START, *alphabet.encode("1+2?03")]
    assert row["targets"] == [data.IGNORE] * 4 + [*alphabet.encode("03"), tasks.END]


@pytest.fixture(scope="module")
def reader():
    return tasks.Reader(ModelConfig("r", kind="encoder", vocab_size=80, **SMALL), seed=1).double()


def test_labels_and_spans_are_plain_cross_entropies(reader):
    rng, alphabet = Random(0), tasks.Alphabet([tasks.passage(Random(s)).source for s in range(60)], str.split)
    rows = [tasks.encoded(tasks.passage(rng), alphabet, "encoder") for _ in range(5)]
    batch = data.collate(rows)
    total, count = tasks.read_loss(reader, batch)
    want = 0
    for row in rows:
        scores = reader(torch.tensor([row["ids"]]))[0].T  # [2, T]
        want = want + cross_entropy(scores, torch.tensor(row["span"]), reduction="sum")
    assert count == 10
    torch.testing.assert_close(total, want)
    alphabet = tasks.Alphabet([tasks.review(Random(s)).source for s in range(60)], str.split)
    examples = [tasks.review(rng) for _ in range(5)]
    batch = data.collate([tasks.encoded(e, alphabet, "encoder") for e in examples])
    scores = torch.cat([reader(torch.tensor([[tasks.START, *alphabet.encode(e.source)]]))[:, 0] for e in examples])
    want = cross_entropy(scores, torch.tensor([int(e.target == "good") for e in examples]), reduction="sum")
    torch.testing.assert_close(tasks.read_loss(reader, batch)[0], want)


def test_a_span_holds_the_words_of_the_answer():
    alphabet = tasks.Alphabet([tasks.passage(Random(s)).source for s in range(60)], str.split)
    for seed in range(30):
        example = tasks.passage(Random(seed))
        row = tasks.encoded(example, alphabet, "encoder")
        first, last = row["span"]
        assert alphabet.decode(row["ids"][first : last + 1]) == example.target


def test_answers_point_at_the_best_span_that_does_not_end_before_it_starts():
    alphabet = tasks.Alphabet(["a b c d"], str.split)

    class Fixed(torch.nn.Module):
        config = ModelConfig("f", kind="encoder", vocab_size=8, **SMALL)

        def forward(self, ids, padding):
            start, end = [0.0, 0, 0, 900, 0], [0.0, 899, 0, 0, 898]  # of <start> a b c d
            return torch.tensor([start, end]).T[None]

    assert tasks.answers(Fixed(), alphabet, ["a b c d"], kind="span") == ["c d"]


def test_a_reader_depends_on_its_seed_alone(reader):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = tasks.Reader(reader.config, seed=1).double()
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(again.head.weight, reader.head.weight)
    assert not torch.equal(tasks.Reader(reader.config, seed=2).head.weight, again.head.weight)


def test_a_span_that_the_source_lacks_is_refused():
    with pytest.raises(ValueError, match="'c' is no span of 'a b'"):
        tasks.encoded(tasks.Example("a b", "c"), tasks.Alphabet(["a b c"], str.split), "encoder")


def test_metrics():
    assert tasks.letters("abcd", "abxd") == 0.75 and tasks.letters("ab", "abcd") == 0.5 == tasks.letters("abcd", "ab")
    assert tasks.shared("god said", "god said let light") == pytest.approx(2 * 2 / 6)
    assert tasks.shared("", "") == 0 and tasks.exact("a", "a") == 1.0 and tasks.exact("a", "b") == 0.0


# --- what was learnt: data/tasks/results.toml, and samples of it made again


def test_each_family_beats_what_needs_no_model(results):
    for task, margin in MARGINS.items():
        model, bars = results[task]["model"], results[task]["bars"]
        assert model >= max(bars.values()) + margin, task
    generation = results["generation"]
    assert generation["model"] <= generation["bars"]["3-gram"] - 0.1  # nats a letter


def test_sentiment_trained_here_beats_counting_words(script):
    """A hundred and fifty steps of the encoder."""
    result = script["family"]("sentiment", steps=150)
    assert result["model"] >= max(result["bars"].values()) + MARGINS["sentiment"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["translation", "extraction"])
def test_families_train_again_as_stored(script, results, task):
    """The same bars, and a model above them by the margin that the stored one has.

    How far above depends on the processor: 1,200 steps amplify its rounding (extraction: 0.99 stored, 0.82 elsewhere).
    """
    result = script["family"](task)
    assert result["bars"] == pytest.approx(results[task]["bars"])
    assert result["model"] >= max(result["bars"].values()) + MARGINS[task]


def test_steps_make_sums_right(script, results):
    """With as many sums; with as many tokens, which are 3.5 times the sums, sums alone are learnt as well."""
    told = results["addition"]
    assert told["steps"]["asked with !"] >= told["alone"]["asked with ?"] + 0.5
    assert told["alone"]["sums"] == told["steps"]["sums"] == told["both"]["sums"]
    assert told["alone, as many tokens"]["tokens"] >= told["steps"]["tokens"]
    assert told["steps"]["asked with !"] >= told["alone, as many tokens"]["asked with ?"]
    assert told["alone, then tuned on steps"]["asked with !"] >= told["alone"]["asked with ?"] + 0.5
    model, alphabet = script["load"](FOLDER / "addition"), script["alphabet_of"]("addition", [])
    right = {steps: script["right"](model, alphabet, steps, 60) for steps in (True, False)}
    assert right[True] == pytest.approx(told["both"]["asked with !"], abs=0.05)
    assert right[False] == pytest.approx(told["both"]["asked with ?"], abs=0.1)
    assert right[True] >= right[False] + 0.5


def test_accuracy_rises_with_shots_on_new_mappings(script, results):
    told = results["shots"]
    model, alphabet, rng = script["load"](FOLDER / "shots"), script["alphabet_of"]("shots", []), Random(5)
    texts = [tasks.shots(rng, 24, new=True).target for _ in range(300)]
    accuracy = script["by_shots"](model, torch.tensor([alphabet.encode(t) for t in texts]))
    assert accuracy[1:] == sorted(accuracy[1:]) and accuracy[-1] > accuracy[0] + 0.6
    assert accuracy == pytest.approx(told["accuracy"], abs=0.09)
    # no one can know a value before its key was shown: seen, or one guess in eight
    for got, most in zip(told["accuracy"], told["ceiling"], strict=True):
        assert got <= most + 0.04
    assert told["accuracy"][-1] >= told["ceiling"][-1] - 0.06
    assert told["after_8"][0] < 0.35 < 0.6 < told["after_8"][-1]
    assert max(map(max, told["heads"])) > 0.5


@pytest.mark.slow
def test_smollm2_learns_a_relation_from_shots(script, results):
    told = results["smollm2"]
    for name in tasks.OF["pairs"]:
        assert told[name][-1] >= told[name][0] + 0.5
    from llmstack.architectures import pretrained
    from llmstack.architectures.zoo import MissingModel

    try:
        model, tokenizer = pretrained("smollm2-135m")
    except MissingModel as absent:
        pytest.skip(str(absent))
    for at in (0, 3):
        again = script["few_shot"](model, tokenizer, script["pairs"]("opposite"), told["shots"][at], 20)
        assert again == pytest.approx(told["opposite"][at], abs=0.051)


def test_a_fixed_model_gains_from_tokens_and_a_smaller_one_at_equal_compute(results):
    runs = results["sweep"]["runs"]
    for d in {r["d_model"] for r in runs}:
        losses = [r["loss"] for r in sorted(runs, key=lambda r: r["tokens"]) if r["d_model"] == d]
        assert len(losses) >= 3 and losses == sorted(losses, reverse=True)
