"""A LoRA adapter as PEFT writes it (adapter_config.json, adapter_model.safetensors), added to the weights of its base.

    W ← W + s B A        s = α / r, or α / √r with use_rslora        Hu et al. 2021, arXiv:2106.09685, section 4.1

A [r, in] and B [out, r] are named after the base's tensor: base_model.model.NAME.lora_A.weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmstack.architectures import checkpoints
from llmstack.architectures.hf import CheckpointError
from llmstack.architectures.hf_tensors import pieces

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
ONLY = {"peft_type": "LORA", "bias": "none", "use_dora": False, "modules_to_save": None, "layer_replication": None}
ONLY |= {"rank_pattern": {}, "alpha_pattern": {}, "use_qalora": False, "trainable_token_indices": None}


def load_adapted(folder: Path, dtype: torch.dtype, device) -> nn.Module:
    """The base that an adapter's folder names, with the adapter in its weights. Raises CheckpointError."""
    raw = checkpoints.read_json(folder / CONFIG)
    for key, want in ONLY.items():
        if raw.get(key) not in (want, None):
            raise CheckpointError(f"{key} = {raw[key]!r} in {folder / CONFIG}; only {want!r} is supported")
    base = Path(raw.get("base_model_name_or_path") or "")
    if not (base / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is an adapter of {str(base)!r}, and no checkpoint is there; "
            f"write the base's folder as base_model_name_or_path in {CONFIG}"
        )
    model = checkpoints.load(base, dtype, device)
    _, own = checkpoints.read_config(base)
    stored = pieces(model.config, [name for name, _ in model.named_parameters()], own)
    tensors = _tensors(folder)
    for name in sorted(tensors):
        target = f"{name.removeprefix(PREFIX).removesuffix(A)}.weight"
        if name.endswith(B) and name.removesuffix(B) + A in tensors:
            continue
        if not name.endswith(A) or target not in stored or name.removesuffix(A) + B not in tensors:
            raise CheckpointError(f"{folder} holds {name}; {model.config.name} has no place for that")
        change = _scale(raw) * tensors[name.removesuffix(A) + B].float() @ tensors[name].float()  # [out, in]
        _add(model, stored[target], change.to(device))
    return model


def _tensors(folder: Path) -> dict[str, Tensor]:
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}; PEFT's save_pretrained(safe_serialization=True) writes it")
    with checkpoints.open_shard(folder / WEIGHTS) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def _scale(raw: dict[str, Any]) -> float:
    rank = raw["r"]
    return raw["lora_alpha"] / (rank**0.5 if raw.get("use_rslora") else rank)


@torch.no_grad()
def _add(model: nn.Module, piece: checkpoints.Piece, change: Tensor) -> None:
    """Add a change [out, in] of a stored matrix to the parameters in it."""
    parts = [model.get_parameter(name) for name in piece.ours]
    change = change.t() if piece.conv1d else change
    for part, more in zip(parts, piece.split(change, [len(part) for part in parts])):
        if part.shape != more.shape:
            raise CheckpointError(f"{piece.ours[0]} is {list(part.shape)}, and the adapter's change {list(more.shape)}")
        part += more.to(part.dtype)
