"""Two networks from before the Transformer that accelerators are still measured by: GNMT's LSTMs and VGG-16.

LSTM (Hochreiter and Schmidhuber 1997; gates in PyTorch's order i, f, g, o):

    i, f, o = σ(W x + U h + b)     g = tanh(…)     c' = f ⊙ c + i ⊙ g     h' = o ⊙ tanh(c')

A step waits for the one before, and multiplies one vector a sequence by 8 D² weights. A convolution multiplies the same
few weights at every place of a picture: im2col writes each place's patch as a row, and a matrix product does the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, unfold

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: pooling
# Simonyan and Zisserman 2014, arXiv:1409.1556, table 1, column D


class LSTM(nn.Module):
    """One layer, one direction, parameters as torch.nn.LSTM's. x [B, T, d_in] -> out [B, T, D], (h, c) [B, D]."""

    def __init__(self, d_in: int, D: int):
        super().__init__()
        for name, shape in dict(
            weight_ih=(4 * D, d_in), weight_hh=(4 * D, D), bias_ih=(4 * D,), bias_hh=(4 * D,)
        ).items():
            setattr(self, f"{name}_l0", nn.Parameter((torch.rand(shape) * 2 - 1) * D**-0.5))

    def step(self, from_x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """from_x = W x + b [B, 4D], which needs no state and is computed for all steps at once."""
        i, f, g, o = (from_x + h @ self.weight_hh_l0.T + self.bias_hh_l0).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None):
        h = c = x.new_zeros(len(x), self.weight_hh_l0.shape[1])
        h, c = (h, c) if state is None else state
        out = []
        for from_x in (x @ self.weight_ih_l0.T + self.bias_ih_l0).unbind(1):
            h, c = self.step(from_x, h, c)
            out.append(h)
        return torch.stack(out, 1), (h, c)


class GNMT(nn.Module):
    """Google's translator, small (Wu et al. 2016, arXiv:1609.08144, fig. 1 and eq. 4): the encoder's first layer reads
    both ways, the decoder's first asks the encoder by additive attention, and its answer feeds all layers; residuals
    from the second layer on; n_layers >= 2. source [B, S], target [B, T] -> logits [B, T, V]."""

    def __init__(self, vocab_size: int, D: int, n_layers: int = 2):
        super().__init__()
        self.source, self.target = nn.Embedding(vocab_size, D), nn.Embedding(vocab_size, D)
        self.ahead, self.back = LSTM(D, D), LSTM(D, D)
        self.encoder = nn.ModuleList(LSTM(D if i else 2 * D, D) for i in range(n_layers - 1))
        self.asks = LSTM(2 * D, D)
        self.query, self.key, self.score = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Linear(D, 1, bias=False)
        self.decoder = nn.ModuleList(LSTM(2 * D, D) for _ in range(n_layers - 1))
        self.out = nn.Linear(D, vocab_size)

    def encode(self, source: Tensor) -> Tensor:
        x = self.source(source)  # [B, S, D]
        x = torch.cat([self.ahead(x)[0], self.back(x.flip(1))[0].flip(1)], -1)  # [B, S, 2D]
        for i, layer in enumerate(self.encoder):
            x = layer(x)[0] + (x if i else 0)
        return x

    def attend(self, h: Tensor, memory: Tensor, keys: Tensor) -> Tensor:
        """h [B, D] -> what it finds in the memory [B, D]."""
        weights = self.score(torch.tanh(self.query(h)[:, None] + keys)).softmax(1)  # [B, S, 1]
        return (weights * memory).sum(1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encode(source)
        keys = self.key(memory)
        h = c = found = memory.new_zeros(len(memory), memory.shape[-1])
        out = []
        for word in self.target(target).unbind(
            1
        ):  # what was found feeds the next step, so this layer goes word by word
            h, c = self.asks.step(torch.cat([word, found], -1) @ self.asks.weight_ih_l0.T + self.asks.bias_ih_l0, h, c)
            found = self.attend(h, memory, keys)
            out.append(torch.stack([h, found]))
        x, found = torch.stack(out, 2)  # [B, T, D] each
        for layer in self.decoder:
            x = layer(torch.cat([x, found], -1))[0] + x
        return self.out(x)


def conv2d(x: Tensor, w: Tensor, b: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """im2col: x [B, C, H, W], w [O, C, k, k], b [O] -> [B, O, H', W']."""
    k = w.shape[-1]
    rows = unfold(x, k, padding=padding, stride=stride)  # [B, C k k, H' W']
    size = [(n + 2 * padding - k) // stride + 1 for n in x.shape[2:]]
    return (w.flatten(1) @ rows + b[:, None]).unflatten(-1, size)


class Gemm(NamedTuple):
    """A layer as a matrix product: M rows (places, or pictures) of K values by N outputs."""

    name: str
    M: int
    N: int
    K: int

    @property
    def params(self) -> int:
        return self.N * (self.K + 1)

    @property
    def macs(self) -> int:
        return self.M * self.N * self.K


def vgg_gemms(layers=VGG16, image: int = 224, classes: int = 1000, width: int = 4096, channels: int = 3) -> list[Gemm]:
    """The products of one picture, in order; two operations a MAC. Raises ValueError where a picture does not halve."""
    out, side = [], image
    for n in layers:
        if not n and (side < 2 or side % 2):
            raise ValueError(
                f"image = {image} does not halve {layers.count(0)} times: take a multiple of {2 ** layers.count(0)}"
            )
        if n:
            out.append(Gemm(f"conv{len(out) + 1}", side * side, n, 9 * channels))
        side, channels = (side, n) if n else (side // 2, channels)
    for i, (K, N) in enumerate([(channels * side * side, width), (width, width), (width, classes)], 1):
        out.append(Gemm(f"fc{i}", 1, N, K))
    return out


class VGG(nn.Module):
    """Convolutions of 3 × 3 with ReLU, pooling, three linear layers: images [B, 3, image, image] -> [B, classes]."""

    def __init__(self, layers=VGG16, image: int = 224, classes: int = 1000, width: int = 4096):
        super().__init__()
        *convs, self.fc1, self.fc2, self.fc3 = (
            nn.Conv2d(g.K // 9, g.N, 3) if g.name.startswith("conv") else nn.Linear(g.K, g.N)
            for g in vgg_gemms(layers, image, classes, width)
        )
        self.layers, self.convs = layers, nn.ModuleList(convs)

    def forward(self, x: Tensor) -> Tensor:
        convs = iter(self.convs)
        for n in self.layers:
            if n:
                conv = next(convs)
                x = conv2d(x, conv.weight, conv.bias).relu()
            else:
                x = max_pool2d(x, 2)
        return self.fc3(self.fc2(self.fc1(x.flatten(1)).relu()).relu())
