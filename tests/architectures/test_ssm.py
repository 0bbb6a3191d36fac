"""State spaces: convolution, recurrence and scipy agree; Mamba is transformers' Mamba, written in one pass or many."""

import numpy as np
import pytest
import torch
import transformers as t
from peers import close, ids_of, padded, peer
from scipy import signal

from llmstack import execution, intensity, preset, presets
from llmstack.architectures import build, load, save
from llmstack.architectures.ssm import S4D, StateCache, hippo_legs, hippo_memory, s4d_poles
from llmstack.config import ModelConfig

KINDS = ("legs", "lin", "inv", "real")
MAMBA = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=5, time_step_rank=3, pad_token_id=None)
SMALL = ModelConfig(
    "small", 16, 2, 1, 99, model_type="mamba", d_ff=32, positions="none", activation="silu", tied=True,
    d_state=4, d_conv=4, expand=2, dt_rank=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    theirs = peer(lambda: t.MambaForCausalLM(t.MambaConfig(**MAMBA, bos_token_id=None, eos_token_id=None)))
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    return theirs, load(folder)


@torch.no_grad()
@pytest.mark.parametrize(
    "B, T, side", [(3, 13, "none"), (3, 13, "right"), (3, 13, "left"), (1, 40, "none"), (1, 1, "none")]
)
def test_mamba_is_transformers(pair, B, T, side):
    theirs, ours = pair
    ids, real = ids_of(B, T), padded(B, T, side)
    want = theirs(ids, attention_mask=real.long(), output_hidden_states=True, use_cache=False)
    padding = None if side == "none" else real
    close(ours(ids, padding), want.logits, real)
    _, *mine, last = ours.hidden_states(ids, padding)
    *others, _, theirs_last = want.hidden_states  # theirs start after the first block
    for one, other in zip([*mine, last], [*others, theirs_last], strict=True):
        close(one, other, real)


def test_mamba_s_files_in_both_directions(pair, tmp_path):
    theirs, ours = pair
    save(ours, tmp_path)
    back = t.MambaForCausalLM.from_pretrained(tmp_path)
    assert set(back.state_dict()) == set(theirs.state_dict())
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in back.state_dict().items())
    assert load(tmp_path).config.with_(name="") == ours.config.with_(name="")


def test_gradients_are_transformers(pair):
    theirs, ours = pair
    ids = ids_of(2, 9)
    for model in pair:
        out = model(ids)
        getattr(out, "logits", out).square().mean().backward()
    for name in ("mixer.a_log", "mixer.skip", "mixer.step.weight", "mixer.select.weight", "mixer.conv.weight"):
        other = (
            name.replace("a_log", "A_log").replace("skip", "D").replace("select", "x_proj").replace("conv", "conv1d")
        )
        other = "backbone.layers.0." + other.replace("step", "dt_proj")
        close(ours.get_parameter("blocks.0." + name).grad, theirs.get_parameter(other).grad)


@pytest.mark.parametrize("name", [n for n in presets() if preset(n).d_state])
def test_sizes_are_exact(name):
    c = preset(name)
    with torch.device("meta"):
        theirs = t.MambaForCausalLM(
            t.MambaConfig(
                hidden_size=c.d_model, num_hidden_layers=c.n_layers, time_step_rank=c.dt_rank, vocab_size=c.vocab_size
            )
        )
    count = sum(p.numel() for p in theirs.parameters())
    assert count == sum(p.numel() for p in build(c, device="meta").parameters()) == intensity.params(c).total
    published = float(preset_published(name))
    assert abs(count / published - 1) < 0.05


def preset_published(name):
    from llmstack import facts

    text = facts.table("models")["models"][name]["published"]
    return float(text[:-1]) * {"M": 1e6, "B": 1e9}[text[-1]]


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1] * 9, [5, 1, 3], [2, 7]], ids=str)
def test_steps_with_the_state_are_the_full_pass(cuts):
    model, ids = build(SMALL), ids_of(2, 9)
    cache, parts = StateCache(SMALL, 2), ids.split(cuts, 1)
    close(torch.cat([model(part, cache=cache) for part in parts], 1), model(ids))
    assert cache.length == 9 and cache.states.shape == (2, 2, 32, 4) and cache.inputs.shape == (2, 2, 3, 32)


@torch.no_grad()
def test_it_generates_from_a_state_of_fixed_size(pair):
    theirs, ours = pair
    ids = ids_of(2, 5)
    written = execution.generate(ours, ids, max_new_tokens=8)
    for _ in range(8):
        ids = torch.cat([ids, theirs(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert written.tolist() == ids.tolist()
    padding = torch.tensor([[True] * 7, [False, False, *[True] * 5]])
    both = execution.generate(ours, ids_of(2, 7), 4, padding=padding)
    assert both[1, 2:].tolist() == execution.generate(ours, ids_of(2, 7)[1:, 2:], 4)[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_convolution_is_recurrence(kind):
    layer, x = S4D(3, N=8, kind=kind).double(), torch.randn(2, 50, 3, dtype=torch.float64)
    y, h = layer.recur(x)
    close(layer(x), y, tolerance=1e-9)
    first, h = layer.recur(x[:, :20])
    then, _ = layer.recur(x[:, 20:], h)
    close(torch.cat([first, then], 1), y, tolerance=1e-9)


@torch.no_grad()
def test_s4d_is_scipys_system():
    """The kernel is the impulse response of the continuous system, held over a step and then run by scipy."""
    layer = S4D(2, N=6, kind="inv").double()
    for d in range(2):
        poles = (-layer.log_decay.exp() + 1j * layer.turn)[d].numpy()
        A, c = np.diag(np.concatenate([poles, poles.conj()])), torch.view_as_complex(layer.c)[d].numpy()
        C, B = np.concatenate([c, c.conj()])[None], np.ones((6, 1))
        *held, _ = signal.cont2discrete((A, B, C, np.zeros((1, 1))), float(layer.log_step[d].exp()), "zoh")
        response, state = [], held[1]
        for _ in range(30):
            response.append((held[2] @ state)[0, 0])
            state = held[0] @ state
        np.testing.assert_allclose(layer.kernel(30)[d].numpy(), np.real(response), rtol=1e-8, atol=1e-10)


def test_hippo():
    """Row n of A integrates a polynomial against its derivative: LegS' triangular form, and what it remembers."""
    A, B = hippo_legs(4)
    want = [
        [-1, 0, 0, 0],
        [-(3**0.5), -2, 0, 0],
        [-(5**0.5), -(15**0.5), -3, 0],
        [-(7**0.5), -(21**0.5), -(35**0.5), -4],
    ]
    torch.testing.assert_close(A, torch.tensor(want, dtype=torch.float64))
    x = torch.linspace(-1, 1, 200, dtype=torch.float64)
    cubic, error = x**3 - x, lambda N, f: (hippo_memory(f, N) - f).square().mean().sqrt() / f.square().mean().sqrt()
    assert error(4, cubic) < 0.03, "four Legendre polynomials hold a cubic, up to the steps"
    wave = torch.sin(9 * x)
    assert error(16, wave) < 0.1 < 0.5 < error(4, wave), "more states, finer memory"


def test_s4d_starts_from_hippo():
    """The normal part's eigenvalues have real part -1/2, and "inv" comes near them (arXiv:2206.11893, fig. 4)."""
    A, B = hippo_legs(64)
    eigenvalues = torch.linalg.eigvals(A + B[:, None] * B / 2)
    torch.testing.assert_close(eigenvalues.real, torch.full((64,), -0.5, dtype=torch.float64), atol=1e-6, rtol=0)
    legs, inv = (s4d_poles(64, kind).imag.sort().values for kind in ("legs", "inv"))
    assert ((inv - legs).abs() < 0.3 * legs).all() and abs(inv[-1] / legs[-1] - 1) < 0.02
    torch.testing.assert_close(s4d_poles(6).imag, torch.pi * torch.arange(3.0, dtype=torch.float64))
    with pytest.raises(ValueError, match="N = 5 states.*even"):
        s4d_poles(5)
    with pytest.raises(ValueError, match="no initialisation 'leg'; there are legs, lin, inv, real"):
        s4d_poles(4, "leg")


def test_a_selective_layer_can_ignore_what_a_fixed_one_cannot():
    """Where Δ is 0 nothing is written and nothing forgotten: noise tokens leave the state as it was."""
    from llmstack.ops.scan import scan_torch

    x, b, c = torch.randn(1, 6, 2), torch.randn(1, 6, 3), torch.randn(1, 6, 3)
    keep = torch.tensor([1.0, 0, 1, 0, 0, 1])[None, :, None]
    a, d = -torch.rand(2, 3), torch.zeros(2)
    _, all_of_it = scan_torch(x, keep.expand(1, 6, 2), a, b, c, d)
    _, without = scan_torch(
        *(y[:, [0, 2, 5]] for y in (x, keep.expand(1, 6, 2))), a, b[:, [0, 2, 5]], c[:, [0, 2, 5]], d
    )
    torch.testing.assert_close(all_of_it, without)


def test_steps_start_in_the_range_of_the_paper():
    """Section 3.6 of Mamba: softplus of the bias is 0.001 to 0.1, evenly in its logarithm (8,192 of them here)."""
    model = build(SMALL.with_(d_model=2048, dt_rank=4, n_layers=2, d_conv=2, d_state=2))
    steps = [p for name, p in model.named_parameters() if name.endswith("step.bias")]
    delta = torch.nn.functional.softplus(torch.cat(steps).detach())
    assert 0.00099 < delta.min() < 0.00101 and 0.099 < delta.max() < 0.101
    spread = delta.log10()
    assert spread.mean().item() == pytest.approx(-2, abs=0.03)
    assert spread.std().item() == pytest.approx(2 / 12**0.5, rel=0.03)
