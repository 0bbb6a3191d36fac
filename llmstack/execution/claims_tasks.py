"""What the survey claims about reasoning steps and about sizes, from the small models of data/tasks."""

from random import Random

from llmstack import facts
from llmstack.architectures import load
from llmstack.execution.tasks import Alphabet, addition, answers
from llmstack.facts import Computed


def steps_are_asked_for() -> Computed:
    """AC-17: one trained model's share of right sums, asked for the sum alone and for the steps before it."""
    model, share = load(facts.data_path() / "tasks" / "addition").eval(), []
    for steps in (False, True):
        examples = [addition(Random(10_000 + i), steps=steps) for i in range(100)]
        said = answers(model, Alphabet(["0123456789+=!? "]), [e.source for e in examples], 56)
        share.append(sum(s[-5:] == e.target[-5:] for s, e in zip(said, examples)) / 100)
    tuned = facts.table("tasks/results")["addition"]
    before, after = (tuned[name]["asked with !"] for name in ("alone", "alone, then tuned on steps"))
    says = "the same weights, right sums without and with steps: {:.0%} and {:.0%}".format(*share)
    says += f"; a model of plain sums before and after tuning on steps: {before:.0%} and {after:.0%}"
    return Computed(share, "of 100 sums", says)


def smaller_on_more_tokens() -> Computed:
    """AC-07: nats a letter at width 128, and at half of it (a quarter of the weights) on four times the letters."""
    runs = facts.table("tasks/results")["sweep"]["runs"]
    wide = max((r for r in runs if r["d_model"] == 128), key=lambda r: r["tokens"])
    narrow = {r["tokens"]: r["loss"] for r in runs if r["d_model"] == 64}
    pair = [wide["loss"], narrow[4 * wide["tokens"]]]
    more = ", ".join(f"{n:,} letters {loss:.3f}" for n, loss in sorted(narrow.items()))
    return Computed(pair, "nats a letter", f"equal operations, width 128 and 64: {pair}; width 64 alone, {more}")
