"""Generation: stepwise is one-shot, batched is alone, greedy and beams are transformers', draws the softmax."""

import pytest
import torch

from llmstack import facts, preset
from llmstack.architectures import build, pretrained, save
from llmstack.architectures.cache import ContiguousCache
from llmstack.execution import generate
from llmstack.execution.generation import Decoding, beam_search, score
from llmstack.ops.cross_entropy import cross_entropy_torch

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


@pytest.mark.parametrize("beams", [1, 3])
def test_several_eos_end_a_row_where_transformers_ends_it(beams, peers):
    (model, peer), ids = peers[LLAMA.name], ids_of(3, 5)
    find = lambda eos: beam_search(model, ids, 12, 3, eos=eos) if beams > 1 else generate(model, ids, 12, eos)
    free = find(None)[:, 5:]
    ends = [int(free[0, 3]), int(free[1, 6]), int(free[2, 8])]
    got, want = find(ends)[:, 5:].tolist(), theirs(peer, ids, 12, beams, 1.0, ends)[:, 5:].tolist()
    length = lambda row: next(i for i, t in enumerate([*row, ends[0]]) if t in ends) + 1
    assert len({length(row) for row in want}) > 1
    for ours, row in zip(got, want):
        assert ours[: length(row)] == row[: length(row)]
        assert set(ours[length(row) :]) <= {ours[: length(row)][-1]}  # it repeats its own
    one = find(ends[:1])
    assert torch.equal(one, find(ends[0])) and torch.equal(one, find((ends[0],)))
    assert torch.equal(find([]), find(None))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_without_a_likeliest_token_are_refused(value):
    """argmax names a nan's place, and so the same token for ever."""
    model, ids = model_of(GPT2), ids_of(2, 4)
    with torch.no_grad():
        model.norm.bias[0] = value
    says = "the logits hold (nan|inf|nothing but -inf), so no token can be chosen"
    with pytest.raises(ValueError, match=says):
        generate(model, ids, 3)
    with pytest.raises(ValueError, match=says):
        generate(model, ids, 3, temperature=0.7, seed=0)
    with pytest.raises(ValueError, match=says):
        beam_search(model, ids, 3, 2)


def test_a_mask_of_whole_numbers_is_one_of_truths():
    model, ids = model_of(LLAMA), ids_of(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    assert torch.equal(score(model, ids, mask), score(model, ids, mask.bool()))
    assert torch.equal(generate(model, ids, 4, padding=mask), generate(model, ids, 4, padding=mask.bool()))


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
        (LLAMA, dict(temperature=1.0, top_k=-1), "top_k = -1, but it must be a whole number of tokens"),
        (LLAMA, dict(top_p=0.9), "temperature = 0 takes the likeliest"),
        (LLAMA, dict(max_new_tokens=-1), "max_new_tokens = -1, but it must be a whole number, zero or more"),
        (LLAMA, dict(max_new_tokens=1.5), "max_new_tokens = 1.5, but"),
        (LLAMA, dict(eos=99), "eos = 99, but it must be one of the 99 token ids"),
        (LLAMA, dict(eos=(1, 99)), r"eos = \(1, 99\), but it must be one of the 99 token ids, several of them"),
        (LLAMA, dict(eos="</s>"), "eos = '</s>', but"),
        (LLAMA, dict(ids=[1, 2]), r"must be a tensor of whole numbers .B, T., got list; torch.tensor\(\[ids\]\)"),
        (LLAMA, dict(ids=torch.tensor([1, 2])), r"whole numbers of shape \[B, T\], got torch.int64 \[2\]"),
        (LLAMA, dict(source=torch.tensor([[1]])), "source is for encoder-decoders"),
        (T5, dict(source=torch.tensor([[1], [2], [3]])), "3 sources for 1 prompts"),
        (T5, dict(), "source is for encoder-decoders"),
        (GPT2, dict(max_new_tokens=63), "2 prompt tokens and max_new_tokens = 63 do not fit the 64 positions"),
        (preset("bert-base-uncased").with_(**SMALL), dict(), "is an encoder"),
    ],
)
def test_refusals(config, change, match):
    with pytest.raises(ValueError, match=match):
        generate(**(dict(model=build(config), ids=torch.tensor([[1, 2]]), max_new_tokens=3) | change))


def test_score_is_the_masked_pass_and_leaves_padding_out():
    model, ids = model_of(LLAMA, torch.float64), ids_of(2, 9)
    found = score(model, ids)
    assert found.shape == (2, 8)
    with torch.no_grad():
        alone = [model(ids[:, :t])[:, -1].log_softmax(-1).gather(-1, ids[:, t : t + 1])[:, 0] for t in range(1, 9)]
    torch.testing.assert_close(found, torch.stack(alone, 1))  # one token a pass, no cache
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[:, :3] = False
    padded = score(model, torch.nn.functional.pad(ids, (3, 0)), padding)
    assert not padded[:, :3].any()
    torch.testing.assert_close(padded[:, 3:], found)
    whole_numbers = score(model, torch.nn.functional.pad(ids, (3, 0)), padding.long())  # as tokenizers give masks
    assert torch.equal(whole_numbers, padded)


@pytest.mark.parametrize("config", [LLAMA, T5], ids=lambda c: c.name)
def test_the_parallel_loss_is_the_mean_of_the_stepwise_losses(config):
    """Teacher forcing: given the gold prefix at every step, one pass has the loss of s passes."""
    model, ids = model_of(config), ids_of(3, 12)
    two_sided = config.kind == "encoder-decoder"
    given = dict(source=ids_of(3, 7, seed=5)) if two_sided else {}
    with torch.no_grad():
        logits = model(given["source"], ids) if two_sided else model(ids)
        parallel = cross_entropy_torch(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).mean()
        step, losses = Decoding(model, ids[:, :1], 11, **given), []
        for t in range(11):
            losses.append(cross_entropy_torch(step(ids[:, t : t + 1]), ids[:, t + 1]).mean())
    assert abs(parallel - torch.stack(losses).mean()) < 1e-6
    torch.testing.assert_close(-score(model, ids, **given).mean(), parallel)


def test_generating_keeps_no_graph_and_no_gradient():
    model, ids = model_of(LLAMA), ids_of(2, 5)
    outs = [generate(model, ids, 4), beam_search(model, ids, 4, 2), score(model, ids)]
    assert not any(out.requires_grad or out.grad_fn for out in outs)
    assert all(p.grad is None for p in model.parameters())


def test_drafted_tokens_verified_in_one_pass_are_those_of_as_many_steps():
    model, ids = model_of(LLAMA, torch.float64), ids_of(2, 14)
    together, stepwise = Decoding(model, ids[:, :8], 6), Decoding(model, ids[:, :8], 6)
    with torch.no_grad():
        together(ids[:, :8]), stepwise(ids[:, :8])
        whole = model(ids[:, 8:], cache=together.cache)  # [2, 6, V]: six drafted tokens
        steps = torch.stack([stepwise(ids[:, t : t + 1]) for t in range(8, 14)], 1)
    torch.testing.assert_close(whole, steps)


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """Our model and transformers' of the same weights, by config; wide, so that hypotheses compete."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    made = {}
    for config in (LLAMA, GPT2, T5):
        folder = tmp_path_factory.mktemp("peer")
        save(model := model_of(config), folder)
        kind = AutoModelForSeq2SeqLM if config.kind == "encoder-decoder" else AutoModelForCausalLM
        made[config.name] = model, kind.from_pretrained(folder).eval()
    return made


def theirs(peer, ids, new, beams, penalty, eos, padding=None):
    peer.generation_config.eos_token_id = peer.generation_config.pad_token_id = None
    how = dict(max_new_tokens=new, do_sample=False, num_beams=beams, length_penalty=penalty, eos_token_id=eos)
    mask = torch.ones_like(ids) if padding is None else padding.long()
    pad = eos[0] if isinstance(eos, list) else eos or 0
    return peer.generate(ids, attention_mask=mask, pad_token_id=pad, **how)


@pytest.mark.parametrize("config", [LLAMA, GPT2, T5], ids=lambda c: c.name)
def test_beam_search_is_transformers(config, peers):
    (model, peer), ids = peers[config.name], ids_of(3, 6)
    ours = lambda new, beams, penalty, eos, **more: (
        beam_search(model, torch.zeros(len(ids), 1).long(), new, beams, penalty, eos, source=ids, **more)
        if config.kind == "encoder-decoder"
        else beam_search(model, ids, new, beams, penalty, eos, **more)
    )
    found = theirs(peer, ids, 12, 4, 1.0, None)
    assert torch.equal(ours(12, 4, 1.0, None), found)
    ends = found[:, -6:].unique().tolist()[:3]  # tokens that hypotheses do contain
    lengths = set()
    for eos in ends:
        for beams, penalty in ((1, 1.0), (2, 0.0), (4, 1.0), (3, 2.0), (4, -1.0), (7, 0.5)):
            want = theirs(peer, ids, 12, beams, penalty, eos)
            assert torch.equal(ours(12, beams, penalty, eos), want), (beams, penalty, eos)
            lengths |= {row.index(eos, 1) if eos in row[1:] else 0 for row in want.tolist()}
    assert len(lengths) > 2  # rows that end early, late and never


def test_beam_search_of_padded_prompts_and_sources_is_that_of_each_alone(peers):
    ids = ids_of(2, 8)
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[1, :3] = False
    model, peer = peers[LLAMA.name]
    got = beam_search(model, ids, 9, 3, padding=padding)
    assert torch.equal(got, theirs(peer, ids, 9, 3, 1.0, None, padding))
    assert torch.equal(got[1, 8:], beam_search(model, ids[1:, 3:], 9, 3)[0, 5:])
    model, start = peers[T5.name][0], torch.zeros(2, 1).long()
    ids, short = ids_of(2, 30, seed=3), torch.arange(30) < torch.tensor([[30], [3]])
    got = beam_search(model, start, 15, 3, source=ids, source_padding=short)
    assert torch.equal(got[1], beam_search(model, start[1:], 15, 3, source=ids[1:, :3])[0])


@pytest.mark.parametrize("name", ["llama-2m", "t5-2m"])
def test_beam_search_of_stored_checkpoints_is_transformers(name):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    model, tokenizer = pretrained(name)
    two_sided = model.config.kind == "encoder-decoder"
    kind = AutoModelForSeq2SeqLM if two_sided else AutoModelForCausalLM
    peer = kind.from_pretrained(facts.data_path() / "checkpoints" / name).eval()
    ids = torch.tensor([tokenizer.encode("And the king said unto")])
    for penalty in (0.0, 1.0, 2.0):
        want = theirs(peer, ids, 16, 4, penalty, tokenizer.eos)
        if two_sided:
            start = torch.full((1, 1), peer.generation_config.decoder_start_token_id)
            got = beam_search(model, start, 16, 4, penalty, tokenizer.eos, source=ids)
        else:
            got = beam_search(model, ids, 16, 4, penalty, tokenizer.eos)
        assert torch.equal(got, want)


def test_beams_find_what_greedy_misses_and_one_beam_is_greedy():
    """Against all 8³ continuations: half of the vocabulary as beams finds the likeliest in each of these models."""
    missed = 0
    for seed in range(5):
        model, ids = build(LLAMA.with_(vocab_size=8, n_layers=1), seed, dtype=torch.float64), torch.tensor([[3]])
        with torch.no_grad():
            model.out.head.weight *= 30  # sharp
        every = torch.cartesian_prod(*[torch.arange(8)] * 3)
        worth = score(model, torch.cat([ids.expand(512, 1), every], 1)).sum(-1)
        assert torch.equal(beam_search(model, ids, 3, 4, 0.0)[0, 1:], every[worth.argmax()])
        greedy = generate(model, ids, 3)
        assert torch.equal(beam_search(model, ids, 3, 1, 0.0), greedy)
        missed += not torch.equal(greedy[0, 1:], every[worth.argmax()])
    assert missed


def test_a_state_space_model_keeps_its_states_with_its_beams():
    model = model_of(preset("mamba-130m").with_(d_model=16, n_layers=2, vocab_size=99, dt_rank=2), torch.float64)
    ids = ids_of(2, 5)
    got = beam_search(model, ids, 7, 3, 0.0)
    wide = beam_search(model, ids[1:], 7, 3, 0.0)
    assert torch.equal(got[1:], wide)
    assert (score(model, got)[:, 4:].sum(-1) >= score(model, generate(model, ids, 7))[:, 4:].sum(-1) - 1e-9).all()


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(beams=0), "beams = 0, but it must be a whole number from 1 to half the vocabulary, 49"),
        (dict(beams=50), "beams = 50"),
        (dict(beams=2.0), "beams = 2.0"),
        (dict(length_penalty=float("nan")), "length_penalty = nan, but it must be a number"),
        (dict(max_new_tokens=-1), "max_new_tokens = -1"),
    ],
)
def test_beam_search_refuses(change, match):
    with pytest.raises(ValueError, match=match):
        beam_search(**(dict(model=build(LLAMA), ids=torch.tensor([[1, 2]]), max_new_tokens=3, beams=2) | change))
    with pytest.raises(TypeError, match="temperature"):  # a search draws nothing
        beam_search(build(LLAMA), torch.tensor([[1, 2]]), 3, 2, temperature=1.0)
    assert beam_search(build(LLAMA), torch.tensor([[1, 2]]), 0, 2).tolist() == [[1, 2]]
