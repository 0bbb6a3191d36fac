"""Questions judge answers, labs follow their controls, and what a notebook stores reads well without a kernel."""

import base64
import re

import nbformat
import numpy as np
import pytest
from matplotlib.figure import Figure

from llmstack.course.execute import execute
from llmstack.course.panels import lab, question

MEMORY = dict(answer=16.06e9, unit="bytes", tolerance=0.02, hints={8.03e9: "That is the number of parameters."})


@pytest.mark.parametrize(
    ("given", "right", "says"),
    [
        (16e9, True, "Right: 1.606e+10 bytes."),
        ("16,060,000,000 bytes", True, "Right"),
        ("1.61e10", True, "Right"),
        ("48.18e9/3", True, "Right"),
        (8.03e9, False, "That is the number of parameters."),
        (32.12e9, False, "a factor of 2 over"),
        (16.06e6, False, "a factor of 1000 under"),
        (2.0075e9, False, "Bits or bytes?"),
        (-16.06e9, False, "the sign is not"),
        (5e9, False, "Too small."),
        (1e12, False, "Too large."),
        ("much", False, "Write a number in bytes"),
        ("1/0", False, "Write a number in bytes"),
        (float("nan"), False, "Write a number in bytes"),
        ("1e999", False, "Write a number in bytes"),
        (10**400, False, "Write a number in bytes"),
        ("2^34", False, "Write a number in bytes"),
        ("16 060 000 000", False, "Write a number in bytes"),
        ("1,6e10", False, "Write a number in bytes"),
    ],
    ids=str,
)
def test_a_number_is_judged(given, right, says):
    result = question("How large is Llama 3 8B in bf16?", **MEMORY).check(given)
    assert result.right is right and says in result.says


def test_gigabytes_are_not_gibibytes():
    assert "GiB" in question("?", answer=16.0, unit="GB", tolerance=0.001).check(16 / 1.073741824).says


def test_a_choice_is_judged_by_index_or_text():
    hints = {0: "Yes.", 1: "It sees the future.", None: "Look at the mask."}
    asked = question("Which family is causal?", choices=["decoder", "encoder", "neither"], answer=0, hints=hints)
    assert asked.check(0) == asked.check("decoder") == (True, "Right. Yes.")
    assert asked.check(1) == (False, "Not that one. It sees the future.")
    assert asked.check("neither") == (False, "Not that one. Look at the mask.")
    assert repr(asked) == "Question('Which family is causal?')"


@pytest.mark.parametrize(
    "wrong",
    [
        dict(answer=3, choices=["a", "b"]),
        dict(answer="b", choices=["a", "b"]),
        dict(answer="9 GB"),
        dict(answer=float("nan")),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(wrong):
    with pytest.raises(ValueError, match=r"answer = .* must be"):
        question("?", **wrong)


def test_an_answer_may_be_computed_and_hints_have_numbers():
    assert question("?", answer=np.int64(3)).check("3").right
    with pytest.raises(ValueError, match="hints .*'a'"):
        question("?", answer=3, hints={"a": "Why?"})


def test_the_form_replies():
    form = question("How large is Llama 3 8B in bf16?", **MEMORY).form()
    _, field, reply = form.children
    field.value = "8.03e9"
    assert "✗" in reply.value and "number of parameters" in reply.value
    field.value = "16.06 e9"
    assert "✗" in reply.value
    field.value = "16.06e9"
    assert "✓" in reply.value


def draw(n: int, scale: float, log: bool, kind: str):
    if kind == "none":
        raise ValueError("no such kind")
    fig = Figure(figsize=(2, 1))
    fig.subplots().plot([0, n * scale])
    return fig, f"{kind} <{n}> at {scale:.2f}, log {log}"


def test_a_lab_follows_its_controls():
    panel = lab(draw, "A lab", n=(1, 8), scale=(0.0, 1.0, 0.5, 0.5), log=False, kind=["line", "bar", "none"])
    first = panel.png
    assert panel.caption == "line <1> at 0.50, log False" and first.startswith(b"\x89PNG")
    image, caption = panel.box.children[-2:]
    panel.set(n=8)
    assert panel.png != first and image.value == panel.png
    assert "&lt;8&gt;" in caption.value, "captions are escaped"
    before = image.value
    panel.set(kind="none")
    assert "no such kind" in caption.value and image.value == before
    panel.set(kind="bar", log=True)
    assert caption.value.endswith("log True")


def test_a_control_that_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match=r"control n = 3: give \(low, high, step, start\)"):
        lab(draw, "", n=3)
    for wrong in ((), (1,), (1, 2, 1, 1, 1), ("a", "b"), (5, 1), []):
        with pytest.raises(ValueError, match=r"control n = .*: give \(low, high, step, start\)"):
            lab(draw, "", n=wrong)
    with pytest.raises(KeyError, match="no control 'm'; there are n"):
        lab(lambda n: draw(n, 1.0, False, "line"), "", n=(1, 3)).set(m=2)


CELLS = [
    "import time\nfrom matplotlib.figure import Figure\nfrom llmstack import course",
    "def draw(n):\n    fig = Figure(figsize=(2, 1))\n    fig.subplots().plot([0, n])\n    return fig, f'n is {n}'\n\n"
    "course.lab(draw, 'A lab', n=(1, 8))",
    "course.question('One plus <b>one</b>?', answer=2)",
    "for i in course.progress(range(3), 'counting'):\n    time.sleep(0.01)",
    "course.lab(draw, 'Another', n=(1, 8)).set(n=3)",
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("notebook") / "panels.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS]), path)
    return execute(path)


def test_a_stored_notebook_needs_no_kernel(stored):
    outputs = [cell.outputs for cell in nbformat.read(stored, 4).cells]
    assert [len(o) for o in outputs] == [0, 1, 1, 1, 1], "one output a panel, and no object printed after it"
    assert all(o.output_type == "display_data" for cell in outputs for o in cell)
    picture, asked, bar = (o[0].data for o in outputs[1:4])
    assert picture["text/plain"] == "Lab: A lab. n is 1"
    assert base64.b64decode(picture["image/png"]).startswith(b"\x89PNG")
    assert asked["text/plain"] == "Question: One plus <b>one</b>?"
    assert "One plus &lt;b&gt;one&lt;/b&gt;?" in asked["text/html"] and "<details>" in asked["text/html"]
    assert bar == {"text/plain": "", "text/html": ""}
    assert not any("widget" in kind for o in (picture, asked, bar) for kind in o)


def test_as_a_page_it_has_each_picture_once(stored):
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter(embed_images=True).from_filename(str(stored))
    assert len(re.findall(r'<img[^>]*src="data:image/png', page)) == 2
    assert page.count("<summary>Answer</summary>") == 1
    assert "vnd.jupyter.widget-view" not in page and "Error displaying widget" not in page
