"""Published models, built without storage: as many parameters as their makers' files or papers have."""

import pytest

from llmstack import intensity, preset, presets
from llmstack.architectures import build
from llmstack.architectures.hf import config_to_hf


def count(name):
    return sum(p.numel() for p in build(preset(name), device="meta").parameters())


@pytest.mark.parametrize(
    "name, parameters",
    [  # as transformers counts them; GPT-3 by the closed form (its table D.1 prints 174,600 M)
        ("bert-base-uncased", 109_482_240),
        ("gpt-1", 116_534_784),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("gpt3-175b", 174_604_259_328),
        ("t5-base", 222_903_552),
        ("llama-7b", 6_738_415_616),
        ("llama-65b", 65_285_660_672),
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-405b", 405_853_388_800),
    ],
)
def test_counts_are_the_published_ones(name, parameters):
    assert count(name) == parameters


def test_every_dense_preset_is_built_with_the_parameters_of_its_closed_form():
    dense = [n for n in presets() if not (preset(n).n_experts or preset(n).d_state or preset(n).kv_lora_rank)]
    assert len(dense) > 40
    wrong = {n: (count(n), intensity.params(preset(n)).total) for n in dense}
    assert {n: pair for n, pair in wrong.items() if pair[0] != pair[1]} == {}


def test_scaled_rotation_is_written_in_both_spellings():
    """transformers 5 reads rope_parameters, what is older rope_theta and rope_scaling."""
    raw = config_to_hf(preset("llama3.1-8b"))
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaling |= dict(original_max_position_embeddings=8192)
    assert raw["rope_scaling"] == scaling and raw["rope_theta"] == 500000.0
    assert raw["rope_parameters"] == scaling | dict(rope_theta=500000.0)
    assert "rope_scaling" not in config_to_hf(preset("llama2-7b"))
