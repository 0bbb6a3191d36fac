"""Labs of chapter 1: the three families, and what stands inside a block. They draw what llmstack.ops computes."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from llmstack.architectures.decoder import Decoder
from llmstack.config import ModelConfig, preset
from llmstack.config import ffn_width as ffn_rule
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.course.plots import si
from llmstack.intensity import params
from llmstack.ops.activations import ACTIVATIONS_TORCH
from llmstack.ops.attention import causal_mask
from llmstack.ops.positions import alibi_bias, alibi_slopes, relative_bucket, sinusoidal
from llmstack.ops.rope import rope_frequencies, rope_tables, rope_torch

SOURCE = ("The", "cat", "sat", "on", "the", "mat")
TARGET = ("Le", "chat", "était", "assis")


def attention_reach(source: Sequence[str] = SOURCE, target: Sequence[str] = TARGET, token: int = 2) -> Lab:
    """Who sees whom in an encoder, an encoder-decoder and a decoder; the slider picks the token that looks."""
    n, m = len(source), len(target)
    order = causal_mask(n + m, n + m)
    translate = torch.zeros(
        n + m, n + m, dtype=torch.bool
    )  # the source sees itself; the target, the source and its past
    translate[:n, :n], translate[n:, :n], translate[n:, n:] = True, True, causal_mask(m, m)
    masks = {"encoder": torch.ones_like(order), "encoder-decoder": translate, "decoder": order}
    words = [*source, *target]

    def draw(token: int, window: int):
        near = causal_mask(n + m, n + m, window) | causal_mask(n + m, n + m, window).T
        fig, panels = plots.axes("key: who is seen", "query: who looks", size=(9.6, 4.0), panels=3)
        seen = {}
        for ax, (family, mask) in zip(panels, masks.items()):
            mask = mask & near if window else mask
            seen[family] = int(mask[token].sum())
            shades = mask.float() * 0.45
            shades[token] *= 2
            plots.heatmap(shades, xlabel="key", ylabel="query", title=family, xticks=words, yticks=words, ax=ax)
            ax.images[0].set_clim(0, 1)
            ax.axhline(token - 0.5, color="black", linewidth=1)
            ax.axhline(token + 0.5, color="black", linewidth=1)
            if family == "encoder-decoder":
                ax.axhline(n - 0.5, color="black", linestyle=":", linewidth=1)
                ax.axvline(n - 0.5, color="black", linestyle=":", linewidth=1)
            if ax is not panels[0]:
                ax.set(ylabel="", yticklabels=[])
        counts = ", ".join(f"{count} in the {family}" for family, count in seen.items())
        within = f" within a window of {window}" if window else ""
        return fig, f"Of {n + m} tokens, “{words[token]}” (token {token}) sees{within}: {counts}."

    dials = dict(token=(0, n + m - 1, 1, token), window={"all tokens": 0, "4": 4, "2": 2})
    return lab(draw, "Who sees whom", **dials)


LENGTH, WIDTH, HEADS = 128, 32, 8  # tokens, width of a head and of the table, heads
KINDS = ("sinusoidal", "RoPE", "ALiBi", "T5 buckets")


def positions() -> Lab:
    """Four ways to tell attention where tokens are: left what a position turns into, right what a query makes of it."""

    def draw(kind: str, query: int, part: int):
        waves, meaning, score, effect, says = _encoding(kind, query, part)
        fig, (left, right) = plots.axes("", "", size=(9.8, 3.8), panels=2)
        key = dict(x=range(LENGTH), marks=False, xlabel="key's position (tokens)")
        plots.line(waves, ylabel=meaning, title=kind, ax=left, **key)
        plots.line({"": score}, ylabel=effect, title=f"what the query at {query} makes of each key", ax=right, **key)
        right.axvline(query, color="#888888", linestyle=":")
        return fig, f"{kind}: {says}. For the query at {query}, key 0 gets {float(score[0]):.3g}: {effect}."

    dials = dict(kind=list(KINDS), query=(0, LENGTH - 1, 1, 64), part=(0, WIDTH // 2 - 1, 1, 4))
    return lab(draw, "Position encodings (part: the pair of dimensions, or the head)", **dials)


def _encoding(kind: str, query: int, part: int):
    """Curves over the key's position, their meaning, the query's view of each key, its meaning, and what to notice."""
    at = torch.arange(LENGTH)
    if kind == "sinusoidal":
        table = sinusoidal(LENGTH, WIDTH)  # [T, D]
        waves = {"sine": table[:, 2 * part], "cosine": table[:, 2 * part + 1]}
        says = f"dimensions {2 * part} and {2 * part + 1} repeat every {_period(part):.3g} tokens"
        return (
            waves,
            "added to the embedding",
            table @ table[query] / (WIDTH / 2),
            "product of the two rows, 1 with itself",
            says,
        )
    if kind == "RoPE":
        cos, sin = rope_tables(at, rope_frequencies(WIDTH))  # [T, D/2] each
        turned = rope_torch(torch.ones(1, 1, LENGTH, WIDTH), cos, sin)[0, 0]  # [T, D]
        waves = {"cosine": cos[:, part], "sine": sin[:, part]}
        says = f"pair {part} turns once in {_period(part):.3g} tokens, and only the distance counts"
        return (
            waves,
            "rotation of the pair",
            turned @ turned[query] / WIDTH,
            "score of equal vectors, 1 at distance 0",
            says,
        )
    if kind == "ALiBi":
        head, bias = part % HEADS, alibi_bias(LENGTH, LENGTH, HEADS)  # [H, T, S]
        waves = {f"head {h}": bias[h, query] for h in dict.fromkeys((0, head, HEADS - 1))}
        says = f"head {head} takes {float(alibi_slopes(HEADS)[head]):.4g} from the logit for each token of distance"
        past = torch.where(at > query, torch.nan, bias[head, query].double())
        return waves, "added to the logit", past.exp(), "factor on the weight before normalising", says
    away = at - query
    waves = {"encoder": relative_bucket(away), "decoder": relative_bucket(away, bidirectional=False)}
    shared = (waves["encoder"][:, None] == waves["encoder"]).sum(1)
    says = f"{len(waves['encoder'].unique())} of 32 buckets are in use; each has one learnt bias a head"
    return waves, "bucket of the distance", shared, "keys that share its bucket (encoder)", says


def _period(pair: int) -> float:
    return 2 * math.pi / float(rope_frequencies(WIDTH)[pair])


NORMS = {
    "pre, LayerNorm": dict(norm="layernorm", norm_place="pre"),
    "pre, RMSNorm": dict(norm="rmsnorm", norm_place="pre"),
    "post, LayerNorm": dict(norm="layernorm", norm_place="post", final_norm=False),
    "post, DeepNorm": dict(norm="deepnorm", norm_place="post", final_norm=False),
}


def norms_at_depth() -> Lab:
    """Untrained stacks, layer by layer: how large the residual stream is, and the gradient of the FFN's weights.

    At the top layer post-norm's gradient does not depend on depth, pre-norm's falls with 1/√L (Xiong et al. 2020,
    arXiv:2002.04745, theorem 1); DeepNorm's falls too, by design (arXiv:2203.00555, section 4).
    """

    def draw(layers: int, seed: int):
        fig, (left, right) = plots.axes("", "", size=(9.8, 3.8), panels=2)
        found = {name: _scales(layers, seed, **dials) for name, dials in NORMS.items()}
        look = dict(xlabel="layer", logy=True, marks=False)
        stream, gradient = ({name: f[i] for name, f in found.items()} for i in (0, 1))
        plots.line(stream, ylabel="root mean square", title="forward: the residual stream", ax=left, **look)
        plots.line(
            gradient, ylabel="root mean square", title="backward: gradient of the FFN's weights", ax=right, **look
        )
        right.get_legend().remove()
        grown = stream["pre, RMSNorm"][-1] / stream["pre, RMSNorm"][0]
        pre, post, deep = (gradient[name][-1] for name in ("pre, RMSNorm", "post, LayerNorm", "post, DeepNorm"))
        return fig, (
            f"{layers} layers: pre-norm's stream grows {grown:.1f} times, post-norm's stays at 1. The top layer's "
            f"gradient is {post / pre:.1f} times as large with post-norm as with pre-norm (RMSNorm), and "
            f"{deep / pre:.2f} times with DeepNorm."
        )

    return lab(draw, "Norms at depth, before training", layers=(2, 48, 2, 12), seed=(0, 9))


def untrained(layers: int, seed: int = 0, **dials) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """A narrow decoder of that depth as the papers that compare norms start it, and random ids and targets [B, T]."""
    config = ModelConfig("lab", 32, layers, 4, 64, d_ff=128, activation="gelu", positions="none", **dials)
    model, rng = Decoder(config, seed), torch.Generator().manual_seed(seed)
    if config.norm != "deepnorm":  # Xavier's spread; DeepNorm has its own
        for module in model.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, generator=rng)
    nn.init.normal_(model.embed.tokens.weight, generator=rng)
    return model, *torch.randint(0, 64, (2, 4, 16), generator=rng)


def _scales(layers: int, seed: int, **dials) -> tuple[list[float], list[float]]:
    model, ids, targets = untrained(layers, seed, **dials)
    *states, last = model.states(ids)
    nn.functional.cross_entropy(model.out(last).flatten(0, 1), targets.flatten()).backward()
    rms = lambda x: float(x.detach().square().mean().sqrt())
    return [rms(s) for s in states], [rms(block.ffn.down.weight.grad) for block in model.blocks]


def update(layers: int, step: float, seed: int = 0, **dials) -> float:
    """How far the output moves, relative to its size, when each weight of the blocks takes one step of size `step`
    down its gradient's sign, as Adam's first step does (arXiv:2203.00555, section 4, calls it the model update)."""
    model, ids, targets = untrained(layers, seed, **dials)
    before = model.hidden_states(ids)[-1]
    nn.functional.cross_entropy(model.out(before).flatten(0, 1), targets.flatten()).backward()
    with torch.no_grad():
        for weight in model.blocks.parameters():
            weight -= step * weight.grad.sign()
        return float((model.hidden_states(ids)[-1] - before).norm() / before.norm())


def activations() -> Lab:
    """The functions between the two matrices of an FFN, and their slopes."""

    def draw(function: str, beside: str):
        fig, (left, right) = plots.axes("", "", size=(9.8, 3.6), panels=2)
        x = torch.linspace(-4, 4, 161, requires_grad=True)
        values = {name: ACTIVATIONS_TORCH[name](x) for name in dict.fromkeys((function, beside))}
        slopes = {name: torch.autograd.grad(y.sum(), x)[0].numpy() for name, y in values.items()}
        shown = {name: y.detach().numpy() for name, y in values.items()}
        look = dict(x=x.detach().numpy(), xlabel="input x", marks=False)
        plots.line(shown, ylabel="output", title="value", ax=left, **look)
        plots.line(slopes, ylabel="slope", title="slope: what backward multiplies by", ax=right, **look)
        y, flat = shown[function], np.abs(slopes[function]) < 1e-3
        low = look["x"][y.argmin()]
        return fig, (
            f"{function} is lowest, {y.min():.3f}, at x = {low:.2f}; its slope is under 0.001 on "
            f"{100 * flat.mean():.0f} % of −4 … 4. It is at most {np.abs(y - shown[beside]).max():.3g} from {beside}."
        )

    names = list(ACTIVATIONS_TORCH)
    return lab(draw, "Activations", function=["gelu", *[n for n in names if n != "gelu"]], beside=names)


LLAMAS = ("llama-7b", "llama-13b", "llama-33b", "llama-65b", "llama2-70b", "llama3-8b", "llama3.1-405b")


def ffn_width() -> Lab:
    """The inner width of a gated FFN over d_model: 8/3 rounded up, the published models, and what each choice costs."""
    published = {name: preset(name) for name in LLAMAS}
    widths = np.arange(768, 17409, 64)

    def draw(d_model: int, round_to: int):
        fig, (left, right) = plots.axes("", "", size=(10.4, 3.8), panels=2)
        rule = ffn_rule(d_model, round_to)
        ratio = {f"8h/3 up to {round_to}": [ffn_rule(int(h), round_to) / h for h in widths]}
        ratio |= {"2.7": [2.7] * len(widths)}
        plots.line(ratio, x=widths, xlabel="d_model h", ylabel="d_ff / h", marks=False, logx=True, ax=left)
        for name, c in published.items():
            point = (c.d_model, c.d_ff / c.d_model)
            left.plot(*point, "k^")
            left.annotate(name, point, (0, 8), textcoords="offset points", fontsize=7, rotation=55)
        left.axvline(d_model, color="#888888", linestyle=":")
        left.set(
            ylim=(2.6, 4.05),
            xticks=(1024, 2048, 4096, 8192, 16384),
            xticklabels=("1024", "2048", "4096", "8192", "16384"),
        )
        left.minorticks_off()
        choices = {"GELU, 4h": (4 * d_model, "gelu"), f"SwiGLU, {rule}": (rule, "swiglu")}
        choices |= {f"SwiGLU, 2.7h = {round(2.7 * d_model)}": (round(2.7 * d_model), "swiglu")}
        choices |= {"SwiGLU, 4h": (4 * d_model, "swiglu")}
        cost = {}
        for name, (width, activation) in choices.items():
            config = ModelConfig("lab", d_model, 1, 1, 1, positions="none", d_ff=width, activation=activation)
            cost[name] = params(config).by_part["ffn"]
        plots.bars(cost, ylabel="parameters of one layer's FFN", ax=right)
        plain, gated = cost["GELU, 4h"], cost[f"SwiGLU, {rule}"]
        return fig, (
            f"h = {d_model}: 8h/3 = {8 * d_model / 3:.1f}, rounded up to {rule} = {rule / d_model:.4f} h. Its three "
            f"matrices have {si(gated, 4)} parameters, {gated / plain:.3f} of two matrices with 4h ({si(plain, 4)}); "
            f"SwiGLU with 4h has {cost['SwiGLU, 4h'] / plain:.1f} times as many."
        )

    return lab(draw, "The width of a gated FFN", d_model=(256, 16384, 256, 4096), round_to=[256, 1, 64, 1024])
