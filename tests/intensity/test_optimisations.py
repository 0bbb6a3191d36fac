"""Every optimisation raises the intensity or lowers the operations, and keeps its results (rows of chapter 3)."""

import pytest

from llmstack.config import preset
from llmstack.facts import accelerator
from llmstack.intensity import roofline
from llmstack.intensity.optimisations import MODEL, TOKENS, optimisations

ROWS = {row.name: row for row in optimisations()}


@pytest.mark.parametrize("name", ROWS)
def test_fewer_operations_or_more_for_each_byte_and_the_same_results(name):
    row = ROWS[name]
    assert row.after.flops <= row.before.flops and row.after.bytes < row.before.bytes
    assert row.after.flops < row.before.flops or row.after.intensity > row.before.intensity
    assert row.gain > 1.2 and 0 <= row.error() <= row.tolerance
    roof = roofline(accelerator("h100-sxm5"), [row.before, row.after])
    assert roof.seconds(row.after) <= roof.seconds(row.before)


def test_what_each_saves_is_what_it_says():
    c, saved = preset(MODEL), {name: row.before.bytes - row.after.bytes for name, row in ROWS.items()}
    assert saved["residual + RMSNorm"] == 2 * TOKENS * c.d_model  # the sum, read once less
    assert saved["FlashAttention"] == pytest.approx(2 * 4 * c.n_layers * c.n_heads * TOKENS**2)  # S, P: out and back
    assert saved["linear + cross-entropy"] == 2 * 2 * TOKENS * c.vocab_size
    assert saved["pointwise fusion"] == 4 * 64 * 256 * 6  # three intermediates, written and read
    assert ROWS["mixed precision"].before.bytes == 2 * ROWS["mixed precision"].after.bytes
    assert ROWS["4-bit weights"].before.bytes / ROWS["4-bit weights"].after.bytes < 16 / 4.127
    assert ROWS["KV cache"].gain == pytest.approx(TOKENS, rel=0.01)  # one token's work in place of all
