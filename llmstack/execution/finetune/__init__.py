"""Fine-tuning: one interface, and the methods that fit it.

    tuned = prepare(model, "lora", r=8)             changes the model in place; it is called as before
    Trainer(tuned.model, data, adamw(tuned.trainable, lr=1e-3), after_backward=tuned.after_backward).run(100)
    tuned.state()                                   only what was trained
    tuned.merge()                                   a plain model again, where the method can

METHODS has the names. Lialin et al. 2023 (arXiv:2303.15647) order them: what is added (adapters, prompts), what is
selected (masks), what is written anew (low rank).
"""

from llmstack.execution.finetune.base import METHODS, Tuned, freeze, linears, prepare

__all__ = ["METHODS", "Tuned", "freeze", "linears", "prepare"]
