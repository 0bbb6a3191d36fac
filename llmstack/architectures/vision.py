"""Pictures as tokens: patches, the encoder that reads them (ViT), and CLIP, which joins pictures and sentences.

A patch is a word: a picture of H × W falls into (H / p)(W / p) squares, each flattened and multiplied by a matrix
(Dosovitskiy et al. 2020, arXiv:2010.11929, eq. 1). A film falls into blocks of t × p × p, its space-time patches
(Arnab et al. 2021, arXiv:2103.15691; OpenAI says that Sora has them, and no more). From there on it is a Transformer.

CLIP (Radford et al. 2021, arXiv:2103.00020, fig. 3) trains a ViT and a text decoder so that the vector of a picture
points to that of its own caption, among all captions of the batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from llmstack.architectures.decoder import Decoder
from llmstack.architectures.layers import Block, Norm, Pass, draw
from llmstack.config import ModelConfig


def patchify(x: Tensor, patch: Sequence[int]) -> Tensor:
    """x [B, C, *sizes] -> tokens [B, N, C · p₁ · p₂ …] in reading order; pictures have two sizes, films three.

    Raises ValueError where a size does not divide by its patch.
    """
    sizes = x.shape[2:]
    if len(sizes) != len(patch) or any(p < 1 or s < p or s % p for s, p in zip(sizes, patch)):
        fits = [max(1, round(s / max(p, 1))) * max(p, 1) for s, p in zip(sizes, patch)]
        raise ValueError(
            f"sizes {list(sizes)} do not tile into patches of {list(patch)}: each has to be a multiple of its own; "
            f"resize, crop or pad to {fits}"
        )
    cut = x.reshape(*x.shape[:2], *(n for s, p in zip(sizes, patch) for n in (s // p, p)))  # [B, C, n₁, p₁, n₂, p₂ …]
    places, insides = range(2, cut.ndim, 2), range(3, cut.ndim, 2)
    return cut.permute(0, *places, 1, *insides).flatten(1 + len(patch)).flatten(1, len(patch))


def unpatchify(tokens: Tensor, patch: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The inverse: tokens [B, N, C · p₁ · p₂ …] -> x [B, C, *sizes]."""
    n = [s // p for s, p in zip(sizes, patch)]
    if [p * m for p, m in zip(patch, n)] != list(sizes) or prod(n) != tokens.shape[1] or tokens.shape[2] % prod(patch):
        raise ValueError(f"tokens {list(tokens.shape)} are not those of sizes {list(sizes)}, patches of {list(patch)}")
    x = tokens.reshape(len(tokens), *n, tokens.shape[2] // prod(patch), *patch)  # [B, n₁, n₂ …, C, p₁, p₂ …]
    D = len(patch)
    pairs = [axis for i in range(D) for axis in (1 + i, 2 + D + i)]
    return x.permute(0, 1 + D, *pairs).reshape(len(x), x.shape[1 + D], *sizes)


def visual_tokens(height: int, width: int, patch: int) -> int:
    """How many tokens a picture is: the formula, with the remainder cut off as a strided convolution does."""
    return (height // patch) * (width // patch)


def tower(
    name: str, d_model: int, n_layers: int, n_heads: int, tokens: int, vocab_size: int = 1, **dials
) -> ModelConfig:
    """The config of one of CLIP's two encoders: pre-norm blocks with biases and a table of `tokens` positions."""
    usual = dict(
        norm="layernorm", norm_bias=True, activation="gelu", positions="learned", max_seq_len=tokens, tied=True
    )
    usual |= dict(qkv_bias=True, out_bias=True, ffn_bias=True, model_type="clip")
    return ModelConfig(name, d_model, n_layers, n_heads, vocab_size, **(usual | dials))


def quick_gelu(x: Tensor) -> Tensor:
    """x σ(1.702 x), with which CLIP was trained; up to 0.021 from GELU."""
    return x * torch.sigmoid(1.702 * x)


@torch.no_grad()
def start(model: nn.Module, seed: int) -> None:
    """Draw matrices with variance 1 / fan-in, as CLIP does, and vectors with 0.02²: with the 0.02 of wide models a
    narrow tower starts nearly constant, and its contrastive loss stays on a plateau."""
    rng = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            draw(module.weight, module.in_features**-0.5, rng)
        elif isinstance(module, nn.Embedding):
            draw(module.weight, 0.02, rng)


class ViT(nn.Module):
    """images [B, C, H, W] -> [B, 1 + N, D]: a class token, then the patches, before the final norm as LLaVA has them.

    config.max_seq_len is 1 + N: the learned table fixes the size of a picture.
    """

    def __init__(self, config: ModelConfig, patch: int, channels: int = 3, seed: int = 0):
        super().__init__()
        self.config, self.patch = config, patch
        self.cls = nn.Parameter(torch.zeros(config.d_model))
        self.patches = nn.Linear(channels * patch**2, config.d_model, bias=False)
        self.positions = nn.Embedding(config.max_seq_len, config.d_model)
        self.norm_in, self.norm = Norm(config), Norm(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        start(self, seed)

    def embed(self, images: Tensor) -> Tensor:
        x = self.patches(patchify(images, (self.patch, self.patch)))  # [B, N, D]
        if 1 + x.shape[1] != self.config.max_seq_len:
            raise ValueError(
                f"images of {list(images.shape[2:])} are {x.shape[1]} patches of {self.patch}, but {self.config.name} "
                f"has positions for {self.config.max_seq_len - 1}; resize the images"
            )
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], 1)
        return self.norm_in(x + self.positions.weight)

    def forward(self, images: Tensor, layers: int | None = None) -> Tensor:
        x = self.embed(images)
        for block in self.blocks[:layers]:
            x = block(x, Pass())
        return x

    def pooled(self, images: Tensor) -> Tensor:
        """[B, D]: the class token after the final norm."""
        return self.norm(self(images)[:, 0])

    def salience(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output's patches [B, N, D], the last block's keys [B, N, D], and the class token's attention to them
        there, the mean over heads [B, N]: what PruMerge goes by."""
        x, last = self(images, -1), self.blocks[-1]
        q, k, _ = last.attention.project(last.norm1(x))
        heads = lambda y: y.unflatten(-1, (-1, self.config.d_head)).transpose(1, 2)  # [B, H, T, Dh]
        weights = (heads(q[:, :1]) @ heads(k).transpose(2, 3) * self.config.attention_scale).softmax(-1)  # [B, H, 1, T]
        return last(x, Pass())[:, 1:], k[:, 1:], weights.mean(1)[:, 0, 1:]


class CLIP(nn.Module):
    """A ViT and a text decoder into E shared dimensions. `eos`: the token whose vector stands for the text; without it
    the one with the largest id, as OpenAI's first checkpoints have it. `quick`: quick_gelu in place of GELU."""

    def __init__(
        self, vision: ViT, text: ModelConfig, d_shared: int, eos: int | None = None, quick=False, seed: int = 0
    ):
        super().__init__()
        self.vision, self.text, self.eos = vision, Decoder(text, seed), eos
        self.see = nn.Linear(vision.config.d_model, d_shared, bias=False)
        self.read = nn.Linear(text.d_model, d_shared, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.6592))  # log(1 / 0.07), section 2.5
        start(self, seed)
        for block in (*vision.blocks, *self.text.blocks) if quick else ():
            block.ffn.act = quick_gelu

    def pictures(self, images: Tensor) -> Tensor:
        """images [B, C, H, W] -> vectors of length 1 [B, E]."""
        return normalize(self.see(self.vision.pooled(images)), dim=-1)

    def sentences(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> vectors of length 1 [B, E]; what follows the end of a text is not seen."""
        *_, x = self.text.states(ids)  # [B, T, D]
        end = (ids if self.eos is None else (ids == self.eos).int()).argmax(-1)
        return normalize(self.read(x[torch.arange(len(x)), end]), dim=-1)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        """Logits [pictures, sentences]: cosines over a learnt temperature."""
        return self.scale.exp() * self.pictures(images) @ self.sentences(ids).T


def contrastive_loss(logits: Tensor, same: Tensor | None = None) -> Tensor:
    """Cross-entropy of finding each picture's caption among the batch's, and each caption's picture, in equal parts.

    `same` [B, B] is True where a caption is right for a picture; by default only its own is.
    """
    same = torch.eye(len(logits), device=logits.device) if same is None else same.float()
    if logits.shape != same.shape or not (same.any(0).all() and same.any(1).all()):
        raise ValueError(
            f"logits {list(logits.shape)} and same are [B, B], every picture with a right caption and back"
        )
    share = lambda right: right / right.sum(1, keepdim=True)
    return (cross_entropy(logits, share(same)) + cross_entropy(logits.T, share(same.T))) / 2


# transformers' names and ours, applied in this order
NAMES = """
vision_model. vision.  text_model. text.  vision.embeddings.class_embedding vision.cls
vision.embeddings.patch_embedding vision.patches  vision.embeddings.position_embedding vision.positions
text.embeddings.token_embedding text.embed.tokens  text.embeddings.position_embedding text.embed.positions
encoder.layers blocks  self_attn.out_proj attention.o  self_attn. attention.  q_proj q  k_proj k  v_proj v
layer_norm1 norm1  layer_norm2 norm2  mlp.fc1 ffn.up  mlp.fc2 ffn.down  pre_layrnorm norm_in  post_layernorm norm
final_layer_norm norm  visual_projection see  text_projection read  logit_scale scale
""".split()


def load_clip(folder: str | Path) -> CLIP:
    """The CLIP in a folder as transformers writes it: config.json and model.safetensors."""
    raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    see, read, quick = raw["vision_config"], raw["text_config"], raw["vision_config"]["hidden_act"] == "quick_gelu"
    sizes = lambda c: (c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"])
    dials = lambda c: dict(d_ff=c["intermediate_size"], norm_eps=c["layer_norm_eps"])
    tokens = 1 + visual_tokens(see["image_size"], see["image_size"], see["patch_size"])
    vision = ViT(tower("clip-vision", *sizes(see), tokens, **dials(see)), see["patch_size"], see["num_channels"])
    text = tower("clip-text", *sizes(read), read["max_position_embeddings"], read["vocab_size"], **dials(read))
    eos = None if read["eos_token_id"] == 2 else read["eos_token_id"]
    model, state = CLIP(vision, text, raw["projection_dim"], eos, quick), {}
    for name, tensor in load_file(Path(folder) / "model.safetensors").items():
        for theirs, ours in zip(NAMES[::2], NAMES[1::2]):
            name = name.replace(theirs, ours)
        state[name] = tensor.flatten(1) if tensor.ndim == 4 else tensor
    state["text.out.head.weight"] = state["text.embed.tokens.weight"]  # tied, and unused: a text encoder has no head
    model.load_state_dict({name: tensor for name, tensor in state.items() if not name.endswith("position_ids")})
    return model.eval()
