"""State spaces: sequence layers that carry a state of fixed size instead of looking back at every token.

    h'(t) = A h(t) + B x(t)       y(t) = Re C h(t) + D x(t)          one input, N states

held constant over a step Δ (zero-order hold):  h_k = Ā h_{k−1} + B̄ x_k,  Ā = exp(Δ A),  B̄ = (Ā − 1) A⁻¹ B.

S4D (Gu et al. 2022, arXiv:2206.11893): A is diagonal and fixed, so the layer is linear and the same at every time. It
is a convolution with K_k = Re C Ā^k B̄ (training: an FFT over the whole sequence), and the recurrence (writing: one
step a token), which are equal. Mamba (Gu and Dao 2023, arXiv:2312.00752): Δ, B and C depend on the token, so that it
can choose what to keep; there is no convolution any more, and the scan (ops/scan.py) takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from llmstack.architectures.decoder import Decoder
from llmstack.architectures.ends import Embedding, Head, check_ids
from llmstack.architectures.layers import Norm, initialise
from llmstack.config import ConfigError, ModelConfig
from llmstack.ops.activations import ACTIVATIONS_TORCH
from llmstack.ops.scan import recur_chunked, scan_torch


def hippo_legs(N: int) -> tuple[Tensor, Tensor]:
    """A [N, N] and B [N] of HiPPO-LegS (Gu et al. 2020, arXiv:2008.07669, theorem 2), fp64: in h' = (A h + B x) / t the
    states are the coefficients of all of x so far in Legendre polynomials, the best that N numbers can keep."""
    root = torch.sqrt(2 * torch.arange(N, dtype=torch.float64) + 1)  # [N]
    return -torch.tril(root[:, None] * root, -1) - torch.diag(torch.arange(N, dtype=torch.float64) + 1), root


def hippo_memory(x: Tensor, N: int) -> Tensor:
    """What N states know of x [T] at its end: x as they give it back, [T]. The steps are bilinear."""
    (A, B), T, h = hippo_legs(N), len(x), torch.zeros(N, dtype=torch.float64)
    for k, value in enumerate(x.double(), 1):
        step = A / (2 * k)
        h = torch.linalg.solve(torch.eye(N, dtype=h.dtype) - step, h + step @ h + B * value / k)
    at, last = 2 * (torch.arange(T, dtype=torch.float64) + 0.5) / T - 1, torch.zeros(T)  # in −1 … 1
    now, out = torch.ones(T, dtype=torch.float64), torch.zeros(T, dtype=torch.float64)
    for n in range(N):  # Bonnet's recurrence of the Legendre polynomials
        out, now, last = out + h[n] * B[n] * now, ((2 * n + 1) * at * now - n * last) / (n + 1), now
    return out


def s4d_poles(N: int, kind: str = "lin") -> Tensor:
    """Complex A [N / 2] to start from, one of each conjugate pair (arXiv:2206.11893, section 4): the eigenvalues of
    the normal part of HiPPO-LegS ("legs"), a formula near them ("inv"), frequencies as a Fourier series has them
    ("lin"), or decay alone ("real"). Raises ValueError."""
    n = torch.arange(N // 2, dtype=torch.float64)
    if N < 2 or N % 2:
        raise ValueError(f"N = {N} states, but complex ones come in pairs: an even number, 2 at least")
    if kind == "legs":
        A, B = hippo_legs(N)
        turns = torch.linalg.eigvals(A + B[:, None] * B / 2).imag  # the real parts are all −1/2
        return torch.complex(torch.full_like(n, -0.5), turns[turns > 0].sort().values)
    imaginary = {"lin": math.pi * n, "inv": N / math.pi * (N / (2 * n + 1) - 1), "real": 0 * n}
    if kind not in imaginary:
        raise ValueError(f"no initialisation {kind!r}; there are legs, {', '.join(imaginary)}")
    return torch.complex(-(n + 1) if kind == "real" else torch.full_like(n, -0.5), imaginary[kind])


class S4D(nn.Module):
    """D independent state spaces of N states (N / 2 complex), B = 1. x [B, T, D] -> y [B, T, D]."""

    def __init__(self, d_model: int, N: int = 64, kind: str = "lin", steps=(0.001, 0.1), seed: int = 0):
        super().__init__()
        rng, poles = torch.Generator().manual_seed(seed), s4d_poles(N, kind).to(torch.complex64)
        low, high = map(math.log, steps)
        self.log_step = nn.Parameter(low + (high - low) * torch.rand(d_model, generator=rng))
        self.log_decay = nn.Parameter((-poles.real).log().expand(d_model, -1).clone())
        self.turn = nn.Parameter(poles.imag.expand(d_model, -1).clone())
        self.c = nn.Parameter(torch.randn(d_model, N // 2, 2, generator=rng) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(d_model, generator=rng))

    def discrete(self) -> tuple[Tensor, Tensor]:
        """log Ā and B̄ · C, both [D, N / 2]; the pair's other half gives twice the real part."""
        a = torch.complex(-self.log_decay.exp(), self.turn)
        turned = a * self.log_step.exp()[:, None]
        return turned, 2 * torch.view_as_complex(self.c) * (turned.exp() - 1) / a

    def kernel(self, T: int) -> Tensor:
        """K [D, T]: what one pulse leaves behind it."""
        a, c = self.discrete()
        return (c[..., None] * torch.exp(a[..., None] * torch.arange(T, device=a.device))).sum(1).real

    def forward(self, x: Tensor) -> Tensor:
        """The convolution, by FFT over twice the length so that the end does not wrap to the start: O(T log T)."""
        T = x.shape[1]
        if x.shape[2] != len(self.skip):
            raise ValueError(f"x is [B, T, {len(self.skip)}], got {list(x.shape)}")
        spectrum = torch.fft.rfft(x, 2 * T, 1) * torch.fft.rfft(self.kernel(T).T, 2 * T, 0)  # [B, T + 1, D]
        return torch.fft.irfft(spectrum, 2 * T, 1)[:, :T] + self.skip * x

    def recur(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from state to state: y, and h [B, D, N / 2] to go on from."""
        a, c = self.discrete()
        keep, put = a.exp(), x[..., None].to(a.dtype)  # [B, T, D, 1]
        if h is not None:
            put = torch.cat([put[:, :1] + (keep * h)[:, None], put[:, 1:].expand(-1, -1, -1, len(a[0]))], 1)
        states = recur_chunked(keep.expand(*x.shape, -1), put.expand(*x.shape, len(a[0])))
        return (states * c).sum(-1).real + self.skip * x, states[:, -1]


class StateCache:
    """Everything that Mamba remembers, the same size at every length: d_conv − 1 inputs and one state for each layer.

    Values: L B I (d_conv − 1 + d_state), I = expand · d_model.
    """

    def __init__(self, config: ModelConfig, batch: int, device=None, dtype=torch.float32):
        inner, where = config.expand * config.d_model, dict(device=device, dtype=dtype)
        self.inputs = torch.zeros(config.n_layers, batch, config.d_conv - 1, inner, **where)
        self.states = torch.zeros(config.n_layers, batch, inner, config.d_state, **where)
        self.begun = torch.zeros(batch, dtype=torch.bool, device=device)  # rows that have had a real token
        self.length = 0

    def advance(self, real: Tensor) -> None:
        """Take in T tokens, real [B, T] (False: padding). Raises ValueError on another batch."""
        if len(real) != len(self.begun):
            raise ValueError(f"the cache was made for batch {len(self.begun)}, got {len(real)}; make a new one")
        self.length, self.begun = self.length + real.shape[1], self.begun | real.any(1)


class Mixer(nn.Module):
    """Mamba's layer (fig. 3): a short convolution and a selective scan, gated; x [B, T, D] -> [B, T, D].

    `real` [B, T] is False at padding, which leaves the state as it is when it stands on the left.
    """

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        D, inner, N, R = config.d_model, config.expand * config.d_model, config.d_state, config.dt_rank
        self.layer, self.act, self.split = layer, ACTIVATIONS_TORCH[config.activation], [R, N, N]
        self.into = nn.Linear(D, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, config.d_conv, groups=inner)
        self.select = nn.Linear(inner, R + 2 * N, bias=False)  # of each token: Δ's low-rank form, B, C
        self.step = nn.Linear(R, inner)
        self.a_log = nn.Parameter(torch.log(torch.arange(1.0, N + 1)).expand(inner, -1).clone())  # A = −1 … −N
        self.skip = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, D, bias=False)

    @torch.no_grad()
    def start(self, rng: torch.Generator) -> None:
        """Steps Δ spread evenly in their logarithm over 0.001 … 0.1 (section 3.6), as softplus of the bias gives."""
        uniform = lambda like, bound: like.copy_((2 * torch.rand(like.shape, generator=rng) - 1) * bound)
        uniform(self.conv.weight, self.conv.kernel_size[0] ** -0.5)
        uniform(self.step.weight, self.step.in_features**-0.5)
        delta = torch.exp(torch.rand(self.step.bias.shape, generator=rng) * math.log(100) + math.log(0.001))
        self.step.bias.copy_(delta + torch.log(-torch.expm1(-delta)))

    def forward(self, x: Tensor, real: Tensor | None = None, cache: StateCache | None = None) -> Tensor:
        hide = lambda y: y if real is None else y * real[..., None]
        u, gate = self.into(hide(x)).chunk(2, -1)  # [B, T, I] each
        past = (
            u.new_zeros(len(u), self.conv.kernel_size[0] - 1, u.shape[-1])
            if cache is None
            else cache.inputs[self.layer]
        )
        seen = torch.cat([past, u], 1)  # [B, d_conv - 1 + T, I]
        u = hide(self.act(self.conv(seen.transpose(1, 2)).transpose(1, 2)))
        low, b, c = self.select(u).split(self.split, -1)
        delta = nn.functional.softplus(self.step(low))  # [B, T, I]
        h = None if cache is None else cache.states[self.layer]
        y, h = scan_torch(u, delta, -self.a_log.exp(), b, c, self.skip, h)
        if cache is not None:
            cache.inputs[self.layer], cache.states[self.layer] = seen[:, seen.shape[1] - past.shape[1] :], h
        return self.out(y * nn.functional.silu(gate))


class MambaBlock(nn.Module):
    """x + mixer(norm(x)): no attention, and no FFN; the mixer's own widening by `expand` takes its place."""

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        self.norm, self.mixer = Norm(config), Mixer(config, layer)

    def forward(self, x: Tensor, real: Tensor | None = None, cache: StateCache | None = None) -> Tensor:
        return x + self.mixer(self.norm(x), real, cache)


class Mamba(Decoder):
    """The language model: called as a Decoder is, with a StateCache for a cache; it knows no longest sequence."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        nn.Module.__init__(self)
        if config.kind != "decoder":
            raise ConfigError(f"{config.name}: a state space with d_state = {config.d_state} is of kind 'decoder'")
        if config.activation not in ACTIVATIONS_TORCH:
            config._refuse("activation", f"a mixer has its own gate; take one of {', '.join(ACTIVATIONS_TORCH)}")
        if config.positions in ("learned", "sinusoidal"):
            config._refuse("positions", "a state space knows the order by itself; take 'none'")
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(MambaBlock(config, layer) for layer in range(config.n_layers))
        self.norm = Norm(config) if config.final_norm else None
        self.out = Head(config, self.embed)
        initialise(self, config, seed)
        rng = torch.Generator().manual_seed(seed + 1)
        for block in self.blocks if not self.out.head.weight.is_meta else ():
            block.mixer.start(rng)

    def states(self, ids: Tensor, padding: Tensor | None = None, cache: StateCache | None = None) -> Iterator[Tensor]:
        check_ids(ids, self.config)
        if padding is not None:
            padding = self._checked(padding, ids, cache)
        if cache is not None:
            cache.advance(torch.ones_like(ids, dtype=torch.bool) if padding is None else padding)
        x = self.embed(ids, torch.arange(ids.shape[1], device=ids.device)[None])  # [B, T, D]
        for block in self.blocks:
            yield x
            x = block(x, padding, cache)
        yield x if self.norm is None else self.norm(x)

    def _checked(self, padding: Tensor, ids: Tensor, cache: StateCache | None) -> Tensor:
        """Padding as bool, where no token stands behind it: the convolution would read it as zeros of the text."""
        if padding.shape != ids.shape:
            raise ValueError(f"padding must be shaped as ids, {list(ids.shape)}; got {list(padding.shape)}")
        padding, cached = padding.bool(), cache is not None
        begun = (padding.cumsum(1) > 0) | (cache.begun[:, None] if cached else False)
        gap = begun & ~padding
        if (padding & (gap.cumsum(1) > 0)).any() or (cached and gap.any()):
            raise ValueError("a state space takes padding on the left only, or without a cache on the right: pad left")
        return padding
