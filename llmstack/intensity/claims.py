"""What the surveys claim about sizes and operations, recomputed. data/claims.toml names these functions.

A multiply and an add are two operations; a token's forward pass through N weights is 2 N, and training on it 6 N.
"""

import json
from dataclasses import replace

from llmstack import facts
from llmstack.architectures import build
from llmstack.config import ModelConfig, preset, presets
from llmstack.facts import Computed
from llmstack.intensity.counts import ENDS, KIM, flops, terms, total
from llmstack.intensity.params import attention_params, ffn_params, params


def _built(name: str) -> int:
    """Parameters of the whole model, built layer by layer of shapes without memory."""
    model = build(preset(name), device="meta")
    return sum(p.numel() for p in model.parameters())


def _size(name: str) -> Computed:
    total = _built(name)
    return Computed(total, "parameters", f"{name}: {total:,} parameters")


def transformer_2017() -> Computed:
    """AC-02: the big Transformer, with a shared vocabulary of 37,000."""
    base, big = (_built(f"transformer-{size}-en-de") for size in ("base", "big"))
    return Computed(big, "parameters", f"big {big:,}, base {base:,}")


def gpt2_xl() -> Computed:
    """AC-03."""
    return _size("gpt2-xl")


def gpt3() -> Computed:
    """AC-04."""
    return _size("gpt3-175b")


def gpt3_training() -> Computed:
    """AC-05: C = 6 N D with D = 300e9 tokens, against the 3.14e23 operations of arXiv:2005.14165, Table D.1."""
    operations = 6 * params(preset("gpt3-175b")).total * 300e9
    return Computed(operations, "operations", f"6 N D = {operations:.3g} operations")


def llama_405b() -> Computed:
    """AC-06."""
    return _size("llama3.1-405b")


def encoder_decoder_operations() -> Computed:
    """AC-10: forward operations of T5-11B over those of a decoder with as many parameters in its layers.

    A source token passes the encoder and becomes keys and values of the cross-attention, a target token passes the
    rest of the decoder, so neither passes all the weights.
    """
    c = preset("t5-11b")
    attention, ffn = attention_params(c), ffn_params(c, c.d_ff)
    keys_and_values = 2 * c.d_model * c.n_kv_heads * c.d_head
    source = attention + ffn + keys_and_values
    target = 2 * attention + ffn - keys_and_values
    shares = [side / (source + target) for side in (source, target)]
    text = "{:.2f} for a source token, {:.2f} for a target token of T5-11B".format(*shares)
    return Computed(shares, "of a decoder's operations", text)


def attention_overtakes() -> Computed:
    """AC-12: the length where QKᵀ and PV cost as much as a layer's matrices: 24 s h² = 4 s² h, so s = 6 h."""
    lengths = {}
    for name in ("gpt2", "gpt3-175b"):
        c = preset(name).with_(qkv_bias=False, out_bias=False, ffn_bias=False)
        matrices = 2 * (attention_params(c) + ffn_params(c, c.d_ff))  # operations a token
        lengths[c.d_model] = matrices / (4 * c.n_heads * c.d_head)
    return Computed(list(lengths.values()), "tokens", "; ".join(f"h = {h:,}: s = {s:,.0f}" for h, s in lengths.items()))


def gated_ffn_operations() -> Computed:
    """AC-14: operations of SwiGLU at F = 8h/3 over those of a plain FFN at F = 4h."""
    gated = ModelConfig("gated", d_model=768, n_layers=1, n_heads=12, vocab_size=1, d_ff=2048)
    plain = gated.with_(activation="gelu", d_ff=3072)
    ratio = ffn_params(gated, gated.d_ff) / ffn_params(plain, plain.d_ff)
    return Computed(ratio, "of the operations", f"three matrices of 8h/3 cost {ratio:.3f} of two of 4h, no less")


def ffn_share() -> Computed:
    """AC-25: the FFN's share of a classic block's parameters, of all of Llama-7B's, and of BERT-Base's operations at
    128, 512 and 4,096 tokens (Kim et al. 2023, Table 3)."""
    block, llama = params(preset("gpt3-175b")).by_part, params(preset("llama-7b"))
    shares = [block["ffn"] / (block["ffn"] + block["attention"]), llama.by_part["ffn"] / llama.total]
    for tokens in (128, 512, 4096):
        blocks = [t for t in terms(preset("bert-base-uncased"), 1, tokens, "forward", KIM) if t.part not in ENDS]
        ffn = sum(t.flops for t in blocks if t.part == "ffn")
        shares.append(ffn / total(blocks).flops)
    text = "of parameters {:.1%} in GPT-3's blocks and {:.1%} in all of Llama-7B; of BERT-Base's operations {:.0%} "
    text += "at 128 tokens, {:.0%} at 512, {:.0%} at 4,096"
    return Computed(shares, "of parameters (two), of operations (three)", text.format(*shares))


def llama_70b_bytes() -> Computed:
    """BC-23: weights of Llama-2-70B in 16 bits; LLaMA-1 has no 70B, its largest is 65B."""
    bytes_ = 2 * params(preset("llama2-70b")).total
    return Computed(bytes_, "bytes", f"Llama-2-70B: {bytes_ / 1e9:.1f} GB in 16 bits")


def switch_c() -> Computed:
    """BC-40."""
    return _size("switch-c-2048")


def bert_to_gpt3() -> Computed:
    """BC-53: how many BERT-Base fit in GPT-3."""
    ratio = _built("gpt3-175b") / _built("bert-base-uncased")
    return Computed(ratio, "times", f"GPT-3 has {ratio:,.0f} times BERT-Base's parameters")


def decoder_only() -> Computed:
    """AC-11: the kinds among the published models of data/models.toml, which are a choice, not a census."""
    kinds = [preset(name).kind for name in presets()]
    share = kinds.count("decoder") / len(kinds)
    return Computed(share, "of the models", f"{kinds.count('decoder')} of {len(kinds)} published models are decoders")


def _block_intensity(convention=KIM, **dials) -> float:
    """Operations a byte of BERT-Base's blocks at 512 tokens."""
    priced = terms(preset("bert-base-uncased").with_(**dials), 1, 512, "forward", convention)
    return total(t for t in priced if t.part not in ENDS).intensity


def heads_and_intensity() -> Computed:
    """AC-24: the same operators with 12 and with 4 heads (Kim et al. 2023, Table 10)."""
    found = [_block_intensity(n_heads=heads) for heads in (12, 4)]
    return Computed(found, "operations a byte", "12 heads {:.0f}, 4 heads {:.0f} operations a byte".format(*found))


def bytes_decide_the_class() -> Computed:
    """AC-29: BERT-Base's intensity with values of 8 and 16 bits, and the ridge that each has to be compared with."""
    chip = facts.accelerator("a100-sxm-40gb")
    found = [_block_intensity(), chip.ridge("int8"), _block_intensity(replace(KIM, bytes=2.0)), chip.ridge("fp16")]
    text = "8 bits {:.1f} against an A100's ridge of {:.1f}, 16 bits {:.1f} against {:.1f}: below both"
    return Computed(found, "operations a byte", text.format(*found))


def linear_and_attention() -> Computed:
    """BC-24: the least share of the time by width of the model, stored with its script in data/shares."""
    rows = json.loads((facts.data_path() / "shares" / "shares.json").read_text(encoding="utf-8"))["rows"]
    share = lambda row: row["linear"] + row["attention"]
    least = [min(share(r) for r in rows if r["width"] == width) for width in (256, 768, 2048, 4096)]
    text = "at least {:.0%} at width 256, {:.0%} at 768, {:.0%} at 2,048, {:.0%} at 4,096"
    return Computed(least, "of the time", text.format(*least))


def v_moe() -> Computed:
    """BC-42: operations an image of V-MoE-L/16, with two of 32 experts in every second layer, over those of ViT-H/14
    (Riquelme et al. 2021, arXiv:2106.05974). How good either is, is not computed."""
    shared = dict(vocab_size=1, kind="encoder", activation="gelu", positions="learned", n_heads=16)
    dense = ModelConfig("ViT-H/14", d_model=1280, n_layers=32, **shared)
    sparse = ModelConfig("V-MoE-L/16", d_model=1024, n_layers=24, n_experts=32, top_k=2, expert_every=2, **shared)
    work = {c.name: flops(c, 1, (224 // patch) ** 2 + 1) for c, patch in ((dense, 14), (sparse, 16))}
    ratio = work["V-MoE-L/16"] / work["ViT-H/14"]
    text = ", ".join(f"{name} {count / 1e9:.0f} G operations an image" for name, count in work.items())
    return Computed(ratio, "of the operations", f"{text}: {ratio:.2f}")
