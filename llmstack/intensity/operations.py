"""The forward pass of any model as a list of operations, each with the values that it reads, makes and holds.

    forward_ops(config, batch, tokens, context) -> [Op, …]

A matmul is described by its outputs and the length of the inner product of each, everything else by its outputs alone.
Every operand is read once and every result written once; `counts` turns values into bytes and operations.

Embedding look-ups, rotations and masks, far below a hundredth of a pass, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmstack.config import ModelConfig


@dataclass(frozen=True)
class Op:
    """One kind of operation in a pass, all its occurrences together. Values, not bytes.

    outputs: values that come out, each an inner product of length `inner` (0: no matmul). reads: values that go in,
    `cached` of them from a KV cache or a state. weights, biases: parameters. on_chip: of what is read and written, the
    attention scores that a fused kernel does not move.
    """

    part: str
    name: str
    outputs: float
    inner: float = 0.0
    reads: float = 0.0
    weights: float = 0.0
    biases: float = 0.0
    cached: float = 0.0
    on_chip: float = 0.0


def forward_ops(
    c: ModelConfig, batch: int, tokens: int, context: float = 0, source: int = 0, allowed: bool = False
) -> list[Op]:
    """The Ops of a pass over `tokens` new tokens in each of `batch` sequences, after `context` cached ones.

    The encoder of an encoder-decoder reads `source` tokens, unless there is context: then it has run before. `allowed`
    counts the pairs of a query and a key that the mask allows, otherwise all of them.
    """
    rows = batch * tokens
    if c.d_state:
        return [*_mixers(c, batch, tokens), *_ends(c, rows)]
    if c.kind != "encoder-decoder":
        return [*_stack(c, batch, tokens, context, "", c.kind == "decoder", allowed), *_ends(c, rows)]
    encoder = [] if context else [*_front(c, batch, source), *_stack(c, batch, source, 0, "encoder ", False, allowed)]
    deep = c.with_(n_layers=c.n_decoder_layers)
    decoder = _stack(deep, batch, tokens, context, "decoder ", True, allowed)
    cross = _cross(deep, batch, tokens, source, not context)
    return [*encoder, *decoder, *cross, *_ends(c, rows, rows + (0 if context or c.n_mels else batch * source))]


def linear(
    part: str, name: str, rows: float, fan_in: int, fan_out: int, L: float = 1, bias: bool = False, use: float = 1
) -> Op:
    """L matrices [fan_in, fan_out], each times `rows` vectors. `use`: how many sets of weights are read for them."""
    out = fan_out * L
    return Op(part, name, rows * out, fan_in, rows * fan_in * L, fan_in * out * use, bias * out * use)


def pointwise(part: str, name: str, outputs: float, inputs: int = 1, **how: float) -> Op:
    """As many values in, from each of `inputs` tensors, as come out."""
    return Op(part, name, outputs, reads=inputs * outputs, **how)


def _norms(c: ModelConfig, part: str, rows: float, n: float) -> Op:
    return pointwise(part, "norm", n * rows * c.d_model, weights=n * c.d_model * (1 + c.norm_bias))


def _stack(c: ModelConfig, batch, tokens, context, side, causal, allowed) -> list[Op]:
    """Self-attention, FFN, norms and sums of one side."""
    rows, L = batch * tokens, c.n_layers
    project = _latent if c.kv_lora_rank else _project
    ops = project(c, side, batch, tokens, context)
    for banded in (False, True):
        if n := sum(c.windowed(layer) == banded for layer in range(L)):
            window = c.sliding_window if banded else 0
            pairs = _pairs(tokens, context, causal, window) if allowed else tokens * (context + tokens)
            keys = min(context + tokens, window + tokens - 1) if window and allowed else context + tokens
            ops += _attend(c, side, batch, tokens, keys, pairs, n, context)
    routed = sum(c.has_experts(layer) for layer in range(L))
    if routed < L:
        ops += _ffn(c, f"{side}ffn", rows, c.d_ff, L - routed)
    if routed:
        touched = c.n_experts * (1 - (1 - c.top_k / c.n_experts) ** rows)  # of them, when routing is even
        ops.append(linear(f"{side}router", "router", rows, c.d_model, c.n_experts, routed))
        ops += _ffn(c, f"{side}experts", rows * c.top_k, c.d_expert, routed, touched)
        if c.n_shared_experts:
            ops += _ffn(c, f"{side}shared experts", rows, c.n_shared_experts * c.d_expert, routed)
    if c.norm_place != "none":
        ops.append(_norms(c, f"{side}norms", rows, L * (c.parallel_norms if c.parallel else 2)))
    return [*ops, pointwise(f"{side}residual", "add", 2 * L * rows * c.d_model, 2)]


def _project(c: ModelConfig, side, batch, tokens, context) -> list[Op]:
    part, rows, L, D = f"{side}projections", batch * tokens, c.n_layers, c.d_model
    A, G = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    shapes = dict(q=(D, A, c.qkv_bias), k=(D, G, c.qkv_bias and c.k_bias), v=(D, G, c.qkv_bias), o=(A, D, c.out_bias))
    ops = [linear(part, name, rows, i, o, L, bias) for name, (i, o, bias) in shapes.items()]
    if c.qk_norm != "none":
        scales = 2 * c.d_head if c.qk_norm == "head" else A + G
        ops.append(pointwise(part, "norm", rows * L * (A + G), weights=L * scales))
    return ops


def _latent(c: ModelConfig, side, batch, tokens, context) -> list[Op]:
    """Latent attention's: a token alone carries its query into the latents, a text makes keys and values of all."""
    part, rows, L, D, H = f"{side}projections", batch * tokens, c.n_layers, c.d_model, c.n_heads
    n, d, v, r, q = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank, c.q_lora_rank
    query = {"q_down": (D, q), "q_up": (q, H * (n + d))} if q else {"q": (D, H * (n + d))}
    shapes = query | {"kv_down": (D, r + d), "o": (H * v, D)}
    ops = [linear(part, name, rows, i, o, L) for name, (i, o) in shapes.items()]
    if _absorbs(c, tokens, context):
        heads = lambda name, i, o: Op(part, name, rows * H * o * L, i, rows * H * i * L, H * i * o * L)
        return [*ops, heads("k_up, absorbed", n, r), heads("v_up, absorbed", r, v)]
    keys = batch * (context + tokens)
    return [*ops, linear(part, "k_up", keys, r, H * n, L), linear(part, "v_up", keys, r, H * v, L)]


def _absorbs(c: ModelConfig, tokens: float, context: float) -> bool:
    return bool(c.kv_lora_rank) and tokens == 1 and context > 0


def _pairs(tokens: float, context: float, causal: bool, window: int) -> float:
    """Pairs of a query and a key that a causal, possibly banded, mask allows in one sequence."""
    if not causal:
        return tokens * (context + tokens)
    reach = lambda n: n * (n + 1) / 2 if not window or n <= window else window * n - window * (window - 1) / 2
    return reach(context + tokens) - reach(context)


def _attend(c: ModelConfig, side, batch, tokens, keys, pairs, L, context) -> list[Op]:
    """Scores, softmax and weighted values of L layers. Grouped heads share their keys, which are read once."""
    H, K, d_key, d_value = c.n_heads, c.n_kv_heads, c.d_head, c.d_head
    if c.kv_lora_rank:
        K, d_key, d_value = H, c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    absorbed = _absorbs(c, tokens, context)
    if absorbed:  # one key [c, k_r] for all heads, and of it the value c, which is not read again
        K, d_key, d_value = 1, c.kv_lora_rank + c.qk_rope_head_dim, c.kv_lora_rank
    q, out = (batch * tokens * H * width * L for width in (d_key, d_value))
    k, v = batch * keys * K * d_key * L, batch * keys * K * d_value * L * (not absorbed)
    return _pair_ops(side, batch * H * pairs * L, q, k, v, out, d_key, pairs / tokens, context / (context + tokens))


def _pair_ops(side, scores, q, k, v, out, d_key, length, old) -> list[Op]:
    """`length` keys a query; `old` is the share of the keys and values that comes from a cache."""
    part = f"{side}attention"
    return [
        Op(part, "q k", scores, d_key, q + k, cached=old * k, on_chip=scores),
        pointwise(f"{side}softmax", "softmax", scores, on_chip=2 * scores),
        Op(part, "p v", out, length, scores + v, cached=old * v, on_chip=scores),
    ]


def _ffn(c: ModelConfig, part, rows, width, L, use=1.0) -> list[Op]:
    ups = ["up", "gate"] if c.gated else ["up"]
    into = [linear(part, name, rows, c.d_model, width, L, c.ffn_bias, use) for name in ups]
    down = linear(part, "down", rows, width, c.d_model, L, c.ffn_bias, use)
    return [*into, pointwise(f"{part} activation", "activation", rows * width * L, len(ups)), down]


def _cross(c: ModelConfig, batch, tokens, source, fresh) -> list[Op]:
    """Cross-attention of all layers; keys and values of the source are made once, in the first pass."""
    part, L, D, rows = "cross projections", c.n_layers, c.d_model, batch * tokens
    A, G = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    ops = [linear(part, "q", rows, D, A, L, c.qkv_bias), linear(part, "o", rows, A, D, L, c.out_bias)]
    if fresh:
        biases = dict(k=c.qkv_bias and c.k_bias, v=c.qkv_bias)
        ops += [linear(part, name, batch * source, D, G, L, bias) for name, bias in biases.items()]
    q, k = rows * A * L, batch * source * G * L
    ops += _pair_ops("cross ", rows * c.n_heads * source * L, q, k, k, q, c.d_head, source, float(not fresh))
    if c.norm_place != "none":
        ops.append(_norms(c, "cross norms", rows, L))
    return [*ops, pointwise("cross residual", "add", L * rows * D, 2)]


def _mixers(c: ModelConfig, batch, tokens) -> list[Op]:
    """Mamba: matmuls around a scan, whose cost does not depend on what came before."""
    D, I, N, R, L, rows = c.d_model, c.expand * c.d_model, c.d_state, c.dt_rank, c.n_layers, batch * tokens
    width, state = rows * I * L, batch * I * N * L
    into = 2 * width + 2 * rows * N * L + state  # u, Δ, B and C of each token, and the state before the first
    return [
        linear("mixer", "in", rows, D, 2 * I, L),
        Op("mixer convolution", "conv", width, c.d_conv, width, c.d_conv * I * L, I * L),
        linear("mixer", "select", rows, I, R + 2 * N, L),
        linear("mixer", "step", rows, R, I, L, bias=True),
        Op("mixer scan", "scan", width, N, into, weights=(N + 1) * I * L, cached=state),  # y = C h, and h stays on chip
        pointwise("mixer gate", "activation", width, 2),
        linear("mixer", "out", rows, I, D, L),
        _norms(c, "norms", rows, L),
        pointwise("residual", "add", L * rows * D, 2),
    ]


def _front(c: ModelConfig, batch, source) -> list[Op]:
    """Whisper's two convolutions of width 3 over 2 · source frames, the second of which takes every other one."""
    if not c.n_mels:
        return []
    M, D, frames, part = c.n_mels, c.d_model, 2 * batch * source, "front end"
    conv = lambda name, n, read, into: Op(part, name, n * D, 3 * into, read * into, 3 * into * D, D)
    gelu = pointwise(f"{part} activation", "activation", (frames + batch * source) * D)
    return [conv("first", frames, frames, M), conv("second", batch * source, frames, D), gelu]


def _ends(c: ModelConfig, rows, embedded: float = 0) -> list[Op]:
    """The projections of a narrow embedding, the last norm, and the head where every position has one. embedded: the
    tokens that go in, where they are not the rows that come out."""
    narrow = c.d_embedding != c.d_model
    ops = [linear("embedding", "project", embedded or rows, c.d_embedding, c.d_model)] if narrow else []
    ops += [_norms(c, "final norm", rows, 1)] if c.final_norm else []
    if c.kind == "encoder":
        return ops
    if narrow:
        ops.append(linear("head", "project", rows, c.d_model, c.d_embedding))
    return [*ops, linear("head", "head", rows, c.d_embedding, c.vocab_size, bias=c.head_bias)]
