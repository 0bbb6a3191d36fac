"""Frozen linear layers that hold packed codes in place of a weight, and the product that goes with them.

    y = x Ŵᵀ + b            dx = dy Ŵ            Ŵ [out, in] from codes, made anew in each direction

Forward makes Ŵ and drops it; backward makes it once more. So neither Ŵ nor x is kept for a gradient, at the price of
dequantising twice: memory is that of the codes (4.127 bits a weight in NF4) and of one weight at a time.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from llmstack.ops.nf4 import decode_torch, double_torch, encode_torch, nf4_weight_torch, single_torch
from llmstack.ops.quantise import dequantise_torch, pack_torch, quantise_torch, unpack_torch


class _Product(torch.autograd.Function):
    """x Ŵᵀ for a frozen Ŵ that exists only while it multiplies: once here, once more in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: Packed) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.dequantise().to(x.dtype))

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ ctx.layer.dequantise().to(dy.dtype), None


class Packed(nn.Module):
    """A frozen linear that holds codes in place of a weight. Subclasses say how a weight [out, in] comes from them."""

    def __init__(self, of: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.dtype = of.in_features, of.out_features, of.weight.dtype

    def keep(self, bias: Tensor | None = None, **buffers: Tensor) -> None:
        for name, tensor in (buffers | {"bias": bias}).items():
            self.register_buffer(name, None if tensor is None else tensor.detach().clone())

    def dequantise(self) -> Tensor:
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """Ŵ [out, in], made anew, in the dtype of the linear's."""
        return self.dequantise().to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y = _Product.apply(x, self)
        return y if self.bias is None else y + self.bias

    @property
    def bits(self) -> float:
        """Bits a weight, as stored."""
        held = [t for name, t in self.named_buffers() if name != "bias"]
        return 8 * sum(t.numel() * t.element_size() for t in held) / (self.in_features * self.out_features)


class NFLinear(Packed):
    """NormalFloat of 2, 3, 4 or 8 bits in blocks; the blocks' constants in FP8 when `double`, else in fp32."""

    def __init__(
        self, of: nn.Linear, bits: int = 4, block: int = 64, double: bool = True, weight: Tensor | None = None
    ):
        super().__init__(of)
        self.width, self.block, self.double = bits, block, double
        codes, a = encode_torch(of.weight if weight is None else weight, f"nf{bits}", block)
        codes = pack_torch(pad(codes, (0, -len(codes) % 8)), bits)
        self.keep(of.bias, codes=codes, **(dict(zip(("a", "second", "mean"), double_torch(a))) if double else {"a": a}))

    def dequantise(self) -> Tensor:
        a = single_torch(self.a, self.second, self.mean) if self.double else self.a
        shape = (self.out_features, self.in_features)
        if self.width == 4:
            return nf4_weight_torch(self.codes, a, shape, self.block)
        codes = unpack_torch(self.codes, self.width)[: prod(shape)]
        return decode_torch(codes, a, f"nf{self.width}", self.block).view(shape)


class IntLinear(Packed):
    """Whole numbers of `bits` bits with a scale and a zero point for each `group` of inputs."""

    def __init__(self, of: nn.Linear, bits: int = 4, group: int = 32):
        super().__init__(of)
        self.width, self.group = bits, group or of.in_features
        codes, scale, zero = quantise_torch(of.weight.detach(), bits, group)
        self.keep(of.bias, codes=pack_torch(codes, bits), scale=scale, zero=zero)

    def dequantise(self) -> Tensor:
        return dequantise_torch(unpack_torch(self.codes, self.width), self.scale, self.zero)
