"""What the survey claims about inference token by token, recomputed. data/claims.toml names these functions."""

import torch

from llmstack.architectures import pretrained
from llmstack.execution.generation import Decoding, generate
from llmstack.facts import Computed

PROMPT = "And the king said unto the people"


@torch.no_grad()
def inference_in_parallel() -> Computed:
    """AC-21: tokens a pass, where one at a time would choose the same: a prompt, a batch, six drafted tokens."""
    model, tokenizer = pretrained("llama-2m")
    T = (ids := torch.tensor([tokenizer.encode(PROMPT)])).shape[1]
    written, one = generate(model, ids, 6), Decoding(model, ids, 6)
    choices = torch.stack([one(written[:, t : t + 1]).argmax(-1) for t in range(T + 6)], 1)  # [1, T + 6]
    prefill = (model(ids).argmax(-1) == choices[:, :T]).sum()
    batch = (Decoding(model, ids.expand(4, -1), 6)(ids.expand(4, -1)).argmax(-1) == choices[:, T - 1]).sum()
    verify = Decoding(model, ids, 6)
    verify(ids)
    drafted = (model(written[:, T:], cache=verify.cache).argmax(-1) == choices[:, T:]).sum()
    says = f"{prefill} of {T} prompt tokens, {batch} of 4 rows, {drafted} of 6 drafted tokens"
    counts = [int(prefill), int(batch), int(drafted)]
    return Computed(counts, "tokens a pass", f"in one pass, as one at a time chooses: {says}")


@torch.no_grad()
def inputs_with_cache() -> Computed:
    """AC-22: how many tokens each pass of generate gets, with the cache, for a prompt and four new ones."""
    model, tokenizer = pretrained("llama-2m")
    ids, widths = torch.tensor([tokenizer.encode(PROMPT)]), []
    hook = model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    generate(model, ids, 4)
    hook.remove()
    return Computed(widths, "tokens a pass", f"{widths[0]} in the prefill, then {', '.join(map(str, widths[1:]))}")
