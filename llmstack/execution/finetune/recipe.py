"""A recipe: one TOML file says what is tuned, how, on what, and where the result goes. `llmstack finetune RECIPE.toml`

    checkpoint = "llama-2m"        a name or folder, as architectures.pretrained takes it: a decoder
    method = "lora"                one of METHODS
    steps = 40
    out = "results"                a folder: a checkpoint where the method merges, otherwise adapter.safetensors
    seed = 0
    merge = true                   false keeps what was trained apart
    [settings]                     of the method: r = 4
    [data]                         source (of execution.corpus) or file, documents (the first so many), length, batch
    [optimizer]                    name (of optimizers.py) and its settings: lr = 1e-3
    [schedule]                     name (of schedules.py) and its settings: warmup = 4
    [trainer]                      accumulate, clip, every (checkpoints in out/run, taken up when the recipe runs again)

The same recipe gives the same losses, bit for bit, on the same machine. One file for a whole run, and a command that
reads it, are torchtune's way (docs.pytorch.org/torchtune).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from llmstack.architectures import pretrained, save
from llmstack.architectures.tokenizer import Tokenizer
from llmstack.execution import corpus
from llmstack.execution.data import whole, windows
from llmstack.execution.finetune.base import Tuned, check_types, function_of, prepare
from llmstack.execution.finetune.lora import dense
from llmstack.execution.optimizers import OPTIMIZERS
from llmstack.execution.schedules import SCHEDULES
from llmstack.execution.trainer import Trainer
from llmstack.facts import data_path
from llmstack.ops.packed import Packed

NEEDED = ("checkpoint", "method", "steps", "out", "data", "optimizer")
OPTIONAL = {"seed": 0, "merge": None, "settings": {}, "schedule": {"name": "constant"}, "trainer": {}}
TEXTS = ("checkpoint", "method", "out", "name", "source", "file")
TABLES = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}


def read(path: str | Path) -> dict[str, Any]:
    """A recipe from a file, or from data/recipes by its name. Raises ValueError on a wrong key, with those allowed."""
    file = Path(path).expanduser()
    file = file if file.suffix or file.is_file() else data_path() / "recipes" / f"{path}.toml"
    recipe = tomllib.loads(file.read_text(encoding="utf-8"))
    _check("the recipe", recipe, [*NEEDED, *OPTIONAL], NEEDED)
    recipe = OPTIONAL | recipe
    _check("[data]", recipe["data"], ["source", "file", "documents", "length", "batch"], ["length", "batch"])
    tables = [recipe, *(table for table in recipe.values() if isinstance(table, dict))]
    for name, value in (item for table in tables for item in table.items()):
        if name in TEXTS and not (value and isinstance(value, str)) or name == "merge" and value not in (None, 0, 1):
            raise ValueError(f"{name} = {value!r}, but it must be {'a text' if name in TEXTS else 'true or false'}")
    whole(steps=recipe["steps"], **{k: v for k, v in recipe["data"].items() if k not in TEXTS})
    _check("[settings]", recipe["settings"], _arguments(function_of(recipe["method"])))
    _check("[trainer]", recipe["trainer"], ["accumulate", "clip", "every"])
    for table, functions in TABLES.items():
        _check(f"[{table}]", recipe[table], recipe[table], ["name"])
        if (name := recipe[table]["name"]) not in functions:
            raise ValueError(f"[{table}] has name = {name!r}, but it must be one of {', '.join(functions)}")
        _check(f"[{table}]", recipe[table], ["name", *_arguments(functions[name])])
        check_types(f"[{table}]", functions[name], recipe[table])
    check_types("[trainer]", Trainer, recipe["trainer"])
    return recipe


def run(path: str | Path, out: str = "", on_step: Callable[[dict], None] | None = None) -> tuple[Tuned, list[dict]]:
    """Tune as the recipe says and write the result to `out`, or else to the recipe's. Gives what was tuned, and the
    Trainer's records. Raises ValueError on what cannot be."""
    recipe = read(path)
    steps, seed, out = recipe["steps"], recipe["seed"], Path(out or recipe["out"]).expanduser()
    base = Path(recipe["checkpoint"]).expanduser()
    if out.resolve() == base.resolve():
        raise ValueError(f"out = {out} is the checkpoint itself, which the result would replace; take another folder")
    chosen = lambda table, name, **how: partial(TABLES[table][name], **how)
    optimizer, schedule = (chosen(table, **recipe[table]) for table in TABLES)
    model, tokenizer = pretrained(str(base))
    if model.config.kind != "decoder":
        raise ValueError(f"checkpoint = {recipe['checkpoint']!r} is of kind {model.config.kind}; recipes tune decoders")
    data = windows(_tokens(tokenizer, **recipe["data"]), recipe["data"]["length"], recipe["data"]["batch"], seed)
    needs = {"data": data} if "data" in _arguments(function_of(recipe["method"])) else {}
    tuned = prepare(model, recipe["method"], **recipe["settings"] | needs)
    if recipe["merge"] and not tuned.merge:
        raise ValueError(f"merge = true, but {recipe['method']!r} adds what no matrix can hold; say merge = false")
    how = recipe["trainer"] | dict(seed=seed, after_backward=tuned.after_backward, on_step=on_step)
    how["folder"] = out / "run" if how.get("every") else None
    how["told"] = {f"the recipe's {key}": value for key, value in recipe.items() if key not in ("steps", "out")}
    trainer = Trainer(model, data, optimizer(tuned.trainable), schedule(steps=steps), **how)
    if trainer.folder:
        trainer.resume()
    records = trainer.run(steps)
    out.mkdir(parents=True, exist_ok=True)
    if tuned.merge and recipe["merge"] is not False:
        _save(tuned.merge(), tokenizer, out)
    else:
        save_file(tuned.state(), out / "adapter.safetensors", metadata={"recipe": json.dumps(recipe)})
    return tuned, records


def _save(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """A checkpoint with its tokenizer. What the method left in few bits is written as the values that it stands for."""
    for name, packed in [(n, m) for n, m in model.named_modules() if isinstance(m, Packed)]:
        model.set_submodule(name, dense(packed.weight, packed.bias))
    save(model, out)
    tokenizer.inner.save(str(out / "tokenizer.json"))
    ends = {f"{end}_token": getattr(tokenizer, end) for end in ("bos", "eos", "pad")}
    told = {name: tokenizer.inner.id_to_token(i) for name, i in ends.items() if i is not None}
    told |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (out / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")


def _tokens(tokenizer: Tokenizer, source="", file="", documents: int | None = None, **_: Any) -> list[int]:
    """The chosen texts in a row, each after the token that begins one and before the one that ends it."""
    if bool(source) == bool(file):
        raise ValueError("[data] names a source of execution.corpus or a text file: one of the two")
    corpora = lambda: [document.text for document in corpus.split(corpus.documents(source))[0]]
    texts = [Path(file).expanduser().read_text(encoding="utf-8")] if file else corpora()
    ends = [[i for i in (token,) if i is not None] for token in (tokenizer.bos, tokenizer.eos)]
    return [i for text in texts[:documents] for i in (*ends[0], *tokenizer.encode(text, special=False), *ends[1])]


def _arguments(function: Callable) -> list[str]:
    """What a recipe may set: not the model, weights or steps, which it has elsewhere."""
    return [name for name in signature(function).parameters if name not in ("model", "params", "steps", "how")]


def _check(where: str, given: Any, allowed: Iterable[str], needed: Iterable[str] = ()) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is {given!r}, but it is a table with {', '.join(allowed)}")
    for what, keys in (("no key", set(given) - set(allowed)), ("lacks", set(needed) - set(given))):
        if keys:
            raise ValueError(f"{where}: {what} {', '.join(sorted(keys))}; its keys are {', '.join(allowed) or 'none'}")
