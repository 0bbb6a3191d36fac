"""The lab of section 3.4: what fusing a chain saves, by length and width, on an accelerator."""

from llmstack import facts
from llmstack.course import plots
from llmstack.course.panels import Lab, lab

CHIPS = ("h100-sxm5", "a100-sxm-40gb", "v100-sxm2", "mi300x", "tpu-v4", "mlu370-x8")
BYTES = 2  # a value


def chain_and_norm(n: int, R: int, D: int) -> dict[str, list[int]]:
    """Values that each kernel moves in n pointwise operations on x [R, D], the sum with a residual r, and its RMSNorm:
    every operation a kernel; the chain in one and sum and norm in another, as `fuse` and `rewrite` do; or all in one,
    which reads x, r and the norm's D weights and writes the sum and its norm."""
    N = R * D
    return {"each alone": [2 * N] * n + [3 * N, 2 * N + D], "two": [2 * N, 4 * N + D], "one": [4 * N + D]}


def fused_chain() -> Lab:
    """The least time of a chain and a norm in n + 2 kernels, in two and in one, along length or width."""

    def draw(along: str, operations: int, tokens: int, width: int, launch: int, accelerator: str):
        chip, here = facts.accelerator(accelerator), {"tokens": 2**tokens, "width": 2**width}

        def least(R: int, D: int) -> dict[str, float]:
            """Microseconds: each kernel waits for its bytes, or for the next launch."""
            moved = chain_and_norm(operations, R, D)
            return {k: sum(max(launch, 1e6 * BYTES * v / chip.bandwidth) for v in vs) for k, vs in moved.items()}

        def product(R: int, D: int) -> float:
            return max(launch, 1e6 * max(2 * R * D * D / chip.peak(), BYTES * (2 * R * D + D * D) / chip.bandwidth))

        xs = [2**i for i in (range(18) if along == "tokens" else range(6, 16))]
        at = [tuple((here | {along: x}).values()) for x in xs]
        kernels = {"each alone": f"{operations + 2} kernels", "two": "2 kernels", "one": "1 kernel"}
        lines = {name: [least(*sizes)[k] for sizes in at] for k, name in kernels.items()}
        lines["a matrix product [D, D], beside it"] = [product(*sizes) for sizes in at]
        fig, ax = plots.axes("", "", size=(7.6, 4))
        axes = dict(xlabel="tokens" if along == "tokens" else "width D", ylabel="least time (µs)", logx=True, logy=True)
        plots.line(lines, xs, ax=ax, title=f"{operations} operations, a sum and a norm on {chip.title}", **axes)
        ax.axvline(here[along], color="#999999", linewidth=1)
        R, D = here.values()
        times, moved = least(R, D), {k: BYTES * sum(v) for k, v in chain_and_norm(operations, R, D).items()}
        faster = times["each alone"] / times["one"]
        said = ", ".join(f"{kernels[k]} {plots.si(moved[k])}B in {t:.3g} µs" for k, t in times.items())
        return fig, (
            f"{R:,} tokens of width {D:,} in 16 bits: {said}; {faster:.2f} times as fast in one. "
            f"A [{D:,}, {D:,}] product beside it needs {product(R, D):.3g} µs."
        )

    dials = dict(operations=(1, 12, 1, 4), tokens=(0, 17, 1, 12), width=(6, 15, 1, 12), launch=(0, 20, 1, 4))
    return lab(draw, "A chain and a norm", along=["tokens", "width"], **dials, accelerator=list(CHIPS))
