"""Language models that see: an encoder's vectors, brought to the width of the embeddings, stand before the text.

    encoder  pictures -> [B, N, De]     connector  [B, N, De] -> [B, Q, D]     decoder  [soft tokens; words] -> words

Connectors, from many tokens to few:

    projector   Q = N        two layers on each token (LLaVA-1.5, arXiv:2310.03744, section 3.3)
    PruMerge    Q by image   the tokens that stand out, each with what is like it (Shang et al. 2024, arXiv:2403.15388)
    resampler   Q fixed      learned queries that attend to the tokens (Perceiver, 2103.03206; Flamingo, 2204.14198)
    tiles       (n + 1) Q    a large picture cut into n of the encoder's size, and all of it small (Monkey, 2311.06607)

A decoder reads every token that stands before a word, in each layer, so that Q sets the price of a picture: its share
of the prefill and of the key-value cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize
from torch.nn.utils.rnn import pad_sequence

from llmstack.architectures.decoder import Decoder
from llmstack.architectures.ends import check_ids, prepare
from llmstack.architectures.layers import Block, Norm, Pass
from llmstack.architectures.vision import ViT, patchify, start, tower


def projector(d_in: int, d_out: int) -> nn.Sequential:
    """Two layers on each token by itself: [B, N, d_in] -> [B, N, d_out]."""
    return nn.Sequential(nn.Linear(d_in, d_out), nn.GELU(), nn.Linear(d_out, d_out))


class Resampler(nn.Module):
    """tokens [B, N, d_in] -> [B, queries, d_model] for any N. Nothing in it knows the order of the tokens: what place a
    token had must be in its vector.

    A layer: the queries attend to each other and to the tokens, then an FFN.
    """

    def __init__(self, d_in: int, d_model: int, queries: int, n_layers: int = 1, n_heads: int = 4, seed: int = 0):
        super().__init__()
        config = tower("resampler", d_model, n_layers, n_heads, queries)
        self.widen, self.norm_in, self.norm = nn.Linear(d_in, d_model, bias=False), Norm(config), Norm(config)
        self.queries = nn.Parameter(torch.randn(queries, d_model, generator=torch.Generator().manual_seed(seed)))
        self.blocks = nn.ModuleList(Block(config, layer, cross=True) for layer in range(n_layers))
        start(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        now, x = Pass(memory=self.norm_in(self.widen(tokens))), self.queries.expand(len(tokens), -1, -1)
        for block in self.blocks:
            x = block(x, now)
        return self.norm(x)


def salient(attention: Tensor, ratio: float | None = None) -> Tensor:
    """Which tokens to keep, bool [B, N], by the class token's attention [B, N]: the largest, and those more than 1.5
    interquartile ranges above the third quartile; or with `ratio` the ⌈ratio · N⌉ largest. Raises ValueError."""
    if ratio is None:
        attention = attention.to(torch.promote_types(attention.dtype, torch.float32))  # no quantiles of halves
        low, high = attention.quantile(torch.tensor([0.25, 0.75]).to(attention), dim=-1, keepdim=True)
        return (attention > high + 1.5 * (high - low)) | (attention == attention.amax(-1, keepdim=True))
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio = {ratio}, but the share of tokens to keep is over 0 and at most 1 (all)")
    kept = attention.topk(math.ceil(ratio * attention.shape[-1]), -1).indices
    return torch.zeros_like(attention, dtype=torch.bool).scatter(-1, kept, True)


def prumerge(
    tokens: Tensor, keys: Tensor, attention: Tensor, ratio: float | None = None, neighbours: int = 8
) -> tuple[Tensor, Tensor]:
    """tokens [B, N, D], keys [B, N, Dk], attention [B, N] -> merged [B, M, D], and which are real [B, M]: M varies.

    Each kept token becomes the mean, weighted by attention, of itself and the `neighbours` dropped tokens whose keys
    are most like its own. Where none is dropped that is the token itself.
    """
    out = []
    for x, k, a, keep in zip(tokens, normalize(keys, dim=-1), attention, salient(attention, ratio), strict=True):
        near = (k[keep] @ k[~keep].T).topk(min(neighbours, int((~keep).sum())), -1).indices  # [M, k] among the dropped
        weights = torch.cat([a[keep][:, None], a[~keep][near]], 1)  # [M, 1 + k]
        group = torch.cat([x[keep][:, None], x[~keep][near]], 1)  # [M, 1 + k, D]
        out.append((weights / weights.sum(1, keepdim=True)).unsqueeze(1).matmul(group)[:, 0])
    real = pad_sequence([torch.ones(len(x), dtype=torch.bool) for x in out], batch_first=True)
    return pad_sequence(out, batch_first=True), real.to(tokens.device)


class TileLinear(nn.Module):
    """A frozen linear layer with a low-rank addition for each of n tiles: rows [B · n, N, d_in], tile by tile within a
    picture, -> [B · n, N, d_out]. y = W x + Bₜ Aₜ x, and Bₜ starts at zero."""

    def __init__(self, linear: nn.Linear, tiles: int, rank: int):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(tiles, rank, linear.in_features) * linear.in_features**-0.5)
        self.B = nn.Parameter(torch.zeros(tiles, linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        each = x.unflatten(0, (-1, len(self.A)))  # [B, n, N, d_in]
        low = torch.einsum("bnti,nri->bntr", each, self.A)  # [B, n, N, rank]
        return self.linear(x) + torch.einsum("bntr,nor->bnto", low, self.B).flatten(0, 1)


def adapt_tiles(encoder: ViT, tiles: int, rank: int) -> None:
    """Freeze an encoder and give the linear layers of its blocks an adapter for each tile, the whole picture counted as
    the last one (Monkey: "individual adapter for each patch", arXiv:2311.06607)."""
    encoder.requires_grad_(False)
    for block in encoder.blocks:
        for part in (block.attention, block.ffn):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, TileLinear(linear, tiles, rank))


class Tiled(nn.Module):
    """Monkey's front end: images [B, C, H, W], H and W multiples of `size` -> [B, (tiles + 1) · queries, D].

    Tiles and the whole picture at reduced size pass the same encoder and the same resampler. rank: that of an adapter
    for each of them in the encoder, which is frozen then, and pictures have `tiles` tiles always; 0: none.
    """

    def __init__(self, encoder: ViT, resampler: nn.Module, size: int, rank: int = 0, tiles: int = 0):
        super().__init__()
        self.encoder, self.resampler, self.size = encoder, resampler, size
        if rank:
            adapt_tiles(encoder, tiles + 1, rank)

    def forward(self, images: Tensor) -> Tensor:
        C = images.shape[1]
        tiles = patchify(images, (self.size, self.size)).unflatten(-1, (C, self.size, self.size))  # [B, n, C, s, s]
        whole = interpolate(images, (self.size, self.size), mode="area")[:, None]
        each = torch.cat([tiles, whole], 1)  # [B, n + 1, C, s, s]
        return self.resampler(self.encoder(each.flatten(0, 1))[:, 1:]).unflatten(0, each.shape[:2]).flatten(1, 2)


class VisionLanguage(nn.Module):
    """`see` turns what is not text into soft tokens [B, Q, D] (or a pair with which of them are real [B, Q]); the
    decoder continues them. Without pictures it is the decoder alone, to the bit."""

    def __init__(self, see: nn.Module, decoder: Decoder):
        super().__init__()
        if not isinstance(decoder, Decoder) or decoder.config.d_state:
            raise TypeError(f"soft tokens stand before a Transformer decoder's words, got {type(decoder).__name__}")
        self.see, self.decoder = see, decoder

    def forward(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] at the words of ids [B, T]."""
        if images is None:
            return self.decoder(ids)
        soft = self.see(images)
        soft, real = soft if isinstance(soft, tuple) else (soft, None)
        model, B, Q = self.decoder, len(ids), soft.shape[1]
        table = model.config.max_seq_len if model.config.positions == "learned" else 0
        check_ids(ids, model.config, start=Q, table=table)
        padding = None if real is None else torch.cat([real, torch.ones_like(ids, dtype=torch.bool)], 1)
        now, positions = prepare(model.config, torch.cat([ids.new_zeros(B, Q), ids], 1), padding)
        x = torch.cat([soft, model.embed(ids, positions[:, Q:])], 1)  # [B, Q + T, D]
        for block in model.blocks:
            x = block(x, now)
        return model.out((x if model.norm is None else model.norm(x))[:, Q:])

    @torch.no_grad()
    def caption(self, ids: Tensor, images: Tensor | None, words: int) -> Tensor:
        """ids [B, T] and the likeliest `words` tokens after them, [B, T + words]."""
        for _ in range(words):
            ids = torch.cat([ids, self(ids, images)[:, -1:].argmax(-1)], 1)
        return ids


class See(nn.Module):
    """A ViT's patches through a connector; with `ratio` (None: by IQR, 1: all) pruned and merged before it."""

    def __init__(self, encoder: ViT, connector: nn.Module, ratio: float | None = 1.0):
        super().__init__()
        self.encoder, self.connector, self.ratio = encoder, connector, ratio

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.ratio == 1.0:
            return self.connector(self.encoder(images)[:, 1:])
        merged, real = prumerge(*self.encoder.salience(images), self.ratio)
        return self.connector(merged), real
