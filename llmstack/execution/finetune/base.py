"""What every method of fine-tuning shares: freeze, find the linears, prepare a model, keep what was trained.

Full tuning with Adam in mixed precision holds 16 bytes a parameter: weight 2, gradient 2, master weight 4, moments 8
(Rajbhandari et al. 2019, arXiv:1910.02054, section 3.1). What adds a share ρ of parameters to a frozen 16-bit base and
trains only those holds 2 + 16 ρ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

Targets = str | Sequence[str]
METHODS = {  # name -> module.function(model, **settings) -> Tuned
    "full": "base.full", "adapter": "adapters.serial", "parallel-adapter": "adapters.parallel",
    "prompt": "prompts.prompt", "p-tuning": "prompts.p_tuning",
    "prefix": "prompts.prefix", "p-tuning-v2": "prompts.p_tuning_v2",
    "lora": "lora.lora", "splora": "pruned.splora", "loraprune": "pruned.loraprune",
    "qlora": "quantised.qlora", "qa-lora": "quantised.qa_lora", "lq-lora": "lq_lora.lq_lora",
    "diff": "sparse.diff", "pafi": "sparse.pafi", "fish": "sparse.fish",
}  # fmt: skip

TYPES = {bool: (bool, "true or false"), int: (Integral, "a whole number"), float: (Real, "a number")}


@dataclass
class Tuned:
    """A model prepared for tuning. `trainable`, by the model's own names, goes to the optimizer; left out, it is every
    parameter that requires a gradient. `merge()` undoes the preparation and keeps what was learned, where the method
    can. `after_backward()` is for methods that change gradients; the Trainer calls it between backward and step.
    `fixed()` gives what was chosen rather than trained, by name: masks and places, without which the rest is of no
    use."""

    model: nn.Module
    trainable: dict[str, nn.Parameter] = field(default_factory=dict)
    merge: Callable[[], nn.Module] | None = None
    after_backward: Callable[[], None] | None = None
    fixed: Callable[[], dict[str, Tensor]] = dict

    def __post_init__(self):
        self.trainable = self.trainable or {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """A copy of what was trained or chosen, by name: as a safetensors file wants it."""
        return {name: t.detach().clone().contiguous() for name, t in (self.trainable | self.fixed()).items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a `state()` back, in place. Raises ValueError when it has other names or shapes."""
        held = self.trainable | self.fixed()
        mine, given = ({n: list(t.shape) for n, t in tensors.items()} for tensors in (held, state))
        if wrong := [f"{n}: {given.get(n)}, not {mine.get(n)}" for n in mine | given if mine.get(n) != given.get(n)]:
            raise ValueError(f"this state is of another method, model or setting: {', '.join(wrong[:3])}")
        for name, t in held.items():
            t.copy_(state[name])

    @property
    def count(self) -> int:
        """How many values are trained."""
        return sum(p.numel() for p in self.trainable.values())

    @property
    def training_bytes(self) -> int:
        """What Adam in mixed precision holds: 16 for a trained value, 2 for a frozen one, buffers as they are."""
        frozen = sum(p.numel() for p in self.model.parameters()) - self.count
        return 16 * self.count + 2 * frozen + sum(b.nbytes for b in self.model.buffers())


def prepare(model: nn.Module, method: str, **settings: Any) -> Tuned:
    """Make a model trainable by one of METHODS, in place. Afterwards it is called exactly as before.

    Raises ValueError on an unknown method or setting, a model that is prepared already, and what the method refuses;
    the model is unchanged then.
    """
    function = function_of(method)
    if getattr(model, "tuned_by", None):
        raise ValueError(f"the model is prepared for {model.tuned_by!r} already; merge() first, or load it again")
    known = list(inspect.signature(function).parameters)[1:]
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"{method!r} has no setting {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    check_types(repr(method), function, settings)
    before = [p for p in model.parameters() if p.requires_grad]
    tuned = function(model, **settings)
    model.tuned_by, merge = method, tuned.merge

    def merged() -> nn.Module:
        plain = merge()
        plain.tuned_by = None
        for p in before:
            p.requires_grad_(True)
        tuned.merge = lambda: plain  # once: a second time it would undo what is there by then
        return plain

    tuned.merge = merge and merged
    return tuned


def function_of(method: str) -> Callable[..., Tuned]:
    """The method's function, whose parameters after the model are its settings. Raises ValueError on an unknown one."""
    if method not in METHODS:
        raise ValueError(f"no method {method!r} of fine-tuning; there are {', '.join(METHODS)}")
    module, _, name = METHODS[method].rpartition(".")
    return getattr(import_module(f"llmstack.execution.finetune.{module}"), name)


def check_types(where: str, function: Callable, settings: Mapping[str, Any]) -> None:
    """Raises ValueError on a setting that is no number, or not true or false, where its default is one."""
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    for name, value in settings.items():
        kind, said = TYPES.get(type(default := defaults.get(name)), (object, ""))
        if not isinstance(value, kind) or said and (isinstance(value, bool) != (kind is bool) or value != value):
            raise ValueError(f"{name} = {value!r}, but {where} takes {said}, such as {default!r}")


def full(model: nn.Module) -> Tuned:
    """Every weight is trained (those that a model keeps fixed, such as tables of sines, stay)."""
    return Tuned(model, merge=lambda: model)


def freeze(model: nn.Module) -> None:
    """No parameter gets a gradient any more, and those left from earlier passes go."""
    for p in model.parameters():
        p.requires_grad_(False)
        p.grad = None


def linears(model: nn.Module, targets: Targets = ("q", "v")) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    """(name, parent, attribute, linear) of the blocks' linears whose names end in a target: "q", "attention.o", "up".

    `targets="all"` takes every one. `setattr(parent, attribute, other)` replaces it: collect them in a list before
    that. Raises ValueError for a target that no linear has.
    """
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks." in n}
    ends = [""] if targets == "all" else [targets] if isinstance(targets, str) else list(targets)
    chosen = {end: [n for n in found if not end or f".{n}".endswith(f".{end}")] for end in ends}
    if (lost := [end for end, names in chosen.items() if not names]) or not ends:
        kinds = sorted({name.rpartition(".")[2] for name in found})
        raise ValueError(f"targets {lost} match no linear of the blocks; they have {', '.join(kinds) or 'none'}, 'all'")
    for name in (n for n in found if any(n in names for names in chosen.values())):
        parent, _, attribute = name.rpartition(".")
        yield name, model.get_submodule(parent), attribute, found[name]
