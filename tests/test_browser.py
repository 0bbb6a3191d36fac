"""What a learner does: open a chapter in JupyterLab, run it, move a lab's slider by keyboard and by mouse.

Needs playwright and a Chromium (`apt-get install chromium`, or CHROMIUM=/path/to/it). Without them it is skipped, and
with CI=true it fails. Screenshots stand in pytest's temporary folder, or in LLMSTACK_SHOTS.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

CHAPTERS = Path(__file__).parents[1] / "chapters"
CHAPTER = "01_architectures/01_three_families.ipynb"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-sync",
]
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # every cell is in the page, seen or not
}
READY = (
    """() => !document.querySelector('.jp-NotebookPanel .jp-Spinner') && document.body.innerText.includes('| Idle')"""
)
DONE = """() => document.querySelector('.llmstack-lab')
           && ![...document.querySelectorAll('.jp-InputPrompt')].some(p => p.textContent.includes('*'))"""
PICTURE = "async img => Array.from(new Uint8Array(await (await fetch(img.src)).arrayBuffer()))"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def absent(reason: str):
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true asks for the browser test")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """JupyterLab over a copy of the chapters, with its own settings and token: (address, token)."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: pip install -e '.[lab]'")
    home = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(CHAPTERS, home / "chapters")
    (home / "config/labconfig").mkdir(parents=True)
    (home / "config/labconfig/default_setting_overrides.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    folders = {f"JUPYTER_{kind.upper()}_DIR": str(home / kind) for kind in ("config", "data", "runtime")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command += [f"--ServerApp.root_dir={home / 'chapters'}", "--LabApp.extension_manager=readonly"]
    log = (home / "log").open("w+", encoding="utf-8")
    group = dict(start_new_session=True) if os.name == "posix" else {}
    process = subprocess.Popen(command, env=os.environ | folders, stdout=log, stderr=subprocess.STDOUT, **group)
    try:
        yield reach(process, home)
    finally:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGTERM)  # the server with its kernels, and nothing else
        else:
            process.terminate()
        process.wait(20)
        log.close()


def reach(process: subprocess.Popen, home: Path) -> tuple[str, str]:
    for _ in range(600):
        if process.poll() is not None:
            break
        for file in (home / "runtime").glob("jpserver-*.json"):
            try:
                running = json.loads(file.read_text(encoding="utf-8"))
                urlopen(f"{running['url']}api/status?token={running['token']}", timeout=2).close()
                return running["url"], running["token"]
            except (OSError, ValueError):
                pass  # half written, or not yet listening
        time.sleep(0.1)
    pytest.fail("JupyterLab did not start:\n" + (home / "log").read_text(encoding="utf-8")[-2000:])


@pytest.fixture(scope="module")
def browser():
    chromium = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None
    )
    if not chromium:
        absent("no Chromium on the path: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is not installed: pip install -e '.[test]'")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def page(server, browser, tmp_path):
    """The chapter, open with an idle kernel; the errors of the page in page.errors."""
    address, token = server
    page = browser.new_page(viewport={"width": 1280, "height": 950})
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    shots = Path(os.environ.get("LLMSTACK_SHOTS", tmp_path))
    page.shot = lambda name: page.screenshot(path=str(shots / f"{name}.png"))
    page.goto(f"{address}lab/tree/{CHAPTER}?reset&token={token}")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
    page.wait_for_function(READY, timeout=90_000)
    yield page
    page.close()


def test_a_stored_chapter_shows_its_pictures_before_it_runs(page):
    page.locator(".jp-OutputArea .jp-RenderedImage img").first.wait_for(timeout=30_000)
    page.shot("stored")
    assert page.locator(".jp-OutputArea .jp-RenderedImage img").count() >= 1
    assert page.locator("text=Error displaying widget").count() == 0
    assert page.locator("text=Loading widget").count() == 0


def test_a_lab_follows_keyboard_and_mouse(page):
    page.click("li.lm-MenuBar-item:has-text('Run')")
    page.click("li.lm-Menu-item:has-text('Run All Cells') >> nth=0")
    page.wait_for_function(DONE, timeout=300_000)
    panel = page.locator(".llmstack-lab:has(.noUi-handle)").first
    picture, handle = panel.locator("img").first, panel.locator(".noUi-handle").first
    caption = panel.locator(".widget-html-content").last
    seen = {}

    def look(name: str) -> None:
        """Wait until the figure is another than those before, and keep it."""
        for _ in range(100):
            digest = hashlib.sha256(bytes(picture.evaluate(PICTURE))).hexdigest()
            if digest not in seen:
                seen[digest] = caption.inner_text()
                break
            page.wait_for_timeout(100)
        else:
            pytest.fail(f"{name}: the figure stayed as it was; caption: {caption.inner_text()}")
        panel.scroll_into_view_if_needed()
        page.shot(name)

    picture.wait_for(timeout=60_000)
    look("run")
    handle.focus()
    page.keyboard.press("ArrowRight")
    look("keyboard")
    track, knob = panel.locator(".noUi-base").first.bounding_box(), handle.bounding_box()
    page.mouse.move(knob["x"] + knob["width"] / 2, knob["y"] + knob["height"] / 2)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] - 2, knob["y"] + knob["height"] / 2, steps=6)
    page.mouse.up()
    look("mouse")
    assert len(set(seen.values())) == 3, "the caption follows too"

    outputs = page.locator(".jp-OutputArea-output")
    assert outputs.count() > 5
    for kind in ("application/vnd.jupyter.stderr", "application/vnd.jupyter.error"):
        assert page.locator(f".jp-OutputArea-output [data-mime-type='{kind}'], [data-mime-type='{kind}']").count() == 0
    assert page.locator("text=Error displaying widget").count() == 0
    assert not page.errors
