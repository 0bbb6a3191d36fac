"""What the survey claims about retrieval, recomputed. data/claims.toml names these functions."""

from llmstack import facts
from llmstack.facts import Computed


def rag_answers() -> Computed:
    """BC-16: the share of facts that a small model gets right without and with the sentence that retrieval finds."""
    asked = facts.table("retrieval/rag")["asked"]
    score = {how: sum(row[how]["right"] for row in asked) for how in ("alone", "with_1", "with_3")}
    found, n = sum(row["found"] for row in asked), len(asked)
    text = (
        f"SmolLM2-135M answers {score['alone']} of {n} facts from its weights, {score['with_1']} with the sentence "
        f"found first and {score['with_3']} with three; the right sentence came first {found} times"
    )
    return Computed([score["alone"] / n, score["with_1"] / n], "of the answers", text)
