"""Lab of chapter 1 on pictures: a budget of tokens, which patches it keeps, and what the caption loses."""

from functools import cache

import torch

from llmstack.architectures.multimodal import salient
from llmstack.course import plots
from llmstack.course.panels import Lab, lab
from llmstack.execution import pictures

BUDGETS = (16, 12, 8, 6, 4, 3, 2, 1)


@cache
@torch.no_grad()
def captions(tokens: int, n: int = 95) -> tuple[list[str], float]:
    """Captions of n pictures that were not trained on, written from so many of 16 tokens, and the share all right."""
    _, model = pictures.shape_models(trained=True)
    scenes = torch.tensor([pictures.UNSEEN[i % len(pictures.UNSEEN)] for i in range(n)])
    ids, model.see.ratio = pictures.caption_ids(scenes), tokens / 16
    written = model.caption(ids[:, :1], pictures.draw_shapes(scenes), 6)
    words = [" ".join(pictures.WORDS[i] for i in row[1:6]) for row in written.tolist()]
    return words, float((written == ids).all(-1).float().mean())


@torch.no_grad()
def token_budget() -> Lab:
    """PruMerge on the stored model that captions: the budget moves, nothing is trained again."""
    eye = pictures.shape_models(trained=True)[1].see.encoder
    images = pictures.draw_shapes(torch.tensor([pictures.UNSEEN[i % len(pictures.UNSEEN)] for i in range(95)]))
    attention = eye.salience(images)[2]

    def draw(picture: int, tokens: int):
        fig, (left, right) = plots.axes("", "", size=(9.4, 3.8), panels=2)
        keep = salient(attention[picture : picture + 1], tokens / 16)[0].reshape(4, 4)
        stays = keep.repeat_interleave(6, 0).repeat_interleave(6, 1)[..., None]  # [24, 24, 1]
        pixels = images[picture].permute(1, 2, 0)
        left.imshow(torch.where(stays, pixels, 0.65 + 0.3 * pixels))
        left.set(title="patches that stay (the others are faded)", xticks=[], yticks=[])
        share = [100 * captions(n)[1] for n in BUDGETS]
        plots.line(
            {"": share}, BUDGETS, xlabel="visual tokens", ylabel="captions all right (%)", title="95 pictures", ax=right
        )
        right.axvline(tokens, color="#888888", linestyle=":")
        right.set_ylim(0, 102)
        truth = " ".join(pictures.SCENES[pictures.UNSEEN[picture % len(pictures.UNSEEN)]])
        return fig, f"From {tokens} of 16 tokens it writes “{captions(tokens)[0][picture]}”; right is “{truth}”."

    return lab(draw, "A budget of visual tokens", picture=(0, 18, 1, 2), tokens={str(n): n for n in (4, *BUDGETS)})
