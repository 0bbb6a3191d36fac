"""Which stored tensor holds which of our parameters, and how.

GPT-2 stacks q, k, v and stores the matrix transposed; BLOOM, Falcon and GPT-NeoX stack them by key-value head. With
experts it is the other way round: what we stack is stored one by one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from llmstack.architectures.hf import family
from llmstack.config import ModelConfig


@dataclass
class Piece:
    """One stored tensor and the parameters in it, in their order."""

    ours: list[str]
    conv1d: bool = False  # stored [in, out]
    groups: int = 0  # stacked by this many key-value heads
    row: bool = False  # a vector stored as a matrix of one row
    expert: int | None = None  # the tensor is this one of a parameter that stacks all experts'

    def join(self, parts: list[Tensor]) -> Tensor:
        if self.expert is not None:
            return parts[0][self.expert]
        if self.groups and len(parts) > 1:
            whole = torch.cat([p.unflatten(0, (self.groups, -1)) for p in parts], 1).flatten(0, 1)
        else:
            whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole[None] if self.row else whole.t() if self.conv1d and whole.ndim == 2 else whole

    def split(self, whole: Tensor, rows: list[int]) -> list[Tensor]:
        whole = whole[0] if self.row else whole.t() if self.conv1d and whole.ndim == 2 else whole
        if len(rows) == 1:
            return [whole]
        if self.groups:
            grouped = whole.unflatten(0, (self.groups, -1))  # [K, rows of a group, ...]
            return [p.flatten(0, 1) for p in grouped.split([r // self.groups for r in rows], 1)]
        return list(whole.split(rows))


def pieces(config: ModelConfig, names: list[str], own: bool) -> dict[str, Piece]:
    """Every tensor of the checkpoint of a model whose parameters have these names (tied ones once); `own`: ours."""
    if own:
        return {name: Piece([name]) for name in names}
    entry, out = family(config.model_type), {}
    top = {ours: theirs.replace("{}", entry["prefix"]) for ours, theirs in entry["top"].items()}
    inner = dict(entry["inner"])
    if config.gated and config.model_type in ("t5", "mt5"):
        inner |= {f"{side}.ffn.up": inner[f"{side}.ffn.up"] + "_1" for side in ("encoder", "decoder")}
    if config.model_type == "falcon" and config.parallel and config.parallel_norms == 2:
        inner |= {"norm1": "ln_attn", "norm2": "ln_mlp"}
    for name in names:
        module, _, leaf = name.rpartition(".")
        if name in top or module in top:
            theirs = top.get(name) or f"{top[module]}.{leaf}"
            out[theirs] = Piece([name], row=theirs == "final_logits_bias")
            continue
        way, layer, part = re.fullmatch(r"(.*blocks)\.(\d+)\.(.+)", module).groups()
        side = way.removesuffix("blocks")
        at = f"{entry['blocks'][way]}.{layer}.".replace("{}", entry["prefix"])
        if whole := inner.get(f"{side}{part}.{leaf}") or inner.get(f"{part}.{leaf}"):
            for n in range(config.n_experts if "*" in whole else 1):
                out[at + whole.replace("*", str(n))] = Piece([name], expert=n if "*" in whole else None)
            continue
        theirs = f"{at}{inner.get(side + part) or inner[part]}.{leaf}"
        piece = out.setdefault(theirs, Piece([], entry["conv1d"], config.n_kv_heads if entry["grouped"] else 0))
        piece.ours.append(name)
    return out


def ends(config: ModelConfig, own: bool) -> tuple[str, str]:
    """The stored names of the head and of the token table."""
    head = "mlm.head.weight" if config.kind == "encoder" else "out.head.weight"
    return next(iter(pieces(config, [head], own))), next(iter(pieces(config, ["embed.tokens.weight"], own)))


def twins(config: ModelConfig, own: bool) -> dict[str, str]:
    """Names under which a file may hold a tensor a second time, besides the head's: that name -> the tensor's."""
    entry = {} if own else family(config.model_type)["shared"]
    return {twin: name for twin, name in entry.items() if name}
