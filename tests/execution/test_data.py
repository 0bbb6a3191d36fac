"""Batches are functions of the step; every token is seen once an epoch; packed documents do not see each other."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmstack.architectures import build
from llmstack.config import ModelConfig
from llmstack.execution.data import IGNORE, fill, first_fit, packed, padded, windows
from llmstack.execution.objectives import next_token

DOCS = [list(range(3 * i, 3 * i + n)) for i, n in enumerate((5, 9, 2, 12, 1, 7, 4, 3, 8, 6))]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("n, length, batch", [(101, 10, 5), (107, 10, 4), (11, 10, 3), (1000, 7, 8)])
def test_windows_show_every_token_once_an_epoch(n, length, batch):
    data, rows = windows(range(n), length, batch, seed=3), (n - 1) // length
    seen = torch.cat([data(step)["ids"] for step in range(3 * rows)])  # [3 rows · batch, length]
    assert torch.equal(torch.cat([data(step)["targets"] for step in range(3 * rows)]), seen + 1)
    epochs = seen[: rows * 3].view(3, rows, length)
    for epoch in epochs:
        assert torch.equal(epoch.flatten().sort().values, torch.arange(rows * length))
    if rows > 4:
        assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: windows(range(200), 8, 3, seed),
        lambda seed: packed(DOCS, 12, 3, seed),
        lambda seed: padded([d for d in DOCS if len(d) > 1], 3, seed),
    ],
    ids=["windows", "packed", "padded"],
)
def test_a_batch_depends_on_seed_and_step_alone(make):
    first, second, other = make(0), make(0), make(1)
    late = [first(step) for step in (7, 0, 30)]
    assert all(equal(b, second(step)) for b, step in zip(late, (7, 0, 30)))
    assert not all(equal(b, other(step)) for b, step in zip(late, (7, 0, 30)))


@pytest.mark.parametrize("positions", ["rope", "learned", "alibi", "sinusoidal"])
def test_a_packed_row_has_the_losses_and_gradients_of_its_documents_alone(positions):
    model = build(ModelConfig("tiny", 16, 2, 2, 40, max_seq_len=12, positions=positions))
    batch = packed(DOCS, 12, 4)(0)
    assert batch["documents"].max() >= 2 and not batch["padding"].all()
    total, count = next_token(model, batch)
    total.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = [next_token(model, padded([d], 1)(0)) for d in DOCS if len(d) > 1]
    assert len(first_fit([len(d) - 1 for d in DOCS if len(d) > 1], 12)) == 4  # so one batch is one epoch
    assert count == sum(n for _, n in alone) == sum(len(d) - 1 for d in DOCS)
    sum(loss for loss, _ in alone).backward()
    torch.testing.assert_close(total, sum(loss for loss, _ in alone), rtol=1e-5, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-3, atol=1e-5)
    blind = {key: batch[key] for key in ("ids", "targets", "padding")}
    assert (next_token(model, blind)[0] - total).abs() > 1e-4 * total


def test_documents_too_long_are_refused_split_or_cut():
    docs = [[1, 2], list(range(12)), [], [5]]
    with pytest.raises(ValueError, match="document 1 has 12 tokens, but a row takes 5 .*'split' or 'truncate'"):
        packed(docs, 5, 1)
    pairs = lambda how: sorted(
        (a, b)
        for step in range(3 if how == "split" else 2)
        for a, b in zip(*(packed(docs, 5, 1, too_long=how)(step)[key].flatten().tolist() for key in ("ids", "targets")))
        if b != IGNORE
    )
    bigrams = [(i, i + 1) for i in range(11)]
    assert pairs("split") == sorted([(1, 2), *bigrams])  # nothing lost, nothing twice
    assert pairs("truncate") == sorted([(1, 2), *bigrams[:5]])
    with pytest.raises(ValueError, match="too_long = 'drop', but it must be one of raise, split, truncate"):
        packed(docs, 5, 1, too_long="drop")
    exact = packed([range(6)], 5, 1)(0)
    assert exact["padding"].all() and exact["targets"].tolist() == [[1, 2, 3, 4, 5]]


@given(st.lists(st.integers(1, 20), max_size=60))
def test_first_fit_takes_the_first_row_with_room(lengths):
    want: list[list[int]] = []
    for i, n in enumerate(lengths):
        for row in want:
            if sum(lengths[j] for j in row) + n <= 20:
                row.append(i)
                break
        else:
            want.append([i])
    assert first_fit(lengths, 20) == want


def test_packing_leaves_less_empty_than_padding():
    draw = torch.Generator().manual_seed(0)
    docs = [torch.zeros(n, dtype=torch.long) for n in torch.randint(2, 66, (400,), generator=draw).tolist()]
    rows = len(first_fit([len(d) - 1 for d in docs], 64))
    in_rows, filled = packed(docs, 64, rows)(0), padded(docs, len(docs))(0)
    assert fill(in_rows) == in_rows["padding"].sum() / (64 * rows) > 0.9
    assert 0.55 > fill(filled) == pytest.approx(sum(len(d) - 1 for d in docs) / (64 * 400))
    assert fill(windows(range(99), 8, 2)(0)) == 1


def test_padding_marks_what_is_real():
    examples = [
        {"ids": [5, 6, 7], "targets": [IGNORE, 7, 8], "source": [4]},
        {"ids": [5], "targets": [6], "source": [4, 3]},
    ]
    batch = padded(examples, 2, seed=1, pad=9)(0)
    long = int(batch["ids"][1, 1] == 6)
    assert batch["ids"][1 - long].tolist() == [5, 9, 9] and batch["targets"][1 - long].tolist() == [6, IGNORE, IGNORE]
    assert batch["padding"][1 - long].tolist() == [True, False, False] and batch["padding"][long].all()
    assert batch["source"][long].tolist() == [4, 9] and batch["source_padding"][long].tolist() == [True, False]


def test_bad_data_is_refused():
    for make in (lambda: windows([], 4, 1), lambda: windows(range(4), 4, 1), lambda: packed([], 4, 1)):
        with pytest.raises(ValueError, match="is the corpus empty"):
            make()
    with pytest.raises(ValueError, match="no examples: is the corpus empty"):
        padded([], 1)
    with pytest.raises(ValueError, match="example 1 has 2 ids and 1 targets"):
        padded([[1, 2], {"ids": [1, 2], "targets": [1]}], 1)
    with pytest.raises(ValueError, match="example 0 has 0 ids and 0 targets"):
        padded([[1]], 1)
    for wrong, make in {
        "batch = 0": lambda: windows(range(9), 4, 0),
        "batch = 2.0": lambda: windows(range(9), 4, 2.0),
        "length = 0": lambda: windows(range(9), 0, 1),
        "length = '4'": lambda: windows(range(9), "4", 1),
        "length = -1": lambda: packed([[1, 2]], -1, 1, too_long="truncate"),
    }.items():
        with pytest.raises(ValueError, match=f"{wrong}, but it must be a whole number, 1 or more"):
            make()
    both, more = {"ids": [1], "targets": [2]}, {"ids": [1, 2], "targets": [2, 3, 4]}
    with pytest.raises(ValueError, match="example 0 has 2 ids and 3 targets"):  # else every target after it is off
        packed([more, both], 8, 1)
    for examples in ([both, both | {"source": [3]}], [both | {"source": [3]}, both]):
        with pytest.raises(ValueError, match="example 1 has ids, .*targets.*, but example 0 ids,"):
            padded(examples, 2)
    with pytest.raises(ValueError, match="example 0 has 1 ids and 0 targets"):
        padded([{"ids": [1]}], 1)


def test_windows_at_random_offsets():
    """Each is a piece of the stream with its next tokens; every offset occurs, and a step always draws the same."""
    stream = np.arange(40) * 3
    data = windows(stream, 8, 16, seed=1, offsets="random")
    begun = set()
    for step in range(40):
        batch = data(step)
        at = batch["ids"][:, 0] // 3
        places = at[:, None] + torch.arange(8)
        assert torch.equal(batch["ids"], places * 3) and torch.equal(batch["targets"], places * 3 + 3)
        assert torch.equal(batch["ids"], data(step)["ids"])
        begun |= set(at.tolist())
    assert begun == set(range(32))  # the last window's last target is the last token


def test_windows_leave_a_memory_map_on_disk(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(50_000, dtype=np.uint16).tofile(path)
    stream = np.memmap(path, dtype=np.uint16, mode="r")
    tracemalloc.start()
    batch = windows(stream, 100, 2)(3)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch["ids"].dtype == torch.int64 and held < stream.nbytes
    assert torch.equal(batch["ids"], windows(stream.tolist(), 100, 2)(3)["ids"])


def test_windows_of_several_rows_or_of_no_ids_are_refused():
    for stream in (np.zeros((4, 9), int), np.zeros(9)):
        with pytest.raises(ValueError, match="one row of token ids"):
            windows(stream, 4, 1)
    with pytest.raises(ValueError, match="offsets = 'any'"):
        windows(range(9), 4, 1, offsets="any")
