"""Run notebooks headless and store their outputs: `python -m llmstack.course.execute chapters`.

What is stored depends on nothing but the notebook: no execution times, no widget ids, no kernel version.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WIDGET = "application/vnd.jupyter.widget-view+json"


def notebooks(paths: list[str]) -> list[Path]:
    """The notebooks among files and folders, in order. Raises FileNotFoundError when a path has none."""
    found = []
    for path in map(Path, paths):
        inside = sorted(path.rglob("*.ipynb")) if path.is_dir() else [path] * path.is_file()
        if not inside:
            raise FileNotFoundError(f"{path}: no notebook there; chapters are chapters/NN_topic/NN_section.ipynb")
        found += [p for p in inside if ".ipynb_checkpoints" not in p.parts]
    return found


def execute(path: Path) -> Path:
    """Run one notebook in its own folder and write it back with its outputs; an error leaves the file as it was."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, record_timing=False, store_widget_state=False, resources=where).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if WIDGET in data and len(data) > 1:  # the picture beside it is what a page without a kernel can show
                del data[WIDGET]
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"},
        "language_info": {"name": "python"},
    }
    partial = path.with_suffix(".partial")
    nbformat.write(notebook, partial)
    partial.replace(path)
    return path


def main(paths: list[str], workers: int = 2) -> None:
    with ThreadPoolExecutor(workers) as pool:
        for done in pool.map(execute, notebooks(paths)):
            print(done)


if __name__ == "__main__":
    main(sys.argv[1:] or ["chapters"])
