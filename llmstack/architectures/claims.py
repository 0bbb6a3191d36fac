"""What the surveys claim about shapes of models, recomputed. data/claims.toml names these functions."""

from collections import Counter

from llmstack import facts
from llmstack.config import ffn_width, preset, presets
from llmstack.facts import Computed


def norms_in_use() -> Computed:
    """AC-15: which norms the published models use."""
    counts = Counter(preset(name).norm for name in presets())
    shown = ", ".join(f"{norm} in {n}" for norm, n in counts.most_common())
    return Computed(None, "models", f"of {counts.total()} published models here: {shown}; DeepNorm in none")


def blocks_of_attention_and_ffn() -> Computed:
    """AC-23: the share of published models whose layers are attention and a feed-forward (experts included)."""
    others = [name for name in presets() if preset(name).d_state]
    value = 1 - len(others) / len(presets())
    return Computed(value, "of models", f"{len(presets()) - len(others)} of {len(presets())}; not {', '.join(others)}")


def classic_ffn_width() -> Computed:
    """AC-27: d_ff / d_model of the models with a plain two-matrix FFN from 2017 to 2020."""
    names = ("transformer-big-en-de", "bert-large-uncased", "gpt2-xl", "gpt3-175b")
    ratios = [preset(name).d_ff / preset(name).d_model for name in names]
    return Computed(ratios, "d_ff / d_model", ", ".join(f"{n} {r:g}" for n, r in zip(names, ratios)))


def llama_ffn_widths() -> Computed:
    """AC-28: Llama's rule gives every width; its ratio is 2.7 except where a multiplier of 1.3 makes it 3.5."""
    rule = {
        "llama-7b": (256, 1.0),
        "llama-13b": (256, 1.0),
        "llama-33b": (256, 1.0),
        "llama-65b": (256, 1.0),
        "llama2-70b": (4096, 1.3),
        "llama3-8b": (1024, 1.3),
    }
    widths = [ffn_width(preset(name).d_model, *dials) for name, dials in rule.items()]
    ratios = (f"{name} {w} = {w / preset(name).d_model:.4g} h" for name, w in zip(rule, widths))
    return Computed(widths, "inner width", ", ".join(ratios))


def gpt4() -> Computed:
    """BC-38: what is known of GPT-4."""
    entry = facts.table("models")["undisclosed"]["gpt-4"]
    return Computed(None, "", f"undisclosed: {entry['known']} ({entry['source']})")


def visual_tokens_of_published_models() -> Computed:
    """BC-46: tokens of one picture in LLaVA-1.5 (ViT-L/14 at 336²), LLaVA-NeXT (up to 4 tiles and the whole) and
    Monkey (6 tiles of 448² and the whole, 256 queries each)."""
    from llmstack.architectures.vision import visual_tokens

    llava = visual_tokens(336, 336, 14)
    values = {"LLaVA-1.5": llava, "LLaVA-NeXT": 5 * llava, "Monkey": 256 * (visual_tokens(896, 1344, 448) + 1)}
    return Computed(list(values.values()), "tokens", ", ".join(f"{name} {n:,}" for name, n in values.items()))


def gnmt_is_recurrent() -> Computed:
    """BC-21: how many of the layers of our GNMT are LSTMs, and how many are a Transformer's blocks."""
    from llmstack.architectures.workloads import GNMT

    kinds = Counter(type(module).__name__ for module in GNMT(8, 4, n_layers=8).modules())
    text = f"GNMT's 8 + 8 layers are {kinds['LSTM']} LSTMs (the first reads both ways) and no Transformer block"
    return Computed(kinds["Block"], "Transformer blocks", text)
