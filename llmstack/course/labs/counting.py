"""Labs of chapter 3: the intensity of a layer under every dial, and a model that moves under a roof."""

from llmstack import facts
from llmstack.config import ModelConfig, preset
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.intensity import Convention, by_part, roofline, terms, total
from llmstack.intensity.counts import ENDS

MODELS = ("llama3.1-8b", "llama2-7b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "llama3.1-405b")
CHIPS = ("a100-sxm-40gb", "v100-sxm2", "h100-sxm5", "h200-sxm", "mi300x", "tpu-v4", "mlu370-x8")
AXES = {"length": range(4, 18), "batch": range(11), "width": range(-3, 3)}  # powers of two


def wider(c: ModelConfig, factor: float) -> ModelConfig:
    """The same model with more or fewer heads of the same width, and a stream and FFN to match."""
    scaled = {dial: round(factor * getattr(c, dial)) for dial in ("d_model", "n_heads", "n_kv_heads", "d_ff")}
    return c.with_(**scaled, d_head=c.d_head)


def intensity() -> Lab:
    """Operations a byte of each matmul of a block, along one dial with the others held."""

    def draw(against: str, phase: str, length: int, batch: int, width: int, bytes_a_value: float, model: str):
        at = {"length": length, "batch": batch, "width": width}

        def count(**moved: int) -> dict[str, float]:
            dials = {name: 2.0**power for name, power in (at | moved).items()}
            sizes = int(dials["batch"]), int(dials["length"])
            priced = terms(wider(preset(model), dials["width"]), *sizes, phase, Convention(bytes=bytes_a_value))
            return {part: t.intensity for part, t in by_part(priced).items() if t.flops and part not in ENDS}

        curves, here = [count(**{against: power}) for power in AXES[against]], count()
        fig, ax = plots.axes("", "", size=(7.6, 4))
        labels = {"length": "tokens a sequence", "batch": "sequences", "width": "width, as published = 1"}
        frame = dict(xlabel=labels[against], ylabel="operations a byte", logx=True, logy=True)
        lines = {part: [curve[part] for curve in curves] for part in here}
        plots.line(lines, [2.0**power for power in AXES[against]], ax=ax, **frame)
        ax.axvline(2.0 ** at[against], color="#999999", linewidth=1)
        ax.set_title(f"{model}, {phase}")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        parts = ", ".join(f"{part} {value:.3g}" for part, value in here.items())
        place = f"{2**length:,} tokens, batch {2**batch}, {2.0**width:g} times as wide, {bytes_a_value:g} bytes a value"
        return fig, f"{model}, {phase}, at {place}: operations a byte: {parts}."

    powers = dict(length=(4, 17, 1, 9), batch=(0, 10, 1, 0), width=(-3, 2, 1, 0))
    dtypes = {"16 bits": 2.0, "32 bits": 4.0, "8 bits": 1.0, "4 bits": 0.5}
    phases = ["prefill", "decode", "train"]
    return lab(
        draw,
        "A layer's intensity",
        against=list(AXES),
        phase=phases,
        **powers,
        bytes_a_value=dtypes,
        model=list(MODELS),
    )


def under_the_roof() -> Lab:
    """A model's parts and its whole pass under the roof of an accelerator."""

    def draw(model: str, phase: str, tokens_as_power_of_two: int, batch: int, accelerator: str, scores: bool):
        chip, tokens = facts.accelerator(accelerator), 2**tokens_as_power_of_two
        priced = terms(preset(model), batch, tokens, phase, Convention(scores=scores))
        parts = by_part(t for t in priced if t.flops)
        whole = total(priced, "the whole pass")
        roof = roofline(chip, [*parts.values(), whole])
        fig, ax = plots.axes("", "", size=(7.6, 4.4))
        plots.roofline(roof, ax=ax, span=(0.3, 2e4))
        ax.set_ylim(2e11, 2e15)
        ax.legend(loc="lower right", frameon=False)
        least = sum(max(t.flops / roof.peak, t.bytes / roof.bandwidth) for t in priced)
        made = batch * (1 if phase == "decode" else tokens)
        bound = roof.bound(roof.points[-1])
        return fig, (
            f"{model}, {phase}, {batch} × {tokens:,} tokens on {chip.title}, 16 bits: {whole.intensity:.3g} operations "
            f"a byte against a ridge of {roof.ridge:.1f}, {bound}-bound. At best {1e3 * least:.3g} ms, "
            f"{plots.si(made / least)} tokens a second, {whole.flops / least / roof.peak:.1%} of the peak."
        )

    dials = dict(tokens_as_power_of_two=(4, 17, 1, 11), batch=(1, 512, 1, 1), accelerator=list(CHIPS))
    dials["scores"] = {"to memory and back": True, "on the chip": False}
    return lab(draw, "A model under the roof", model=list(MODELS), phase=["decode", "prefill", "train"], **dials)
