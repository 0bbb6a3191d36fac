"""A GPT in NumPy alone: forward, backward and a training loop, with every gradient written by hand.

It is GPT-2's arrangement (pre-norm blocks, LayerNorm, learned positions, an FFN without a gate), built of the `_np`
functions of llmstack.ops and their `_np_backward`. Weights and gradients are dictionaries under the names of
architectures.Decoder's parameters, so a torch model's weights go in (`decoder_np.weights_of`) and gradients compare
name by name.

Backward reads forward from its end to its start. What a residual path splits, backward adds; each layer needs the input
that forward gave it, which `saved` keeps: these are the activations that training has to hold in memory.

Forward multiplies 2 N operations a token in N matrix weights, backward twice that: one product for the input's
gradient, one for the weight's. Attention's scores and averages come on top, T by T; their backward also computes the
weights of the average again, 2.5 times forward. `Counted` arrays count what really happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from llmstack.config import ConfigError, ModelConfig
from llmstack.execution.optimizers import Optimizer, clip_
from llmstack.ops.activations import ACTIVATIONS_NP, ACTIVATIONS_NP_BACKWARD
from llmstack.ops.attention import attention_np, attention_np_backward
from llmstack.ops.cross_entropy import cross_entropy_np, cross_entropy_np_backward
from llmstack.ops.embedding import embedding_np, embedding_np_backward
from llmstack.ops.layernorm import layernorm_np, layernorm_np_backward
from llmstack.ops.linear import linear_np, linear_np_backward

Arrays = dict[str, np.ndarray]


def init(config: ModelConfig, seed: int = 0, dtype: type = np.float32) -> Arrays:
    """Weights as GPT-2 starts: normal with σ 0.02, divided by √(2L) where a block writes to the residual path; biases
    zero, norms one. A tied model has no `out.head.weight`. Raises ConfigError for another arrangement.
    """
    _check(config)
    draw, D, F, w = np.random.default_rng(seed), config.d_model, config.d_ff, {}
    matrices = {"embed.tokens": (config.vocab_size, D), "embed.positions": (config.max_seq_len, D)}
    for layer in range(config.n_layers):
        matrices |= {f"blocks.{layer}.attention.{name}": (D, D) for name in "qkvo"}
        matrices |= {f"blocks.{layer}.ffn.up": (F, D), f"blocks.{layer}.ffn.down": (D, F)}
    matrices |= {} if config.tied else {"out.head": (config.vocab_size, D)}
    for at, shape in matrices.items():
        end = at.endswith((".o", ".down"))
        w[f"{at}.weight"] = draw.normal(0, 0.02 / (2 * config.n_layers) ** (0.5 * end), shape).astype(dtype)
        if at.startswith("blocks"):
            w[f"{at}.bias"] = np.zeros(shape[0], dtype)
    for at in [f"blocks.{i}.norm{n}" for i in range(config.n_layers) for n in (1, 2)] + ["norm"]:
        w |= {f"{at}.weight": np.ones(D, dtype), f"{at}.bias": np.zeros(D, dtype)}
    return w


def forward(ids: np.ndarray, w: Arrays, config: ModelConfig) -> tuple[np.ndarray, Arrays]:
    """Logits [B, T, V] of ids [B, T], and the input of every layer by the layer's name."""
    _check(config)
    B, T = ids.shape
    if T > config.max_seq_len:
        raise ValueError(f"ids has {T} positions, but the model has max_seq_len = {config.max_seq_len}: cut the text")
    saved = {"ids": ids}
    x = embedding_np(ids, w["embed.tokens.weight"]) + w["embed.positions.weight"][:T]  # [B, T, D]
    for at in _blocks(config):
        x = x + _attend(_norm(x, f"{at}.norm1", w, saved, config), f"{at}.attention", w, saved, config)
        x = x + _feed(_norm(x, f"{at}.norm2", w, saved, config), f"{at}.ffn", w, saved, config)
    saved["out"] = _norm(x, "norm", w, saved, config)
    return linear_np(saved["out"], w[_head(config)]), saved  # [B, T, V]


def backward(dlogits: np.ndarray, w: Arrays, saved: Arrays, config: ModelConfig) -> Arrays:
    """The gradient of every weight, by name."""
    T, grads = saved["ids"].shape[1], {}
    dx, grads[_head(config)], _ = linear_np_backward(dlogits, saved["out"], w[_head(config)])
    dx = _norm_backward(dx, "norm", w, saved, grads, config)  # [B, T, D]
    for at in reversed(_blocks(config)):
        branch = _feed_backward(dx, f"{at}.ffn", w, saved, grads, config)
        dx = dx + _norm_backward(branch, f"{at}.norm2", w, saved, grads, config)
        branch = _attend_backward(dx, f"{at}.attention", w, saved, grads, config)
        dx = dx + _norm_backward(branch, f"{at}.norm1", w, saved, grads, config)
    grads["embed.positions.weight"] = np.zeros_like(w["embed.positions.weight"])
    grads["embed.positions.weight"][:T] = dx.sum(0)
    read = embedding_np_backward(dx, saved["ids"], config.vocab_size)
    grads["embed.tokens.weight"] = grads.get("embed.tokens.weight", 0) + read  # a tied table is read and is the head
    return grads


def loss_and_gradients(ids: np.ndarray, targets: np.ndarray, w: Arrays, config: ModelConfig) -> tuple[float, Arrays]:
    """Mean cross-entropy in nats a token of targets [B, T] after ids [B, T], and its gradients."""
    logits, saved = forward(ids, w, config)
    dlogits = cross_entropy_np_backward(np.ones((), logits.dtype), logits, targets)
    return float(cross_entropy_np(logits, targets)), backward(dlogits, w, saved, config)


def windows(tokens: np.ndarray, B: int, T: int, steps: int, seed: int = 0) -> Iterator[np.ndarray]:
    """`steps` batches [B, T + 1] of windows at random places of a text; raises ValueError when it is too short."""
    if len(tokens) < T + 2:
        raise ValueError(f"a text of {len(tokens)} tokens has no window of {T} + 1: give a longer one or a smaller T")
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        yield tokens[draw.integers(0, len(tokens) - T - 1, B)[:, None] + np.arange(T + 1)]


def train(
    w: Arrays, config: ModelConfig, batches: Iterable[np.ndarray], optimizer: Optimizer,
    schedule: Callable[[int], float] = lambda t: 1.0, max_norm: float = np.inf,
) -> list[float]:  # fmt: skip
    """Forward, backward, update for each batch [B, T + 1]; w changes in place. Returns the losses."""
    losses = []
    for t, batch in enumerate(batches):
        loss, grads = loss_and_gradients(batch[:, :-1], batch[:, 1:], w, config)
        clip_(grads, max_norm)
        optimizer.step(grads, lr=optimizer.lr * schedule(t))
        losses.append(loss)
    return losses


class Counted(np.ndarray):
    """Arrays that count the operations of matrix products with them: `Counted.of(w)`, then `Counted.operations`."""

    operations = 0

    @classmethod
    def of(cls, arrays: Arrays) -> Arrays:
        cls.operations = 0
        return {name: a.view(cls) for name, a in arrays.items()}

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **settings):
        plain = lambda x: x.view(np.ndarray) if isinstance(x, Counted) else x
        settings |= {} if out is None else {"out": tuple(plain(x) for x in out)}
        y = getattr(ufunc, method)(*(plain(x) for x in inputs), **settings)
        if ufunc is np.matmul:
            Counted.operations += 2 * y.size * inputs[0].shape[-1]
        return y.view(Counted) if isinstance(y, np.ndarray) else y


def _attend(x, at, w, saved, config):
    q, k, v = (_split(_linear(x, f"{at}.{name}", w, saved), config) for name in "qkv")  # [B, H, T, Dh]
    saved[at] = (q, k, v)
    mixed = attention_np(q, k, v, _causal(x.shape[1]), scale=config.attention_scale)
    return _linear(_join(mixed), f"{at}.o", w, saved)


def _attend_backward(dy, at, w, saved, grads, config):
    dmixed = _split(_linear_backward(dy, f"{at}.o", w, saved, grads), config)  # [B, H, T, Dh]
    dqkv = attention_np_backward(dmixed, *saved[at], _causal(dy.shape[1]), scale=config.attention_scale)
    return sum(_linear_backward(_join(d), f"{at}.{name}", w, saved, grads) for name, d in zip("qkv", dqkv))


def _feed(x, at, w, saved, config):
    saved[at] = up = _linear(x, f"{at}.up", w, saved)  # [B, T, F]
    return _linear(ACTIVATIONS_NP[config.activation](up), f"{at}.down", w, saved)


def _feed_backward(dy, at, w, saved, grads, config):
    dact = _linear_backward(dy, f"{at}.down", w, saved, grads)  # [B, T, F]
    return _linear_backward(ACTIVATIONS_NP_BACKWARD[config.activation](dact, saved[at]), f"{at}.up", w, saved, grads)


def _norm(x, at, w, saved, config):
    saved[at] = x
    return layernorm_np(x, w[f"{at}.weight"], w[f"{at}.bias"], config.norm_eps)


def _norm_backward(dy, at, w, saved, grads, config):
    dx, dg, grads[f"{at}.bias"] = layernorm_np_backward(dy, saved[at], w[f"{at}.weight"], config.norm_eps)
    grads[f"{at}.weight"] = dg
    return dx


def _linear(x, at, w, saved):
    saved[at] = x
    return linear_np(x, w[f"{at}.weight"], w[f"{at}.bias"])


def _linear_backward(dy, at, w, saved, grads):
    dx, grads[f"{at}.weight"], grads[f"{at}.bias"] = linear_np_backward(dy, saved[at], w[f"{at}.weight"])
    return dx


def _split(x, config):  # [B, T, D] -> [B, H, T, Dh]
    return x.reshape(*x.shape[:2], config.n_heads, config.d_head).swapaxes(1, 2)


def _join(x):  # [B, H, T, Dh] -> [B, T, D]
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _causal(T):
    return np.tri(T, dtype=bool)


def _blocks(config):
    return [f"blocks.{layer}" for layer in range(config.n_layers)]


def _head(config):
    return "embed.tokens.weight" if config.tied else "out.head.weight"


def _check(config: ModelConfig):
    gpt2 = dict(kind="decoder", norm="layernorm", norm_place="pre", positions="learned", parallel=False, n_experts=0)
    gpt2 |= dict(norm_bias=True, qkv_bias=True, k_bias=True, out_bias=True, ffn_bias=True, head_bias=False)
    gpt2 |= dict(gated=False, sliding_window=0, position_offset=0, final_norm=True, embedding_norm=False)
    gpt2 |= dict(n_kv_heads=config.n_heads, embedding_scale=1.0, head_scale=1.0, d_embedding=config.d_model)
    gpt2 |= dict(d_head=config.d_model // config.n_heads, kv_lora_rank=0, d_state=0, qk_norm="none", residual_scale=1.0)
    for field, value in gpt2.items():
        if getattr(config, field) != value:
            says = f"{config.name}: {field} = {getattr(config, field)!r}, but the NumPy GPT is written for {value!r}"
            raise ConfigError(f"{says}, as in GPT-2; take preset('gpt2').with_(…), or train build(config) in torch")
