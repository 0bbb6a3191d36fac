"""Generation: stepwise is one-shot, batched is alone, greedy is transformers', sampling is the distribution."""

import pytest
import torch

from llmstack import preset
from llmstack.architectures import build, save
from llmstack.architectures.cache import ContiguousCache
from llmstack.execution import generate

SMALL = dict(d_model=32, n_layers=2, n_heads=4, d_head=8, d_ff=48, vocab_size=99, max_seq_len=64)
LLAMA = preset("llama3-8b").with_(**SMALL, n_kv_heads=2)
GPT2 = preset("gpt2").with_(**SMALL)
T5 = preset("t5-small").with_(**SMALL, tied=False, head_scale=1.0)  # a head of its own, or it repeats itself


def ids_of(B, T, seed=1):
    return torch.randint(99, (B, T), generator=torch.Generator().manual_seed(seed))


def model_of(config, dtype=torch.float32):
    """With weights large enough that tokens differ and none is near a tie."""
    model = build(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.15 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model


@torch.no_grad()
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda c: c.name)
def test_log_probabilities_token_by_token_are_those_of_one_pass(config):
    """p(x) = Π p(x_t | x_<t): the sum of logs, one token a pass, against the one masked pass."""
    model, ids = model_of(config), ids_of(3, 12)
    picked = lambda logits, tokens: logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    whole = picked(model(ids)[:, :-1], ids[:, 1:]).sum(-1)
    cache, steps = ContiguousCache(config, 3, 12), torch.zeros(3)
    for t in range(11):
        steps += picked(model(ids[:, t : t + 1], cache=cache)[:, 0], ids[:, t + 1])
    torch.testing.assert_close(steps, whole)
    alone = sum(picked(model(ids[:, : t + 1])[:, -1], ids[:, t + 1]) for t in range(11))  # and without a cache
    torch.testing.assert_close(alone, whole)


@pytest.mark.parametrize("config", [LLAMA, GPT2, T5], ids=lambda c: c.name)
def test_greedy_is_transformers(config, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    model = model_of(config)
    save(model, tmp_path)
    two_sided = config.kind == "encoder-decoder"
    peer = (AutoModelForSeq2SeqLM if two_sided else AutoModelForCausalLM).from_pretrained(tmp_path).eval()
    ids = ids_of(1, 6)
    peer.generation_config.eos_token_id = None
    how = dict(max_new_tokens=15, do_sample=False, pad_token_id=0)
    want = peer.generate(ids, attention_mask=torch.ones_like(ids), **how)
    if two_sided:
        got = generate(model, torch.zeros(1, 1, dtype=torch.long), 15, source=ids)
    else:
        got = generate(model, ids, 15)
    assert torch.equal(got, want)
    assert len(set(got[0].tolist())) > 4  # not one token over and over


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda c: c.name)
def test_left_padded_prompts_go_on_as_they_would_alone(config):
    model = model_of(config, torch.float64)
    prompts = [ids_of(1, T, seed=T) for T in (9, 4, 1)]
    ids = torch.stack([torch.nn.functional.pad(p[0], (9 - p.shape[1], 0), value=55) for p in prompts])
    padding = torch.stack([torch.arange(9) >= 9 - p.shape[1] for p in prompts])
    together = generate(model, ids, 12, padding=padding)
    for row, prompt in zip(together, prompts):
        assert torch.equal(row[9:], generate(model, prompt, 12)[0, prompt.shape[1] :])


def test_eos_ends_a_row_and_all_rows_end_the_loop():
    model, ids = model_of(LLAMA), ids_of(3, 5)
    free = generate(model, ids, 20)
    eos = int(free[0, 8])
    got = generate(model, ids, 20, eos=eos)
    for row, unbound in zip(got[:, 5:].tolist(), free[:, 5:].tolist()):
        end = unbound.index(eos) + 1 if eos in unbound else len(unbound)
        assert row[:end] == unbound[: len(row)][:end]
        assert set(row[end:]) <= {eos}
    alone = generate(model, ids[:1], 20, eos=eos)
    assert alone.shape[1] <= 9 and alone[0, -1] == eos


def test_sampling_follows_the_softmax_and_the_seed():
    model, ids = model_of(LLAMA), ids_of(1, 5)
    draw = lambda seed, t=1.0: generate(model, ids, 8, temperature=t, seed=seed)
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(3, t=1e-4), generate(model, ids, 8))  # cold: the likeliest
    for temperature in (0.7, 2.0):
        drawn = generate(model, ids.expand(6000, -1), 1, temperature=temperature, seed=0)[:, -1]
        with torch.no_grad():
            p = (model(ids)[0, -1] / temperature).softmax(-1)
        seen = torch.bincount(drawn, minlength=99) / 6000
        assert (seen - p).abs().max() < 5 * (p * (1 - p) / 6000).sqrt().max()


def test_nothing_to_add_gives_the_prompt_back():
    ids = ids_of(2, 4)
    assert torch.equal(generate(model_of(LLAMA), ids, 0), ids)


@pytest.mark.parametrize(
    "config, change, match",
    [
        (LLAMA, dict(ids=torch.zeros(1, 0, dtype=torch.long)), "empty prompt.*say BOS"),
        (LLAMA, dict(ids=torch.tensor([[1, 99]])), "token 99.*vocab_size = 99"),
        (LLAMA, dict(padding=torch.tensor([[True, False]])), "padded on the left"),
        (LLAMA, dict(temperature=-1.0), "temperature = -1.0, but it must be a number, zero or more"),
        (LLAMA, dict(temperature=float("nan")), "temperature = nan, but"),
        (LLAMA, dict(temperature=None), "temperature = None, but"),
        (LLAMA, dict(max_new_tokens=-1), "max_new_tokens = -1, but it must be a whole number, zero or more"),
        (LLAMA, dict(max_new_tokens=1.5), "max_new_tokens = 1.5, but"),
        (LLAMA, dict(eos=99), "eos = 99, but it must be one of the 99 token ids"),
        (LLAMA, dict(eos=(1, 2)), r"eos = \(1, 2\), but"),
        (LLAMA, dict(ids=[1, 2]), r"must be a tensor of whole numbers .B, T., got list; torch.tensor\(\[ids\]\)"),
        (LLAMA, dict(ids=torch.tensor([1, 2])), r"whole numbers of shape \[B, T\], got torch.int64 \[2\]"),
        (LLAMA, dict(source=torch.tensor([[1]])), "source is for encoder-decoders"),
        (T5, dict(), "source is for encoder-decoders"),
        (GPT2, dict(max_new_tokens=63), "2 prompt tokens and max_new_tokens = 63 do not fit the 64 positions"),
        (preset("bert-base-uncased").with_(**SMALL), dict(), "is an encoder"),
    ],
)
def test_refusals(config, change, match):
    with pytest.raises(ValueError, match=match):
        generate(**(dict(model=build(config), ids=torch.tensor([[1, 2]]), max_new_tokens=3) | change))
