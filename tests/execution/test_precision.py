"""Emulated formats are those of their bits, counted one by one; a scaled step does what torch.amp's GradScaler does."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from llmstack.architectures import build
from llmstack.config import ModelConfig
from llmstack.execution.claims import transformer_engine_is_fp8
from llmstack.execution.optimizers import adam, sgd
from llmstack.execution.precision import FORMATS, Precision, delayed_scaling, fp8_scale, rounded

BITS = dict(fp16=(5, 10, 65504.0), bf16=(8, 7, 255 * 2.0**120), e4m3=(4, 3, 448.0), e5m2=(5, 2, 57344.0))
TINY = ModelConfig("tiny", 32, 2, 2, 50, max_seq_len=16, positions="learned")


@cache
def grid(format):
    """The values of a format from zero up to its largest, in fp64: bit pattern n has place n (arXiv:2209.05433)."""
    exponent_bits, bits, most = BITS[format]
    exponent, significand = np.divmod(np.arange(2 ** (exponent_bits + bits)), 2**bits)
    lead, power = exponent > 0, np.maximum(exponent, 1) - (2 ** (exponent_bits - 1) - 1)
    values = (lead + significand / 2**bits) * 2.0**power
    return values[: np.searchsorted(values, most) + 1]


def cast(x, format):
    """The nearest value of the grid, of two as near the one with an even bit pattern; x is within its range."""
    x, values = np.asarray(x, dtype=np.float64), grid(format)
    above = np.searchsorted(values, abs(x)).clip(1, len(values) - 1)
    up, down = values[above] - abs(x), abs(x) - values[above - 1]
    place = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return torch.from_numpy(np.copysign(values[place], x).astype(np.float32))


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_goes_to_the_nearest_value_that_the_bits_can_say(format):
    values, draw = grid(format), np.random.default_rng(0)
    assert values[-1] == BITS[format][2] == torch.finfo(FORMATS[format]).max
    between = values[1:-1] / 2 + values[2:] / 2  # where ties go to even
    wide = 10 ** draw.uniform(np.log10(values[1]) - 1, np.log10(values[-1]), 4000) * draw.choice([-1, 1], 4000)
    for x in (values, -values, between, wide):
        x = torch.from_numpy(x.astype(np.float32))
        x = x[x.abs() >= 2.0**-126]  # bf16's least values are below what fp32 keeps whole
        assert torch.equal(rounded(x, format), cast(x, format))
    if format == "fp16":
        np.testing.assert_array_equal(cast(wide, "fp16").numpy(), wide.astype(np.float16).astype(np.float32))


def test_products_take_rounded_operands_and_give_rounded_results():
    x, layer = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_(), nn.Linear(7, 3)
    dy = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    with Precision("fp16").forward(layer):
        y = layer(x)
    y.backward(dy)
    half = lambda t: rounded(t.detach(), "fp16")
    assert torch.equal(y, half(half(x) @ half(layer.weight).T + half(layer.bias)))
    torch.testing.assert_close(x.grad, half(half(dy) @ half(layer.weight)), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad, half(half(dy).T @ half(x)), rtol=1e-3, atol=1e-6)
    assert torch.equal(x.grad, half(x.grad)) and torch.equal(layer.weight.grad, half(layer.weight.grad))
    assert not torch.equal(layer.weight.detach(), half(layer.weight))  # the masters are left as they were
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))  # outside, nothing is rounded


def test_a_whole_model_is_as_near_to_fp32_as_torchs_autocast():
    model, ids = build(TINY), torch.arange(24).view(2, 12)
    with torch.no_grad():
        exact = model(ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs = model(ids).float()
        with Precision("bf16").forward(model):
            ours = model(ids)
        with Precision("fp32").forward(model):
            assert torch.equal(model(ids), exact)
    error = lambda y: (y - exact).norm() / exact.norm()
    assert 0 < error(ours) <= 2 * error(theirs) and error(theirs) <= 2 * error(ours)
    assert torch.equal(ours, rounded(ours, "bf16"))


@pytest.mark.parametrize("bad", [(), (0,), (3, 4, 5), (2, 9, 10, 17)], ids=str)
def test_the_scale_and_the_skipped_steps_are_gradscalers(bad):
    """Three clean steps double the scale; an overflow halves it, leaves the weights alone and starts the count anew."""
    w, v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    peer, optimizer = torch.optim.SGD([w], lr=0.25), sgd({"v": v}, lr=0.25)
    ours = Precision("fp16", scale=64.0, dynamic=True, every=3)
    for step in range(20):
        factor = float("inf") if step in bad else 0.5 + step
        peer.zero_grad()
        theirs.scale((w * factor).sum()).backward()
        theirs.step(peer)
        theirs.update()
        v.grad = None
        ((v * factor).sum() * ours.scale).backward()
        ok = ours.unscale_([v.grad])
        assert ok == (step not in bad)
        if ok:
            optimizer.step()
        assert ours.scale == theirs.get_scale() and torch.equal(w, v)


def test_small_gradients_survive_with_scaling_and_vanish_without():
    x, target = torch.ones(4, 8), torch.zeros(4, 2)

    def grads(precision):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        with precision.forward(model):
            loss = 1e-8 * (model(x) - target).square().sum()
        (loss * precision.scale).backward()
        found = [p.grad for p in model.parameters()]
        assert precision.unscale_(found)
        return torch.cat([g.flatten() for g in found])

    exact = grads(Precision("fp32"))
    assert 0 < exact.abs().max() < 2**-24
    assert not grads(Precision("fp16", scale=1.0)).any()
    for kind in ("fp16", "bf16"):  # bf16 has fp32's range and needs no scale
        torch.testing.assert_close(grads(Precision(kind)), exact, rtol=0.05, atol=0.01 * exact.abs().max().item())
    over = Precision("fp16", scale=2.0**45, dynamic=True)
    with pytest.raises(AssertionError):
        grads(over)
    assert over.scale == 2.0**44


@pytest.mark.parametrize("make", [sgd, adam])
def test_updates_stagnate_without_masters(make):
    """A step of less than half of a weight's last place moves a master and is lost on a weight kept in fp16."""
    for masters in (True, False):
        w = torch.full((4,), 1.0)
        optimizer = make({"w": w}, lr=2**-12)  # fp16 after 1 is 1 - 2^-11
        for _ in range(256):
            optimizer.step({"w": torch.ones(4)})
            if not masters:
                w.copy_(rounded(w, "fp16"))
        expected = 1 - 256 * 2**-12 if masters else 1.0
        torch.testing.assert_close(w, torch.full((4,), expected), rtol=1e-6, atol=0)


def test_delayed_scaling_is_transformer_engines_recipe():
    """s = largest / max of the last amaxes / 2^margin, from passes before; 1 at the first; zeros do not count."""
    draw = np.random.default_rng(0)
    for format, most in (("e4m3", 448.0), ("e5m2", 57344.0)):
        kept, history = [], []
        for step in range(12):
            x = (draw.standard_normal(50) * 10.0 ** draw.integers(-6, 3) * (step != 4)).astype(np.float32)
            amax = max(history[-3:], default=0.0)
            s = np.float32(most / amax / 2) if amax else np.float32(1)
            want = cast((x * s).clip(-most, most), format) / s
            ours = delayed_scaling(torch.from_numpy(x), format, kept, length=3, margin=1)
            torch.testing.assert_close(ours, want, rtol=1e-6, atol=0)
            history.append(float(abs(x).max()))
        assert kept == history[-3:]


def test_fp8_linears_have_e4m3_operands_and_e5m2_gradients():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    precision, x = Precision("fp8"), 1e-4 * torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        model.zero_grad()
        with precision.forward(model):
            y = model(x)
        (1e-6 * y).sum().backward()
    assert {key: len(a) for key, a in precision.amax.items()} == {
        f"{i} {x}": 3 for i in (0, 1) for x in ("x", "w", "dy")
    }
    assert fp8_scale(precision.amax["0 x"], "e4m3") == pytest.approx(448 / x.abs().max().item())
    assert fp8_scale(precision.amax["1 dy"], "e5m2") == pytest.approx(57344 / 1e-6)
    s = lambda t, format, most: cast(t * (most / t.abs().max()), format) / (most / t.abs().max())
    by_hand = lambda x, layer: rounded(
        s(x, "e4m3", 448) @ s(layer.weight.detach(), "e4m3", 448).T + rounded(layer.bias.detach(), "bf16"), "bf16"
    )
    torch.testing.assert_close(y.detach(), by_hand(by_hand(x, model[0]), model[1]), rtol=1e-2, atol=1e-4)
    # the gradients of 1e-6 are below E5M2's least value, 2^-16, and live by their scale alone
    assert torch.equal(rounded(torch.tensor(1e-6), "e5m2"), torch.tensor(0.0))
    exact = 1e-6 * torch.ones(8, 4).T @ (x @ model[0].weight.T + model[0].bias).detach()
    torch.testing.assert_close(model[1].weight.grad, exact, rtol=0.15, atol=0.1 * exact.abs().max().item())


def test_fp8_gradients_have_two_bits_after_the_point():
    """0.9 of the largest is 51,610 of 57,344, and E5M2 knows 49,152 before that; E4M3 would have 416 of 448."""
    layer, precision, x = nn.Linear(2, 2, bias=False), Precision("fp8"), torch.ones(1, 2, requires_grad=True)
    layer.weight.data = torch.eye(2)
    for _ in range(2):
        x.grad = None
        with precision.forward(layer):
            layer(x).backward(torch.tensor([[0.9, 1.0]]))
    torch.testing.assert_close(x.grad, torch.tensor([[49152 / 57344, 1.0]]), rtol=2**-8, atol=0)


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
def test_a_resumed_run_rounds_as_the_one_that_went_on(kind):
    model, x = nn.Linear(6, 3), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    first, second = Precision(kind, every=2), Precision(kind, every=2)

    def step(precision, size):
        model.zero_grad()
        with precision.forward(model):
            loss = (model(x * size) ** 2).sum()
        (loss * precision.scale).backward()
        ok = precision.unscale_({n: p.grad for n, p in model.named_parameters()})
        return ok, precision.scale, model.weight.grad.clone()

    for size in (1.0, 1e6, 3.0):
        step(first, size)
    second.load(json.loads(json.dumps(first.state())))
    for size in (2.0, 1.0):
        a, b = step(first, size), step(second, size)
        assert a[:2] == b[:2] and torch.equal(a[2], b[2])


def test_bad_requests_are_refused():
    for how in (dict(scale=-1.0), dict(scale=float("nan")), dict(every=0)):
        with pytest.raises(ValueError, match=f"{next(iter(how))} = .*a finite scale above 0, and every 1 or more"):
            Precision("fp16", **how)
    with pytest.raises(ValueError, match="kind = 'int8', but it must be one of fp32, bf16, fp16, fp8"):
        Precision("int8")
    with pytest.raises(TypeError, match=r"weight is torch.float16, but masters are float32; model.float\(\)"):
        with Precision("fp16").forward(nn.Linear(2, 2).half()):
            pass


def test_the_claim_about_transformer_engine_is_computed():
    assert transformer_engine_is_fp8().value == [1.0, 0.0]
