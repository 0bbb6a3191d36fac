"""A model's tokenizer: the ids of a text, the text of ids, which ids end an answer, and how a conversation is written.

`tokenizer_from_folder` reads the files that transformers reads beside a model's weights:

    tokenizer.json              the pieces and how text is cut into them
    tokenizer_config.json       the special tokens' names; the chat template, one or several by name
    special_tokens_map.json     older files: the names again, which then count
    chat_template.jinja         counts before tokenizer_config.json; others by name in additional_chat_templates/
    generation_config.json      the ids that end an answer, which may be several; where it is silent config.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from llmstack.architectures import chat, checkpoints, hf

if TYPE_CHECKING:
    from torch import Tensor


class Tokenizer:
    """A `tokenizers.Tokenizer` (`.inner`) with the ids that end and begin a text, and the model's chat template.

    `.eos_ids` are all ids that end an answer, `.eos` the first of them, `.bos` and `.pad` as the model has them; None
    where it has none. `.named` are the texts of special tokens by name, "unk_token" -> "<unk>", as templates read them.
    chat_template: one, or several by name, of which "default" is taken, and "tool_use" where there are tools.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        eos: int | Sequence[int] | None = None,
        bos: int | None = None,
        pad: int | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        named: Mapping[str, str] | None = None,
    ):
        inner.no_padding()
        inner.no_truncation()
        self.inner, self.bos, self.pad, self.chat_template = inner, bos, pad, chat_template
        self.eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        self.eos = self.eos_ids[0] if self.eos_ids else None
        ids = {"bos_token": self.bos, "eos_token": self.eos}
        self.named = {name: inner.id_to_token(i) for name, i in ids.items() if i is not None} | dict(named or {})

    def __len__(self) -> int:
        return self.inner.get_vocab_size()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in it are read as such; `special` also adds those that the model
        expects around every text (BERT's [CLS] and [SEP], Llama's <s>). What a chat template wrote has them already:
        apply_chat_template(messages, tokenize=True), or special=False here."""
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

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """A conversation, [{"role": "user", "content": "…"}, …], as the model was trained to read it: the text, or its
        ids where `tokenize`, with no special token but the template's own.

        tools are JSON schemas, {"type": "function", "function": {"name": …, "parameters": …}}; `variables` what the
        template reads besides (`documents`, `enable_thinking`). Raises ValueError where the model has no template, or a
        message is malformed or refused by it.
        """
        template = self.chat_template
        if isinstance(template, Mapping):
            name = "tool_use" if tools is not None and "tool_use" in template else "default"
            if name not in template:
                raise ValueError(f"there are the chat templates {', '.join(template)}, and none is called {name!r}")
            template = template[name]
        if not template:
            raise ValueError("this model has no chat template: it continues a text, so encode the text itself")
        if strange := [tool for tool in tools or () if not isinstance(tool, Mapping)]:
            raise ValueError(f'a tool is a JSON schema {{"type": "function", …}}, got {strange[0]!r}')
        given = self.named | variables
        text = chat.render(template, messages, add_generation_prompt=add_generation_prompt, tools=tools, **given)
        return self.encode(text, special=False) if tokenize else text


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    """What a folder's files say of its tokenizer, as listed above. Raises FileNotFoundError without tokenizer.json, and
    CheckpointError for a damaged file."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"no tokenizer.json in {folder}: save the model's fast tokenizer beside its weights")
    try:
        inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exceptions
        raise hf.CheckpointError(f"{folder / 'tokenizer.json'} is damaged: {error}; download it again") from None
    read = lambda name: checkpoints.read_json(p) if (p := folder / name).is_file() else {}
    config, generation, told = read("config.json"), read("generation_config.json"), read("tokenizer_config.json")
    where = "tokenizer_config.json"
    if "added_tokens_decoder" not in told and (folder / "special_tokens_map.json").is_file():
        told |= read("special_tokens_map.json")
        where += " or special_tokens_map.json"
    named = _named(told, f"{folder}'s {where}")
    inner.add_special_tokens([text for text in named.values() if inner.token_to_id(text) is None])
    ids = {name: inner.token_to_id(text) for name, text in named.items()}

    def of(end: str) -> Any:
        """What the model's files say: transformers generates by the first of the two that says anything."""
        key = f"{end}_token_id"
        return generation[key] if generation.get(key) is not None else config.get(key)

    own, ends = ids.get("eos_token"), of("eos")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    eos = list(dict.fromkeys([*([] if own is None else [own]), *ends]))
    first = lambda end: ids.get(f"{end}_token", of(end))
    return Tokenizer(inner, eos, first("bos"), first("pad"), _template(folder, told), named)


def _named(told: Mapping[str, Any], where: str) -> dict[str, str]:
    """Texts of the special tokens that have a name, the model's own ("image_token") among them."""
    extra = told.get("extra_special_tokens")
    every = {**told, **(extra if isinstance(extra, dict) else {})}
    named = {}
    for name, token in every.items():
        if not name.endswith("_token") or token is None or isinstance(token, bool):  # add_bos_token is a switch
            continue
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise hf.CheckpointError(f"{name} = {token!r} in {where} is no text")
        named[name] = text
    return named


def _template(folder: Path, told: Mapping[str, Any]) -> str | dict[str, str] | None:
    found = told.get("chat_template")
    if isinstance(found, list):
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (TypeError, KeyError):
            pass
    if not isinstance(found, str | dict | None):
        raise hf.CheckpointError(f"chat_template in {folder}'s tokenizer_config.json is no text, but {str(found)[:40]}")
    main, more = folder / "chat_template.jinja", sorted(folder.glob("additional_chat_templates/*.jinja"))
    files = {"default": main} if main.is_file() else {}
    files |= {path.stem: path for path in more}
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if not texts:
        return found
    return texts["default"] if list(texts) == ["default"] else texts
