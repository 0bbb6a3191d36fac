"""What a model is and how it is laid over devices: two flat frozen records, and named presets.

The symbols that docstrings and shape comments use, and the fields they stand for:

    B  batch                D  d_model         L  n_layers        V  vocab_size
    T  query tokens         H  n_heads         F  d_ff            E  n_experts
    S  key tokens           K  n_kv_heads      Dh d_head          P  ranks

A ModelConfig is a set of dials. GPT-2, Llama, PaLM, BERT and T5 are settings of them, so what separates two models is
the difference of two records. `data/models.toml` holds the published ones, each with its source; a family gives the
defaults that its models share.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from math import inf
from typing import Any

KINDS = ("decoder", "encoder", "encoder-decoder")
NORMS = ("layernorm", "rmsnorm", "deepnorm")
NORM_PLACES = ("pre", "post", "branch", "none")
QK_NORMS = ("none", "head", "whole")
PLAIN_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
GATED_ACTIVATIONS = ("reglu", "geglu", "geglu_tanh", "swiglu")
ROUTER_SCORES = ("softmax", "sigmoid")
POSITIONS = ("learned", "sinusoidal", "rope", "alibi", "relative", "none")
SCALINGS = {
    "linear": "factor",
    "dynamic": "factor, length",
    "yarn": "factor, fast, slow, length, amplitude, truncate",
    "longrope": "length, amplitude, short factors, long factors",
}
RECOMPUTE = ("none", "selective", "full")


class ConfigError(ValueError):
    """A field with a value that no model can have; the message names the field, the value and the rule."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. An encoder-decoder's encoder has `n_layers` layers, its decoder `n_decoder_layers`.

    Raises ConfigError when a field breaks its rule.
    """

    name: str
    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    kind: str = "decoder"  # one of KINDS
    model_type: str = "llama"  # Hugging Face's name of the architecture: the layout of its checkpoints
    n_kv_heads: int = 0  # 0: as many as n_heads
    d_head: int = 0  # 0: d_model / n_heads
    d_ff: int = 0  # 0: 4 d_model
    max_seq_len: int = 2048
    n_decoder_layers: int = 0  # of an encoder-decoder; 0: n_layers

    # a block
    norm: str = "rmsnorm"
    norm_place: str = "pre"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    activation: str = "swiglu"
    qk_norm: str = "none"  # RMSNorm of queries and keys: of each head (Qwen3), or of all heads as one (OLMo-2)
    residual_scale: float = 1.0  # on what a branch adds (Granite)
    parallel: bool = False  # attention and FFN read the same input (PaLM, GPT-J, Falcon)
    parallel_norms: int = 1  # norms in a parallel block: one shared, or one for each branch
    qkv_bias: bool = False
    k_bias: bool = True  # where q, k and v have biases: the key's too (Whisper leaves it out)
    out_bias: bool = False
    ffn_bias: bool = False
    sliding_window: int = 0  # a query sees this many keys, itself among them; 0: all
    window_every: int = 1  # every n-th layer is windowed, from layer n - 1 on (GPT-3: 2)

    # positions
    positions: str = "rope"
    rope_theta: float = 10000.0
    rope_dims: int = 0  # leading dimensions of a head that rotate; 0: all
    rope_interleaved: bool = False  # pairs (0,1)(2,3)… as in GPT-J and GGUF; otherwise halves (0,Dh/2)…
    rope_scaling: tuple | None = None  # Llama 3.1: factor, low, high, original length; others: ops/rope.py
    nope_every: int = 0  # every n-th layer has no RoPE (SmolLM3: 4); 0: none is without
    alibi_scaled: bool = False  # attention_scale multiplies ALiBi too, not the products alone (Falcon-RW)
    relative_buckets: int = 32
    relative_max_distance: int = 128
    position_offset: int = 0  # rows of the position table before position 0 (OPT: 2)
    attention_scale: float = 0.0  # 0: 1/sqrt(d_head); T5 does not scale: 1

    # embeddings and the ends of the stack
    tied: bool = False
    head_bias: bool = False
    final_norm: bool = True
    embedding_norm: bool = False
    embedding_scale: float = 1.0  # the 2017 Transformer: sqrt(d_model)
    head_scale: float = 1.0  # on the logits; T5 v1.0 and PaLM: d_model ** -0.5
    d_embedding: int = 0  # width of the embedding before its projection (OPT-350m: 512); 0: d_model
    token_types: int = 0
    task_types: int = 0  # ERNIE's embedding of the training task
    pooler: bool = False
    mlm: bool = False  # BERT's head for masked tokens; with a pooler also the one for the next sentence
    n_mels: int = 0  # audio input: mel channels of the convolutional front end (Whisper)
    max_source_len: int = 0  # positions of the encoder where they differ from the decoder's

    # experts
    n_experts: int = 0
    top_k: int = 0
    n_shared_experts: int = 0
    d_expert: int = 0  # inner width of one expert; 0: d_ff
    dense_layers: int = 0  # leading layers with a plain FFN
    expert_every: int = 1  # every n-th layer has experts
    router_bias: bool = False  # one correction for each expert (DeepSeek-V3)
    router_score: str = "softmax"  # or "sigmoid" (DeepSeek-V3)
    router_norm: bool = True  # the gates of a token's experts sum to one
    router_scale: float = 1.0  # on the gates
    router_groups: int = 1  # experts stand in groups (on devices); a token uses router_groups_kept of them
    router_groups_kept: int = 1
    expert_capacity: int = 0  # tokens of one sequence that an expert takes; 0: all

    # multi-head latent attention; kv_lora_rank 0: none
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    # state spaces; d_state 0: none
    d_state: int = 0
    d_conv: int = 0
    expand: int = 0
    dt_rank: int = 0

    source: str = ""

    def __post_init__(self):
        fill = lambda field, value: object.__setattr__(self, field, getattr(self, field) or value)
        self._check_types()
        fill("n_kv_heads", self.n_heads)
        if not self.d_head and self.n_heads > 0 and self.d_model % self.n_heads:
            self._refuse("d_head", "d_model must divide by n_heads, or d_head be given")
        fill("d_head", self.d_model // max(self.n_heads, 1))
        fill("d_ff", 4 * self.d_model)
        fill("d_embedding", self.d_model)
        fill("n_decoder_layers", self.n_layers)
        fill("d_expert", self.d_ff if self.n_experts else 0)
        fill("attention_scale", max(self.d_head, 1) ** -0.5)
        self._check()

    def _refuse(self, field: str, rule: str):
        raise ConfigError(f"{self.name}: {field} = {getattr(self, field)!r}, but {rule}")

    def _check_types(self):
        for f in fields(self):
            value, kind = getattr(self, f.name), f.type
            if kind == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                self._refuse(f.name, "it must be a whole number, zero or more")
            if kind == "float" and (type(value) not in (int, float) or not 0 <= value < inf):
                self._refuse(f.name, "it must be a number, zero or more and finite")
            if kind == "bool" and not isinstance(value, bool):
                self._refuse(f.name, "it must be true or false")
            if kind == "str" and not isinstance(value, str):
                self._refuse(f.name, "it must be a string")

    def _check(self):
        for field in "d_model n_layers n_heads vocab_size max_seq_len window_every expert_every rope_theta".split():
            if getattr(self, field) < 1:
                self._refuse(field, "it must be at least 1")
        choices = {"kind": KINDS, "norm": NORMS, "norm_place": NORM_PLACES, "positions": POSITIONS}
        choices |= {"qk_norm": QK_NORMS}
        choices |= {"activation": PLAIN_ACTIVATIONS + GATED_ACTIVATIONS, "router_score": ROUTER_SCORES}
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                self._refuse(field, f"it must be one of {', '.join(allowed)}")
        if self.n_heads % self.n_kv_heads:
            self._refuse("n_kv_heads", f"n_heads ({self.n_heads}) must divide by it: a group of queries shares one")
        if self.positions == "rope" and (self.qk_rope_head_dim or self.rope_dims or self.d_head) % 2:
            self._refuse("rope_dims" if self.rope_dims else "d_head", "RoPE rotates pairs, so it must be even")
        if self.rope_dims > self.d_head and not self.kv_lora_rank:
            self._refuse("rope_dims", f"a head has only d_head = {self.d_head} dimensions")
        if self.rope_scaling is not None:
            self._check_scaling(self.rope_scaling)
        if self.positions == "relative":
            if self.kind != "encoder-decoder":
                self._refuse("positions", "only an encoder-decoder has T5's buckets; take 'alibi' or 'rope'")
            if not 4 <= self.relative_buckets < 2 * self.relative_max_distance:
                self._refuse("relative_buckets", "it must be at least 4, and less than twice relative_max_distance")
        if self.parallel and self.norm_place != "pre":
            self._refuse("parallel", "a parallel block has norm_place 'pre'")
        if self.mlm and self.gated:
            self._refuse("activation", "the head for masked tokens (mlm) has one without a gate, such as 'gelu'")
        if self.top_k > self.n_experts:
            self._refuse("top_k", f"there are only n_experts = {self.n_experts}")
        if self.n_experts and not self.top_k:
            self._refuse("top_k", "a model with experts sends each token to at least one")
        if not 0 < self.router_groups_kept <= self.router_groups or self.n_experts % self.router_groups:
            self._refuse("router_groups", "n_experts must divide by it, and router_groups_kept be 1 to router_groups")
        if self.top_k > self.n_experts // self.router_groups * self.router_groups_kept:
            self._refuse("top_k", "the groups that are kept have fewer experts; keep more of them")
        if self.dense_layers > self.n_layers:
            self._refuse("dense_layers", f"there are only n_layers = {self.n_layers}")
        if self.kv_lora_rank and not (self.qk_nope_head_dim and self.qk_rope_head_dim and self.v_head_dim):
            self._refuse("kv_lora_rank", "latent attention needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim")
        if self.d_state and not (self.d_conv and self.expand and self.dt_rank):
            self._refuse("d_state", "a state-space model needs d_conv, expand and dt_rank")
        if self.parallel_norms not in (1, 2):
            self._refuse("parallel_norms", "it must be 1 or 2")

    def _check_scaling(self, scaling):
        named = isinstance(scaling, tuple) and scaling and SCALINGS.get(scaling[0])
        if named and len(scaling) != 1 + len(named.split(", ")):
            self._refuse("rope_scaling", f"{scaling[0]!r} is followed by {named}")
        if not named and not (isinstance(scaling, tuple) and len(scaling) == 4 and _llama3(*scaling)):
            kinds = ", ".join(SCALINGS)
            self._refuse(
                "rope_scaling", f"it is (factor, low, high, original length), low below high, or {kinds} first"
            )

    @property
    def gated(self) -> bool:
        """Whether the FFN has three matrices: act(x W) ⊙ (x V), then down."""
        return self.activation in GATED_ACTIVATIONS

    def windowed(self, layer: int) -> bool:
        """Whether a layer's attention is banded."""
        return bool(self.sliding_window) and layer % self.window_every == self.window_every - 1

    def rotates(self, layer: int) -> bool:
        """Whether a layer turns its queries and keys, where positions are RoPE."""
        return not self.nope_every or (layer + 1) % self.nope_every != 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's FFN is a mixture of experts."""
        routed = self.n_experts > 0 and layer >= self.dense_layers
        return routed and (layer - self.dense_layers) % self.expert_every == self.expert_every - 1

    def with_(self, **changes: Any) -> ModelConfig:
        """The same model with some dials moved. Widths that follow d_model or n_heads by default follow again."""
        follows = {"d_head": ("d_model", "n_heads"), "d_ff": ("d_model",), "d_embedding": ("d_model",)}
        follows |= {"n_kv_heads": ("n_heads",), "attention_scale": ("d_head", "d_model", "n_heads")}
        follows |= {"d_expert": ("d_ff", "d_model"), "n_decoder_layers": ("n_layers",)}
        default = {"d_head": self.d_model // self.n_heads, "d_ff": 4 * self.d_model, "d_embedding": self.d_model}
        default |= {"n_decoder_layers": self.n_layers}
        default |= {"n_kv_heads": self.n_heads, "attention_scale": self.d_head**-0.5, "d_expert": self.d_ff}
        for field, causes in follows.items():
            if field not in changes and any(c in changes for c in causes) and getattr(self, field) == default[field]:
                changes[field] = 0
        _only_fields(self.name, changes)
        return replace(self, **changes)


@dataclass(frozen=True)
class Plan:
    """How one model lies over P = tp · pp · dp · cp ranks. Experts divide the data-parallel ranks: dp % ep == 0."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    recompute: str = "none"

    def __post_init__(self):
        for field in ("tp", "pp", "dp", "cp", "ep"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1:
                raise ConfigError(f"Plan: {field} = {getattr(self, field)!r}, but it must be a whole number of ranks")
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"Plan: zero = {self.zero!r}, but the stages are 0, 1, 2 and 3")
        if self.recompute not in RECOMPUTE:
            raise ConfigError(f"Plan: recompute = {self.recompute!r}, but it must be one of {', '.join(RECOMPUTE)}")
        if self.dp % self.ep:
            raise ConfigError(f"Plan: ep = {self.ep}, but dp = {self.dp} must divide by it")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp


def ffn_width(d_model: int, multiple_of: int = 256, multiplier: float = 1.0) -> int:
    """Inner width of a gated FFN as Llama sets it: two thirds of 4 d_model, so that three matrices hold what two would,
    times `multiplier`, rounded up to `multiple_of`. (Meta's reference code: multiple_of 256 and no multiplier in
    Llama 1, 4096 and 1.3 in Llama 2 and 3 70B, 1024 and 1.3 in Llama 3 8B.)
    """
    width = int(multiplier * int(2 * 4 * d_model / 3))
    return multiple_of * -(-width // multiple_of)


def _llama3(factor, low, high, length) -> bool:
    return not isinstance(factor, str) and factor > 0 and low < high and length > 0


def _only_fields(name: str, given: dict[str, Any]) -> None:
    known = [f.name for f in fields(ModelConfig)]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"{name}: no field {', '.join(unknown)}; ModelConfig has {', '.join(known)}")


@cache
def _tables() -> dict[str, Any]:
    from llmstack import facts

    return facts.table("models")


def presets() -> list[str]:
    """Names of the published models in data/models.toml."""
    return list(_tables()["models"])


def preset(name: str) -> ModelConfig:
    """The published model of that name. Raises KeyError with the nearest names when there is none."""
    models, families = _tables()["models"], _tables()["families"]
    if name not in models:
        from llmstack.facts import near

        if closed := _tables()["undisclosed"].get(str(name)):
            raise KeyError(f"no preset {name!r}: {closed['maker']} has not published its shape ({closed['source']})")
        raise KeyError(f"no preset {name!r}; {near(name, models)}")
    return from_fields(name, {**families[models[name]["family"]], **models[name]})


def from_fields(name: str, values: dict[str, Any]) -> ModelConfig:
    """A config from a mapping, as a TOML table gives it; `family` and `published` are about the model, not dials."""
    dials = {k: v for k, v in values.items() if k not in ("family", "published", "note", "title")}
    if isinstance(dials.get("rope_scaling"), list):
        dials["rope_scaling"] = tuple(tuple(x) if isinstance(x, list) else x for x in dials["rope_scaling"])
    _only_fields(name, dials)
    if missing := [f.name for f in fields(ModelConfig)[1:] if f.default is MISSING and f.name not in dials]:
        raise ConfigError(f"{name}: lacks {', '.join(missing)}")
    return ModelConfig(name=name, **dials)
