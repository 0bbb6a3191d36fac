"""Recipes and the command that runs them."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from llmstack import cli
from llmstack.architectures import build, load, pretrained, save
from llmstack.config import ModelConfig
from llmstack.execution.finetune import METHODS, prepare, recipe
from llmstack.facts import data_path

RECIPES = sorted((data_path() / "recipes").glob("*.toml"))
TEXT = "To be, or not to be, that is the question. " * 40


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a small model, its tokenizer and a text."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = pretrained("llama-2m")[1]
    save(build(ModelConfig("small", 32, 2, 4, len(tokenizer), n_kv_heads=2, d_ff=64, tied=True)), folder)
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def write(base, name="recipe.toml", method="lora", more="", top="", optimizer='name = "adamw"\nlr = 1e-2'):
    folder = base.as_posix()
    lines = [f'checkpoint = "{folder}"', f'method = "{method}"', "steps = 4", f'out = "{folder}/out"', top]
    lines += ["[data]", f'file = "{folder}/text.txt"', "length = 16", "batch = 2", "[optimizer]", optimizer, more]
    (base / name).write_text("\n".join(lines), encoding="utf-8")
    return base / name


def losses(records):
    return [record["loss"] for record in records]


QUICK = ("lora", "p-tuning", "diff")
SOME = [pytest.param(m, marks=[] if m in QUICK else pytest.mark.slow) for m in METHODS]


@pytest.mark.parametrize("method", SOME)
def test_twice_is_the_same_to_the_last_bit(base, tmp_path, method):
    """Of every method; and a recipe with another seed is another run."""
    file = write(base, method=method)
    (one, first), (two, second) = (recipe.run(file, tmp_path / name) for name in ("one", "two"))
    assert losses(first) == losses(second) and len(first) == 4
    for name, trained in one.state().items():
        assert torch.equal(trained, two.state()[name]), name
    assert losses(recipe.run(write(base, "other.toml", method, top="seed = 1"), tmp_path / "three")[1]) != losses(first)


def test_a_merged_result_is_a_checkpoint(base, tmp_path):
    file = write(base, more='[settings]\nr = 2\n[schedule]\nname = "linear"\nwarmup = 1\n[trainer]\nclip = 1.0')
    tuned, records = recipe.run(file, tmp_path)
    assert [r["lr"] for r in records] == pytest.approx([1e-2, 1e-2, 2 / 3 * 1e-2, 1 / 3 * 1e-2])
    model, tokenizer = pretrained(tmp_path)
    ids = torch.tensor([tokenizer.encode("To be, or")])
    assert torch.equal(model(ids), tuned.model(ids)) and not torch.equal(model(ids), load(base)(ids))
    assert records[-1]["loss"] < records[0]["loss"]


def test_a_result_kept_apart_goes_onto_its_base(base, tmp_path):
    for method, top in (("prompt", ""), ("lora", "merge = false")):
        tuned, _ = recipe.run(write(base, method=method, top=top), tmp_path / method)
        assert [p.name for p in (tmp_path / method).iterdir()] == ["adapter.safetensors"]
        file = tmp_path / method / "adapter.safetensors"
        with safe_open(file, "pt") as opened:
            told = json.loads(opened.metadata()["recipe"])
        again = prepare(load(told["checkpoint"]), told["method"], **told["settings"])
        again.load(load_file(file))
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(again.model(ids), tuned.model(ids))


def test_a_run_that_was_cut_short_goes_on(base, tmp_path):
    """With `every` the recipe run again takes up its last checkpoint, and ends where an uncut one does."""
    whole = losses(recipe.run(write(base, more="[trainer]\nevery = 2"), tmp_path / "whole")[1])

    def stop(record):
        if record["step"] == 2:
            raise KeyboardInterrupt

    for on_step in (stop, None):
        try:
            _, records = recipe.run(base / "recipe.toml", tmp_path / "cut", on_step)
        except KeyboardInterrupt:
            continue
    assert losses(records) == whole


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_recipes_that_come_along(file):
    """Each is read, and its method takes its model."""
    told = recipe.read(file.stem)
    assert prepare(pretrained(told["checkpoint"])[0], told["method"], **told["settings"]).count
    assert told["out"].startswith("results/")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(top="learning_rate = 1"), "the recipe: no key learning_rate; its keys are checkpoint, method, steps"),
        (dict(more="[settings]\nrank = 4"), r"\[settings\]: no key rank; its keys are r, alpha, targets, seed"),
        (dict(more="[trainer]\nepochs = 4"), r"\[trainer\]: no key epochs; its keys are accumulate, clip, every"),
        (dict(more='[schedule]\nname = "cosine"\nwarm = 1'), r"\[schedule\]: no key warm; its keys are name, warmup"),
        (dict(more="[schedule]\nwarmup = 1"), r"\[schedule\]: lacks name"),
        (dict(optimizer='name = "adamw"\nlearning_rate = 1'), "no key learning_rate; its keys are name, lr, betas"),
        (dict(optimizer='name = "rmsprop"'), r"\[optimizer\] has name = 'rmsprop', but it must be one of sgd"),
        (dict(method="dora"), "no method 'dora'"),
        (dict(method="prompt", top="merge = true"), "'prompt' adds what no matrix can hold; say merge = false"),
        (dict(top='trainer = "fast"'), r"\[trainer\] is 'fast', but it is a table with accumulate"),
        (dict(more="[settings]\nr = 64"), "r = 64, but blocks.0.attention.q is 32×32"),
    ],
)
def test_what_is_refused(base, tmp_path, change, message, capsys):
    file = write(base, **change)
    with pytest.raises(ValueError, match=message):
        recipe.run(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert cli.main(["finetune", str(file)]) == 2
    assert capsys.readouterr().err.startswith("llmstack: ")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("steps = 4", "steps = 2.5", "steps = 2.5, but it must be a whole number, 1 or more"),
        ("steps = 4", 'steps = "4"', "steps = '4', but it must be a whole number, 1 or more"),
        ("length = 16", 'length = "16"', "length = '16', but it must be a whole number, 1 or more"),
        ("batch = 2", "batch = 2\ndocuments = -1", "documents = -1, but it must be a whole number, 1 or more"),
        ("lr = 1e-2", 'lr = "fast"', r"lr = 'fast', but \[optimizer\] takes a number, such as 0.001"),
        ('name = "adamw"', 'name = ["adamw"]', r"name = \['adamw'\], but it must be a text"),
        ('method = "lora"', "method = 3", "method = 3, but it must be a text"),
        ("steps = 4", 'steps = 4\nmerge = "no"', "merge = 'no', but it must be true or false"),
        ("/text.txt", "/", "Is a directory|Permission denied"),
        ("out = ", "out = '' #", "out = '', but it must be a text"),
    ],
)
def test_wrong_values_are_told_from_right_ones(base, tmp_path, old, new, message, capsys):
    """Each is refused with a line, and nothing is written."""
    file = tmp_path / "recipe.toml"
    text = write(base).read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert cli.main(["finetune", str(file)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_result_does_not_replace_its_base_nor_a_run_of_another_recipe(base, tmp_path):
    file = write(base, more="[trainer]\nevery = 2")
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        recipe.run(file, base)
    recipe.run(file, tmp_path)
    with pytest.raises(ValueError, match=r"of another run: the recipe's optimizer is .*0.01.* there and .*0.02.* here"):
        recipe.run(write(base, optimizer='name = "adamw"\nlr = 2e-2', more="[trainer]\nevery = 2"), tmp_path)
    assert len(recipe.run(write(base, more="[trainer]\nevery = 2"), tmp_path)[1]) == 4


def test_a_home_is_found_and_a_recipe_without_a_suffix(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(base))
    monkeypatch.setenv("USERPROFILE", str(base))
    folder = base.as_posix()
    (base / "mine").write_text(write(base).read_text(encoding="utf-8").replace(folder, "~"), encoding="utf-8")
    recipe.run("~/mine", tmp_path)
    assert recipe.run(base / "mine", "~/at home")[1] and load(base / "at home") and load(tmp_path)


@pytest.mark.parametrize("method, more", [("lora", ""), ("qa-lora", "[settings]\ngroup = 16\n")])
def test_a_result_has_all_that_a_checkpoint_needs(base, tmp_path, method, more):
    """Weights that QA-LoRA keeps in four bits too, and the ends of its texts."""
    (base / "tokenizer_config.json").write_text('{"eos_token": "<|end|>", "bos_token": "<|start|>"}', encoding="utf-8")
    tuned, _ = recipe.run(write(base, method=method, more=more), tmp_path)
    (base / "tokenizer_config.json").unlink()
    model, tokenizer = pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(model(ids), tuned.model(ids))
    ends = [tokenizer.inner.token_to_id(token) for token in ("<|end|>", "<|start|>")]
    assert [tokenizer.eos, tokenizer.bos] == ends and None not in ends


def test_what_is_missing_is_said(base, tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('method = "lora"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="the recipe: lacks checkpoint, data, optimizer, out, steps; its keys are"):
        recipe.read(file)
    text = write(base).read_text(encoding="utf-8")
    file.write_text(text.replace("[data]\n", '[data]\nsource = "bible"\n'), encoding="utf-8")
    with pytest.raises(ValueError, match="one of the two"):
        recipe.run(file)
    with pytest.raises(FileNotFoundError):
        recipe.read("no-such-recipe")


def test_the_command(base, tmp_path, capsys):
    assert cli.main(["finetune", str(write(base)), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5 and said[0].startswith("step      0  loss 7.") and "values trained" in said[-1]
    assert load(tmp_path / "out")
