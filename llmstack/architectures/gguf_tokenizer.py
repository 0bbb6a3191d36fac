"""The tokenizer that a GGUF holds: its vocabulary, scores or merges, and how llama.cpp cuts text before it merges.

    tokenizer.ggml.model    "gpt2": byte-level BPE, whose merges are listed; `pre` names how text is cut into words
                            "llama": SentencePiece's BPE, whose scores rank the merges; unknown letters become bytes
    tokenizer.ggml.pre      the patterns below, each with all names that it goes by

A token's type is 1 normal, 2 unknown and 3 control (both special), 4 user-defined (kept whole, not special), 5 unused,
6 byte.
Source: the GGUF specification; llama.cpp's llama-vocab.cpp; the patterns as the models' own tokenizers have them.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Inner

from llmstack.architectures.gguf import GGUF, GGUFError
from llmstack.architectures.tokenizer import Tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _REST
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt-2": "", "smollm": "", "llama-bpe": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
WHOLE_FIRST = ("llama-bpe", "tekken")  # a word that is a token is taken before any merge
READ = "model pre tokens scores token_type merges add_bos_token add_eos_token add_space_prefix".split()
NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "cls": "cls"}
NAMES |= {"mask": "mask"}


def tokenizer_from_gguf(file: GGUF) -> Tokenizer:
    """The tokenizer of a GGUF. Raises GGUFError for a kind that is not known here, and for a damaged vocabulary.

    "smollm" cuts every numeral off before the merges, as SmolLM2 was trained and llama.cpp reads it; transformers does
    not when it reads a GGUF, and so merges signs such as ½ with their neighbours. A space that SentencePiece puts
    before a text is put before its beginning only, as transformers does, not after each special token.
    """
    get = lambda key, default=None: file.metadata.get(f"tokenizer.ggml.{key}", default)
    kind, pre = get("model"), ALIASES.get(get("pre"), get("pre"))
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and pre not in PATTERNS):
        known = ", ".join([*PATTERNS, *ALIASES])
        raise GGUFError(
            f"{file.path.name} has the tokenizer {(kind, get('pre'))}; byte-level BPE, 'gpt2' with pre {known}, and "
            "SentencePiece's, 'llama', are known"
        )
    _check_keys(file)
    tokens = get("tokens")
    if not tokens or (kind == "gpt2" and get("merges") is None) or (kind == "llama" and get("scores") is None):
        need = "tokens and merges" if kind == "gpt2" else "tokens and scores"
        raise GGUFError(f"{file.path.name} lacks tokenizer.ggml's {need}, which the tokenizer {kind!r} consists of")
    types = get("token_type") or [1] * len(tokens)
    ids = {short: get(f"{name}_token_id") for name, short in NAMES.items()}
    try:
        inner = _byte_level(tokens, get("merges"), pre) if kind == "gpt2" else _sentencepiece(get, tokens, ids["unk"])
        named = {f"{short}_token": tokens[i] for short, i in ids.items() if i is not None}
        for wanted, special in (((2, 3), True), ((4,), False)):
            added = [t for t, k in zip(tokens, types, strict=True) if k in wanted]
            inner.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
        _surround(inner, get("add_bos_token", kind == "llama" or pre == "llama-bpe"), get("add_eos_token"), ids, tokens)
    except Exception as error:  # the library raises plain Exceptions
        raise GGUFError(f"{file.path.name} has a damaged tokenizer: {error}; fetch it again") from None
    ends = [get(f"{end}_token_id") for end in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    return Tokenizer(inner, eos, ids["bos"], ids["pad"], _template(file), named)


def _check_keys(file: GGUF) -> None:
    """Refuse by name what would cut text otherwise than it is cut here."""
    for key, value in file.metadata.items():
        group, _, name = key.partition("tokenizer.ggml.")
        if group or not name or name in READ or name.endswith("_token_id") or name == "token_type_count":
            continue
        if value is not False:
            raise GGUFError(f"{file.path.name} has {key} = {str(value)[:40]}, which this reader does not know")


def _byte_level(tokens: list[str], merges: list[str], pre: str) -> Inner:
    pairs = [tuple(m.split(" ")) for m in merges]
    inner = Inner(models.BPE(_ids(tokens), pairs, ignore_merges=pre in WHOLE_FIRST))
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if PATTERNS[pre]:
        cuts = [pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not PATTERNS[pre])
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece(get, tokens: list[str], unknown: int | None) -> Inner:
    ids, listed = _ids(tokens), get("merges")
    merges = _merges(ids, get("scores")) if listed is None else [tuple(m.split(" ")) for m in listed]
    unk = None if unknown is None else tokens[unknown]
    inner = Inner(models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefix = get("add_space_prefix", True)
    scheme = "first" if prefix else "never"
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return inner


def _ids(tokens: list[str]) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise ValueError(f"the token {twice!r} stands twice in it")
    return ids


def _merges(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token: the best score first, then the longer left and right part."""
    found = []
    for (token, _), score in zip(ids.items(), scores, strict=True):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, *pair) for pair in pairs]
    found.sort(key=lambda m: (m[0], len(m[1]), len(m[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _surround(inner: Inner, bos: Any, eos: Any, ids: dict[str, int | None], tokens: list[str]) -> None:
    """What `encode` puts around a text."""
    before = [tokens[ids["bos"]]] if bos and ids["bos"] is not None else []
    after = [tokens[ids["eos"]]] if eos and ids["eos"] is not None else []
    if before or after:
        special = [(token, inner.token_to_id(token)) for token in {*before, *after}]
        inner.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)


def _template(file: GGUF) -> str | dict[str, str] | None:
    one = file.metadata.get("tokenizer.chat_template")
    names = file.metadata.get("tokenizer.chat_templates") or []
    more = {name: file.metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    if not more:
        return one
    return {**({"default": one} if one else {}), **more}
