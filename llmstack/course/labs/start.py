"""Labs of chapter 0."""

from llmstack.config import preset
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.course.plots import si
from llmstack.intensity import params

MODELS = ("gpt2", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "mixtral-8x7b", "deepseek-v3", "smollm2-135m")
MODELS += ("bert-base-uncased", "t5-large", "palm-540b", "mamba-2.8b")


def parameters(models: tuple[str, ...] = MODELS) -> Lab:
    """Where a published model's parameters are, and what a longer stack, a wider FFN or more words would add."""

    def draw(model: str, depth: float, ffn_width: float, vocabulary: float):
        known = preset(model)
        stretch = lambda n, by: max(1, round(n * by))
        config = known.with_(
            n_layers=max(known.dense_layers, stretch(known.n_layers, depth)),
            d_ff=stretch(known.d_ff, ffn_width),
            vocab_size=stretch(known.vocab_size, vocabulary),
        )
        counted = params(config)
        parts = {name.replace("_", " "): n for name, n in counted.by_part.items() if n}
        fig, ax = plots.axes("parameters", "", f"{model}: {si(counted.total)} parameters")
        plots.bars(parts, ylabel="parameters", ax=ax)
        largest = max(parts, key=parts.get)
        caption = f"{model} with {config.n_layers} layers has {si(counted.total)} parameters"
        if counted.active != counted.total:
            caption += f", of which a token passes {si(counted.active)}"
        caption += f"; the largest part is {largest} with {100 * parts[largest] / counted.total:.0f} %."
        if config != known:
            caption += f" As published it has {si(params(known).total)}."
        return fig, caption

    times = (0.25, 4.0, 0.25, 1.0)
    return lab(draw, "Where the parameters are", model=list(models), depth=times, ffn_width=times, vocabulary=times)
