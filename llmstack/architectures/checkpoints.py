"""Models from a config, and from and to folders in Hugging Face's layout: config.json and safetensors.

A folder has either model.safetensors or model.safetensors.index.json, which says in which shard a tensor is. Weights
are written to a temporary name and renamed, so a process killed at any moment leaves the checkpoint that was there.
Pickle is never opened: it can run code.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from llmstack.architectures.decoder import Decoder
from llmstack.architectures.encoder import Encoder
from llmstack.architectures.encoder_decoder import EncoderDecoder
from llmstack.architectures.hf import OWN, CheckpointError, config_from_hf, config_to_hf, family
from llmstack.architectures.hf_tensors import Piece, ends, pieces, twins
from llmstack.architectures.ssm import Mamba
from llmstack.config import ModelConfig

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS = ("mlm.transform", "pooler", "nsp")  # of an encoder
CLASSES = {"decoder": Decoder, "encoder": Encoder, "encoder-decoder": EncoderDecoder}
CONVERT = (
    "transformers' AutoModel.from_pretrained(folder).save_pretrained(folder, safe_serialization=True), run where you "
    "trust the file, writes safetensors"
)


def build(config: ModelConfig, seed: int = 0, device="cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of that shape with weights drawn from `seed`. On device "meta" it has shapes and no storage."""
    if not isinstance(config, ModelConfig):
        raise TypeError(f"build takes a ModelConfig, got {config!r}; a published one is llmstack.preset({config!r})")
    with torch.device(device):
        return (Mamba if config.d_state else CLASSES[config.kind])(config, seed).to(dtype)


def load(path: str | Path, dtype: torch.dtype | str = torch.float32, device="cpu") -> nn.Module:
    """The model in a folder, in `dtype` or the one of that name ("bfloat16"). Where config.json and the tensors differ
    on which tables are one, or on an encoder's heads, the tensors are believed. A folder that PEFT wrote (LoRA) is
    loaded onto the base that it names.

    Raises FileNotFoundError or CheckpointError, each with what is wrong and the usual fix.
    """
    folder, dtype = Path(path), _dtype(dtype)
    if (folder / "adapter_config.json").is_file():
        from llmstack.architectures.adapters import load_adapted

        return load_adapted(folder, dtype, device)
    config, own = read_config(folder)
    places = _places(folder, config, own)
    config = _as_stored(folder, config, own, places)
    model = build(config, device="meta")
    mine = dict(model.named_parameters())  # tied ones once
    wanted = pieces(config, list(mine), own)
    if missing := sorted(set(wanted) - set(places)):
        raise CheckpointError(
            f"{folder} lacks {_some(missing)}; the download is incomplete or config.json is another's"
        )
    if left := set(places) - {*wanted, *twins(config, own), *ends(config, own)}:
        names = sorted(places[name].name for name in left)
        warnings.warn(f"{folder}: {_some(names)} left out; what loads is the encoder", stacklevel=2)
    state: dict[str, nn.Parameter] = {}
    for file in sorted({places[name].file for name in wanted}):
        with open_shard(folder / file) as shard:
            for name in wanted:
                if places[name].file == file:
                    whole = _tensor(shard, folder, config, name, places[name], wanted[name], mine)
                    _keep(state, wanted[name], whole.to(device, dtype), mine)
    first = {id(p): name for name, p in mine.items()}
    for name, p in model.named_parameters(remove_duplicate=False):
        state[name] = state[first[id(p)]]
    model.load_state_dict(state, assign=True)
    return model.eval()


def _tensor(shard, folder: Path, config: ModelConfig, name: str, place: Place, piece: Piece, mine) -> Tensor:
    """A stored tensor. Refuses one that is not there, of another shape, or quantised."""
    if place.name not in shard.keys():
        raise CheckpointError(f"{folder / place.file} has no {place.name}; the index is another's, download both again")
    shape = shard.get_slice(place.name).get_shape()
    want = list(piece.join([mine[ours] for ours in piece.ours]).shape)
    if shape != want:
        raise CheckpointError(_mismatch(folder, config, name, shape, want))
    whole = shard.get_tensor(place.name)
    if not whole.is_floating_point():
        raise CheckpointError(
            f"{name} holds {whole.dtype} in {folder}, and weights are floating point; "
            "take the checkpoint from before it was quantised"
        )
    return whole


def _keep(state: dict[str, nn.Parameter], piece: Piece, whole: Tensor, mine: dict[str, nn.Parameter]) -> None:
    """Put a stored tensor where the model has it."""
    rows = [len(mine[ours]) for ours in piece.ours]
    for ours, tensor in zip(piece.ours, piece.split(whole, rows)):
        if piece.expert is None:
            state[ours] = nn.Parameter(tensor.contiguous(), requires_grad=mine[ours].requires_grad)
            continue
        if ours not in state:  # one of the matrices that ours are stacked from
            room = torch.empty(mine[ours].shape, device=tensor.device, dtype=tensor.dtype)
            state[ours] = nn.Parameter(room, requires_grad=mine[ours].requires_grad)
        state[ours].data[piece.expert] = tensor


def _dtype(name: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype = {name!r}, but weights are floating point: 'float32', 'bfloat16', 'float16'")
    return dtype


def save(model: nn.Module, path: str | Path, shard_bytes: float = 5e9) -> None:
    """Write a folder that `load` and transformers read; in shards where it takes more than `shard_bytes` bytes.

    Other files in the folder, such as a tokenizer's, stay. Raises ValueError when the path is a file.
    """
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"{folder} is a file; save takes a folder, which it makes where there is none")
    if (by := getattr(model, "tuned_by", "full")) not in (None, "full"):
        raise ValueError(f"the model is prepared for {by!r}; merge() first, or keep its state() in a file of its own")
    if packed := [name for name, m in model.named_modules() if hasattr(m, "dequantise")]:
        raise ValueError(f"{packed[0]} holds its weight in few bits, which no checkpoint holds; put a linear there")
    folder.mkdir(parents=True, exist_ok=True)
    mine = dict(model.named_parameters())
    config = _as_held(model)
    raw = config_to_hf(config)
    own = raw["model_type"] == OWN
    if any(".qkv." in name for name in mine):
        raise ValueError("attention is fused, and checkpoints hold q, k and v apart; save the model before it is fused")
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    stored = pieces(config, list(mine), own)
    again = {} if config.tied else twins(config, own)  # an untied model's, transformers does not tie either
    stored |= {twin: stored[name] for twin, name in again.items() if name in stored}
    for name, piece in stored.items():
        whole = piece.join([mine[ours].detach() for ours in piece.ours]).cpu().contiguous()
        whole = whole.clone() if name in again else whole
        if shards[-1] and whole.nbytes > room:
            shards, room = [*shards, {}], shard_bytes
        shards[-1][name], room = whole, room - whole.nbytes
    raw |= {"dtype": str(next(iter(mine.values())).dtype).removeprefix("torch.")}
    old = {p for pattern in ("model*.safetensors*", ".model*.tmp", ".config.json*.tmp") for p in folder.glob(pattern)}
    tag = uuid4().hex[:8]  # new shards beside the old ones: the index decides which are read
    names = [f"model-{i + 1:05}-of-{len(shards):05}-{tag}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [WHOLE]
    text = lambda content: lambda at: at.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = {
        file: lambda at, shard=shard: save_file(shard, at, metadata={"format": "pt"})
        for file, shard in zip(names, shards)
    }
    files = {"config.json": text(raw)} | weights
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for s in shards for t in s.values())}}
        index["weight_map"] = {name: file for file, shard in zip(names, shards) for name in shard}
        files = weights | {"config.json": text(raw), INDEX: text(index)}
    _write(folder, files)
    for stale in sorted(old - {folder / name for name in files}):
        stale.unlink(missing_ok=True)


def _as_held(model: nn.Module) -> ModelConfig:
    """The model's config; tied where its head is the token table itself, whatever it was built as."""
    every = dict(model.named_parameters(remove_duplicate=False))
    head = every.get("mlm.head.weight", every.get("out.head.weight"))
    return model.config if head is None else model.config.with_(tied=head is every["embed.tokens.weight"])


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises CheckpointError for anything else."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}; write or download it again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object, {{…}}, but begins {str(raw)[:40]!r}; download it again")
    return raw


def read_config(folder: Path) -> tuple[ModelConfig, bool]:
    """The config of a checkpoint folder, and whether its tensors have our own names."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}; a checkpoint is a folder with config.json and safetensors")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json; it holds {_some(sorted(p.name for p in folder.iterdir()))}"
        )
    raw = read_json(folder / "config.json")
    own = raw.get("model_type") == OWN
    return config_from_hf(raw, "" if own else raw.get("_name_or_path") or folder.name), own


@dataclass
class Place:
    """Where a tensor is: the file in the folder, and its name there."""

    file: str
    name: str


def _stored(folder: Path) -> dict[str, str]:
    """Of every tensor in the folder, its file. Refuses files that are missing or pickle."""
    if (folder / WHOLE).is_file():
        with open_shard(folder / WHOLE) as file:
            return dict.fromkeys(file.keys(), WHOLE)
    if not (folder / INDEX).is_file():
        pickles = sorted(p.name for end in ("bin", "pt", "pth", "ckpt") for p in folder.glob(f"*.{end}"))
        if not pickles:
            raise FileNotFoundError(f"{folder} has neither {WHOLE} nor {INDEX}")
        raise CheckpointError(
            f"{folder} has its weights as pickle ({_some(pickles)}), which is never opened; {CONVERT}"
        )
    stored = read_json(folder / INDEX).get("weight_map")
    if not isinstance(stored, dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map, tensor -> file; download it again")
    for name, file in stored.items():  # a file elsewhere is none of this checkpoint's, whoever wrote the index
        if not isinstance(file, str) or file != re.split(r"[/\\]", file)[-1]:
            raise CheckpointError(f"{folder / INDEX} names a file outside the folder: {name} -> {file!r}")
    if gone := sorted({file for file in stored.values() if not (folder / file).is_file()}):
        raise CheckpointError(f"{folder / INDEX} names shards that are not there: {_some(gone)}; download them again")
    return stored


def _places(folder: Path, config: ModelConfig, own: bool) -> dict[str, Place]:
    """Where every tensor is that some model of this shape could hold. Refuses others, but for an encoder's tasks."""
    entry = {"prefix": "", "ignore": []} if own else family(config.model_type)
    heads = {"mlm": True, "pooler": True} if config.kind == "encoder" and not own else {}
    most = config.with_(tied=False, **heads)
    names = [name for name, _ in build(most, device="meta").named_parameters()]
    known = {*pieces(most, names, own), *twins(config, own)}
    trunk = (entry["prefix"], "encoder.", "embeddings.")
    places, strange = {}, []
    for name, file in _stored(folder).items():
        today = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))  # BERT's first files
        full = today if today in known else entry["prefix"] + today
        if full in known or (heads and not today.startswith(trunk)):
            places[full] = Place(file, name)
        elif not any(re.fullmatch(pattern, name) for pattern in entry["ignore"]):
            strange.append(name)
    if strange:
        raise CheckpointError(
            f"{folder} holds {_some(sorted(strange))}; {config.model_type} with this config has no place for that; "
            "is model_type right, and every bias and norm that the file has?"
        )
    return places


def _as_stored(folder: Path, config: ModelConfig, own: bool, places: dict[str, Place]) -> ModelConfig:
    """The config with those tables tied that the folder holds once or twice alike, and an encoder's stored heads."""
    for twin, name in twins(config, own).items():
        if twin not in places:
            continue
        if config.kind == "encoder":  # of a bias under two names, transformers reads the head's own
            places[name] = places[twin]
        elif not _alike(folder, places, twin, name):
            raise CheckpointError(
                f"{twin} and {name} differ in {folder} (tie_word_embeddings in its config.json), and "
                f"{config.model_type} has one table for both here; take a checkpoint in which they are one"
            )
    head, table = ends(config, own)
    tied = config.tied or (not own and family(config.model_type)["always_tied"])
    if head in places:
        tied = config.tied and _alike(folder, places, head, table)
    config = config.with_(tied=tied)
    if config.kind != "encoder" or own:
        return config
    has = {ours: set(pieces(config, [f"{ours}.weight"], own)) <= set(places) for ours in HEADS}
    mlm = config.mlm or has["mlm.transform"]
    return config.with_(mlm=mlm, pooler=has["pooler"] and (has["nsp"] or not mlm))


def _alike(folder: Path, places: dict[str, Place], twin: str, name: str) -> bool:
    """Whether two names hold the same; of a tensor that only its twin holds, that is the place."""
    one, two = places[twin], places.setdefault(name, places[twin])
    with open_shard(folder / one.file) as first, open_shard(folder / two.file) as second:
        return torch.equal(first.get_tensor(one.name), second.get_tensor(two.name))


def open_shard(path: Path):
    """An open safetensors file. Raises CheckpointError where it is damaged."""
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path} ({size:,} bytes) is damaged or cut short: {error}; download it again") from None


def _mismatch(folder: Path, config: ModelConfig, name: str, shape: list[int], want: list[int]) -> str:
    dials = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "vocab_size", "max_seq_len")
    says = ", ".join(f"{dial} = {getattr(config, dial)}" for dial in dials)
    return (
        f"{name} is {shape} in {folder}, but its config.json makes it {want} ({says}); "
        "correct the head count or width in config.json, or take the config.json that came with the weights"
    )


def _some(names: list[str], n: int = 4) -> str:
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


def _write(folder: Path, files: dict[str, Callable[[Path], object]]) -> None:
    """Write all files under temporary names, then rename them one right after the other: the last one counts."""
    temporaries = {name: folder / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        for name, write in files.items():
            write(temporaries[name])
        for name, temporary in temporaries.items():
            os.replace(temporary, folder / name)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
