"""Sampling: what the cuts leave is what transformers' warpers leave, and by the definitions of their papers."""

from itertools import product

import pytest
import torch

from llmstack.execution.sampling import check_logits, check_sampling, filtered, pick

P = (1.0, 0.905, 0.305)  # no whole number of equal tokens has exactly these shares: there rounding would decide
CUTS = [dict(top_k=k, top_p=p, min_p=m) for k, p, m in product((0, 1, 7, 10**6), P, (0.0, 0.05, 0.7))]
CUTS += [dict(top_p=1e-9), dict(top_p=1e-300), dict(top_p=1 - 1e-6), dict(min_p=1e-9), dict(min_p=1 - 1e-6)]


def logits_of(B, V, scale=3.0):
    return scale * torch.randn(B, V, generator=torch.Generator().manual_seed(V), dtype=torch.float64)


def label(cuts):
    return " ".join(f"{name}={value:g}" for name, value in cuts.items())


@pytest.fixture(scope="module")
def warped():
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    def warp(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
        steps = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
        steps += [TopKLogitsWarper(top_k)] if top_k else []
        steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        steps += [MinPLogitsWarper(min_p)] if min_p else []
        for step in steps:
            logits = step(None, logits)
        return logits

    return warp


@pytest.mark.parametrize("cuts", CUTS, ids=label)
def test_what_stays_is_what_transformers_keeps(cuts, warped):
    for V in (1, 2, 7, 63, 1000):
        logits = logits_of(5, V)
        for temperature in (1.0, 0.3, 4.0):
            got, want = filtered(logits / temperature, **cuts), warped(logits, temperature, **cuts)
            torch.testing.assert_close(got.softmax(-1), want.softmax(-1), rtol=0, atol=1e-15)
            assert torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("cuts", CUTS, ids=label)
def test_of_tokens_that_tie_as_many_stay_as_in_transformers(cuts, warped):
    """Which ones of a tie stay is anyone's choice: the distributions are equal once sorted."""
    for V in (1, 7, 100):
        tied = logits_of(4, V).round()
        tied[0] = 0  # all alike
        got, want = filtered(tied, **cuts).softmax(-1), warped(tied, **cuts).softmax(-1)
        torch.testing.assert_close(got.sort(-1).values, want.sort(-1).values)


def test_the_cuts_by_their_definitions():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    left = lambda **cuts: filtered(p.log(), **cuts).softmax(-1)[0].tolist()
    assert left(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert left(top_p=0.5) == pytest.approx([4 / 7, 3 / 7, 0, 0])  # 0.4 is too little, 0.7 enough
    assert left(top_p=0.39) == pytest.approx([1, 0, 0, 0])
    assert left(min_p=0.45) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])  # 0.45 · 0.4 = 0.18
    assert left(top_k=3, top_p=0.75) == pytest.approx([4 / 7, 3 / 7, 0, 0])  # after top-k 0.7 has become 7/9
    assert left() == pytest.approx(p[0].tolist())


def test_top_p_keeps_the_smallest_set_that_has_the_mass():
    logits = logits_of(50, 200)
    p = logits.softmax(-1)
    for top_p in (0.05, 0.5, 0.95):
        kept = ~filtered(logits, top_p=top_p).isinf()
        mass = p.where(kept, torch.zeros(())).sum(-1)
        least = p.where(kept, torch.ones(())).amin(-1)
        assert (mass >= top_p).all() and (mass - least < top_p).all()


def test_draws_follow_what_the_cuts_left():
    logits, rng = logits_of(1, 12, scale=1.5), torch.Generator().manual_seed(0)
    cuts = dict(top_k=6, top_p=0.9, min_p=0.1)
    drawn = pick(logits.expand(20_000, -1), 1.3, rng, **cuts)
    want = filtered(logits[0] / 1.3, **cuts).softmax(-1)
    seen = torch.bincount(drawn, minlength=12) / 20_000
    assert not seen[want == 0].any() and 1 < (want > 0).sum() < 12
    assert ((seen - want).abs() <= 5 * (want * (1 - want) / 20_000).sqrt()).all()
    assert torch.equal(pick(logits), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_coldest_temperatures_take_the_likeliest(dtype):
    """1e-38 overflows every logit above 3.4, 1e-300 is 0 in fp32."""
    logits, rng = logits_of(20, 50, scale=100.0).to(dtype), torch.Generator()
    for temperature in (1e-30, 1.2e-38, 1e-38, 1e-45, 5e-324):
        assert torch.equal(pick(logits, temperature, rng), logits.argmax(-1))
        assert torch.equal(pick(logits, temperature, rng, top_p=1e-300, min_p=1e-300), logits.argmax(-1))
    single = filtered(logits.float(), top_p=1e-300)
    assert (single.isfinite().sum(-1) == 1).all() and torch.equal(single.argmax(-1), logits.float().argmax(-1))


def test_a_mask_of_tokens_is_kept_at_any_temperature():
    logits = torch.full((500, 4), -torch.inf)
    logits[:, 1:3] = torch.tensor([2.0, 2.0])
    for temperature in (1e-30, 1.0, 1e30):
        assert set(pick(logits, temperature, torch.Generator().manual_seed(0)).tolist()) == {1, 2}


@pytest.mark.parametrize(
    "bad, says", [(torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "nothing but -inf")], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_have_no_likeliest_are_refused(bad, says, temperature):
    logits = logits_of(3, 7)
    logits[1] = bad if says.startswith("nothing") else logits[1]
    logits[1, 4] = bad
    with pytest.raises(ValueError, match=f"the logits hold {says}, so no token can be chosen.*float16"):
        pick(logits, temperature, torch.Generator())
    check_logits(logits[[0, 2]])


@pytest.mark.parametrize(
    "how, match",
    [
        (dict(temperature=1.0, top_k=-1), "top_k = -1, but it must be a whole number of tokens; 0 keeps all"),
        (dict(temperature=1.0, top_k=2.5), "top_k = 2.5"),
        (dict(temperature=1.0, top_p=0), "top_p = 0, but it must be above 0 and not above 1"),
        (dict(temperature=1.0, top_p=1.1), "top_p = 1.1"),
        (dict(temperature=1.0, top_p=float("nan")), "top_p = nan"),
        (dict(temperature=1.0, top_p=None), "top_p = None"),
        (dict(temperature=1.0, min_p=1.0), "min_p = 1.0, but it must be below 1 and not below 0"),
        (dict(temperature=1.0, min_p=-0.1), "min_p = -0.1"),
        (dict(temperature=float("inf")), "temperature = inf, but"),
        (dict(temperature=0, top_k=5), "temperature = 0 takes the likeliest.*top_k = 5.*need a temperature above 0"),
        (dict(temperature=0.0, top_p=0.9), "top_p = 0.9"),
        (dict(temperature=0.0, min_p=0.1), "min_p = 0.1"),
    ],
)
def test_refusals(how, match):
    with pytest.raises(ValueError, match=match):
        check_sampling(**how)
