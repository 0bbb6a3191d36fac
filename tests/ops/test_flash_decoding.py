"""Decoding in splits against PyTorch's attention in one pass; the unified maximum, and what it costs when it fails."""

import time
import warnings

import numpy as np
import pytest
import torch
from op_checks import NATIVE, check, randn, run, strided
from torch.nn.functional import scaled_dot_product_attention

from llmstack.ops import matmul, traffic
from llmstack.ops._triton import HAVE_TRITON
from llmstack.ops.flash_decoding import (
    IMPLS,
    NARROW,
    WIDE,
    cuts,
    flash_decoding_triton,
    unified_decoding_triton,
    unified_softmax_np,
)

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
interpreted = pytest.mark.skipif(not HAVE_TRITON or NATIVE == "cuda", reason="counts in Triton's interpreter")
EACH = [pytest.param(impl, marks=[needs_triton] if impl == "triton" else []) for impl in ("numpy", "torch", "triton")]


def inputs(S, Dh=16, B=2, H=4, K=2, seed=0):
    return randn(B, H, Dh, seed=seed), randn(B, K, S, Dh, seed=seed + 1), randn(B, K, S, Dh, seed=seed + 2)


def reference(lengths=None, scale=None):
    """PyTorch's operator over one sequence after the other."""

    def attend(q, k, v, *_):
        outs = []
        for b, n in enumerate([k.shape[2]] * len(q) if lengths is None else lengths.tolist()):
            k_b, v_b = (x[b, :, :n].repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v))
            one = scaled_dot_product_attention(q[b, :, None], k_b, v_b, scale=scale)[:, 0]
            outs.append(one if n else torch.zeros_like(q[b]))
        return torch.stack(outs)

    return attend


def agree(impl, tensors, *args, lengths=None, scale=None):
    attend = reference(lengths, scale)
    given = lengths.numpy() if impl == "numpy" and lengths is not None else lengths
    (got,) = run(IMPLS[impl], impl, *tensors, *args, lengths=given, scale=scale)
    q, k, _ = tensors
    scores = torch.einsum("bkgd,bksd->bkgs", q.unflatten(1, (k.shape[1], -1)), k) * (scale or q.shape[-1] ** -0.5)
    size = scores.nan_to_num(0.0).abs().max().item() if scores.numel() else 1.0
    check([got], [attend(*(x.double() for x in tensors))], [attend(*tensors)], terms=q.shape[-1], size=size)


@pytest.mark.parametrize("splits", [1, 3, 9])
@pytest.mark.parametrize("S", [1, 7, 63])
@pytest.mark.parametrize("impl", EACH)
def test_any_number_of_splits_is_the_single_pass(impl, S, splits):
    agree(impl, inputs(S), splits)


@pytest.mark.parametrize("H, K, Dh", [(1, 1, 16), (3, 3, 20), (6, 1, 64), (4, 2, 256)])
@pytest.mark.parametrize("impl", EACH)
def test_heads_groups_and_widths(impl, H, K, Dh):
    agree(impl, inputs(100, Dh, 1, H, K), 2, scale=0.3)


@pytest.mark.parametrize("impl", EACH)
def test_each_sequence_has_its_length(impl):
    """0 keys give zeros, and what lies beyond a length is not read."""
    lengths = torch.tensor([0, 1, 300, 599])  # the kernel's tiles hold 256 keys in the interpreter
    q, k, v = inputs(600, B=4)
    if impl == "triton":
        k[2, :, 300:], v[2, :, 300:] = torch.nan, torch.nan
    agree(impl, (q, k, v), 2, lengths=lengths)


@needs_triton
def test_strides_and_the_space_of_a_cache():
    q, k, v = inputs(33)
    room = torch.full((2, 2, 50, 32), torch.nan)
    room[:, :, :33] = torch.cat([k, v], -1)
    in_cache = room[:, :, :33, :16], room[:, :, :33, 16:]  # views, that are not copied
    agree("triton", (q, *in_cache), 2)
    agree("triton", tuple(map(strided, (q, k, v))), 2)
    agree("triton", (q, k.mT.contiguous().mT, v), 2)


@needs_triton
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_narrow_types(dtype, tolerance):
    q, k, v = (x.to(dtype) for x in inputs(63))
    for out in (flash_decoding_triton(q, k, v, 3), unified_decoding_triton(q, k, v, 3)[0]):
        assert out.dtype == dtype
        torch.testing.assert_close(
            out.double(), reference()(q.double(), k.double(), v.double()), rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("impl", EACH)
def test_a_batch_of_none(impl):
    (out,) = run(IMPLS[impl], impl, *inputs(5, B=0), 2)
    assert out.shape == (0, 4, 16)


def test_cuts_hold_every_key_once():
    for n in (0, 1, 7, 100):
        for splits in (1, 3, 9):
            parts = cuts(n, splits)
            assert len(parts) == splits and [i for p in parts for i in range(n)[p]] == list(range(n))


@interpreted
@pytest.mark.parametrize("splits", [1, 4])
def test_work_items_are_batch_times_kv_heads_times_splits(splits, monkeypatch):
    from triton.runtime.interpreter import interpreter_builder as builder

    programs, place = set(), builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda *at: (programs.add(at), place(*at))[1])
    q, k, v = inputs(40, B=3, H=6, K=2)
    flash_decoding_triton(q, k, v, splits)
    grid = {(i, g, b) for i in range(splits) for g in range(2) for b in range(3)}
    merge = {(row, 0, 0) for row in range(3 * 6)} if splits > 1 else set()
    assert programs == grid | merge


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_bytes_are_the_formula(splits, dtype):
    """Splits and groups read no key twice: without groups, keys and values would be read H / K times."""
    B, H, K, Dh, lengths = 2, 6, 2, 20, torch.tensor([50, 13])
    q, k, v = (x.to(dtype) for x in inputs(50, Dh, B, H, K))
    with traffic.counting() as moved:
        flash_decoding_triton(q, k, v, splits, lengths)
    b, N = q.element_size(), 63
    read, written = b * (2 * N * K * Dh + B * H * splits * Dh) + 4 * B * K * splits, 4 * B * H * splits * (Dh + 1)
    if splits == 1:
        assert (moved.loaded, moved.stored, moved.launches) == (read, b * B * H * Dh, 1)
    else:
        assert (moved.loaded, moved.stored, moved.launches) == (read + written, written + b * B * H * Dh, 2)
    repeated = [x.repeat_interleave(H // K, 1) for x in (k, v)]
    with traffic.counting() as apart:
        flash_decoding_triton(q, *repeated, splits, lengths)
    of_kv = lambda m: m.by("argument")["k_ptr"] + m.by("argument")["v_ptr"]
    assert of_kv(apart) == 3 * of_kv(moved) == 3 * b * 2 * N * K * Dh


@pytest.mark.parametrize("phi", [0.0, 2.5])
def test_unified_maximum_is_softmax_and_recomputes_exactly_what_leaves_the_bounds(phi):
    x = randn(40, 100, dtype=torch.float64).numpy() * 3
    x[3, 5], x[4, 6], x[5, 7], x[6, 8] = phi + 30, phi - 30, phi + 29.99, phi - 29.99
    x[7], x[8, :50] = -np.inf, -np.inf
    y, again = unified_softmax_np(x, phi, (-30.0, 30.0))
    assert again.nonzero()[0].tolist() == [3, 4]
    want = torch.from_numpy(x).softmax(-1).nan_to_num(0)
    torch.testing.assert_close(torch.from_numpy(y), want, rtol=1e-12, atol=0)
    shifted, _ = unified_softmax_np(x + 400, phi + 400, (-30.0, 30.0))  # any φ will do that is near enough
    np.testing.assert_allclose(shifted, y, rtol=1e-9)


@pytest.mark.parametrize("weights, bounds", [(np.float16, NARROW), (np.float32, WIDE)], ids=["fp16", "fp32"])
def test_bounds_fit_the_type_of_the_weights(weights, bounds):
    """Within the bounds weights are as exact as their type; a score twice as far overflows it, or falls to nothing."""
    just = np.linspace(*bounds, 101)[1:-1, None] + np.zeros((1, 64))  # rows of equal scores, from bound to bound
    y, again = unified_softmax_np(just, 0.0, bounds, weights)
    assert not again.any()
    np.testing.assert_allclose(y, 1 / 64, rtol=2 * np.finfo(weights).eps)
    with np.errstate(over="ignore"):
        assert np.exp(np.float64(2 * bounds[1])).astype(weights) == np.inf
        assert np.exp(np.float64(2 * bounds[0])).astype(weights) < np.finfo(weights).smallest_normal
    uneven = np.concatenate([just, just - bounds[1] - 1], -1)
    assert unified_softmax_np(uneven, 0.0, bounds, weights)[1].any()
    np.testing.assert_allclose(
        unified_softmax_np(uneven, 0.0, bounds, weights)[0],
        torch.from_numpy(uneven).softmax(-1),
        rtol=2 * np.finfo(weights).eps,
        atol=np.finfo(weights).eps,
    )


@needs_triton
@pytest.mark.parametrize("splits", [1, 3])
def test_planted_overflow_is_computed_again(splits):
    """Keys 60 and 5 of one sequence reach scores of +200 and −200 in one group each: these groups alone run again."""
    q, k, v = inputs(63)
    q[:, :, 0], k[..., 0] = 4.0, 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_range, none = unified_decoding_triton(q, k, v, splits)
        k[0, 1, 60, 0], k[1, 0, 5, 0] = 200.0, -200.0
        with traffic.counting() if NATIVE == "cpu" else warnings.catch_warnings() as moved:
            out, again = unified_decoding_triton(q, k, v, splits)
    assert not none.any() and again.tolist() == [[False, True], [True, False]]
    attend = reference()
    check([out.cpu()], [attend(q.double(), k.double(), v.double())], [attend(q, k, v)])
    torch.testing.assert_close(out[0, :2], in_range[0, :2])
    if NATIVE == "cpu":
        once = 4 * k.numel()
        assert moved.by("argument")["k_ptr"] == once + once // 2  # two of four groups
        assert moved.launches == 2 + (splits > 1)


@needs_triton
def test_hidden_keys_empty_splits_and_filled_rows_leave_no_bound():
    """All scores lie near φ = 20: whatever is not a score, and so 0, would leave the bounds. 7 keys leave 2 splits."""
    q, k, v = inputs(20)
    q[:, :, 0], k[..., 0] = 4.0, 20.0
    k[0, :, 7:], v[0, :, 7:] = 1e4, 1e4
    lengths = torch.tensor([7, 0])
    out, again = unified_decoding_triton(q, k, v, 9, lengths, phi=20.0, bounds=NARROW)
    assert not again.any() and (out[1] == 0).all()
    torch.testing.assert_close(out.cpu(), reference(lengths)(q, k, v))


GENESIS = """In the beginning God created the heaven and the earth. And the earth was without form, and void; and
darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there
be light: and there was light. And God saw the light, that it was good: and God divided the light from the darkness."""


@pytest.fixture(scope="module")
def scored():
    """q, k, v of each layer of llama-2m over a text."""
    from llmstack.architectures import layers, pretrained

    model, tokenizer = pretrained("llama-2m")
    taken, attend = [], layers.attention_torch
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(
            layers, "attention_torch", lambda q, k, v, **how: taken.append((q, k, v)) or attend(q, k, v, **how)
        )
        model(torch.tensor([tokenizer.encode(GENESIS)]))
    return taken


def test_rows_of_a_trained_model_that_leave_the_bounds(scored):
    """None leaves what bf16 and fp32 hold. fp16's bounds are left by about a sixth, none of them in the first layer."""
    share = {NARROW: [], WIDE: []}
    for q, k, _ in scored:
        s = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)[0] * q.shape[-1] ** -0.5  # [H, T, T]
        s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool).triu(1), -torch.inf).double()
        for bounds, shares in share.items():
            y, again = unified_softmax_np(s.numpy(), 0.0, bounds)
            torch.testing.assert_close(torch.from_numpy(y), s.softmax(-1))
            shares.append(again.mean())
    assert not any(share[WIDE]) and share[NARROW][0] == 0
    assert 0.1 < np.mean(share[NARROW]) < 0.3, share


@needs_triton
def test_decoding_a_trained_model_with_one_maximum_for_all(scored):
    """The last token of the text, layer by layer: what leaves the bounds is computed again, and all is right."""
    again = []
    for q, k, v in scored:
        out, left = unified_decoding_triton(q[:, :, -1], k, v, 2, bounds=NARROW)
        torch.testing.assert_close(out.cpu(), reference()(q[:, :, -1], k, v), rtol=1e-5, atol=1e-5)
        s = (q[0, :, -1:] @ k[0].repeat_interleave(3, 0).mT)[:, 0] * q.shape[-1] ** -0.5  # [H, T]
        groups = unified_softmax_np(s.numpy(), 0.0, NARROW)[1].reshape(2, 3).any(-1)
        assert left[0].tolist() == groups.tolist()
        again += left[0].tolist()
    assert 0 < sum(again) < len(again)


def test_the_dispatcher_picks_the_best_of_a_profile():
    """A profile measured here, whatever this machine's times are: no other pair of numbers costs less over it, so no
    kernel alone does. tests/benchmarks/bench_matmul.py prints by what ratio."""
    w = randn(64, 64)
    calls = {
        "gemv": lambda x: [matmul.gemv_torch(w, row) for row in x],
        "flat": lambda x: x @ w.T,
        "gemm": lambda x: torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 128)) @ w.T,
    }
    rows, profile = (1, 2, 8, 64, 200), {kind: {} for kind in matmul.KINDS}
    for kind, call in calls.items():
        for M in rows:
            x, start = randn(M, 64), time.perf_counter()
            call(x)
            profile[kind][M] = time.perf_counter() - start
    cost = lambda cuts: sum(profile[matmul.choose(M, 64, 64, {(64, 64): cuts})][M] for M in rows)
    ours = cost(matmul.inflections(profile))
    for first in range(1, 202):
        for second in (*rows, 201):
            assert first > second or ours <= cost((first, second)) * (1 + 1e-12)


@pytest.mark.parametrize("impl", EACH)
def test_bad_input(impl):
    q, k, v = inputs(8)
    fn = IMPLS[impl]
    for bad in ((q[0], k, v), (q, k[..., :8], v), (q[:, :3], k, v), (q[:1], k, v)):
        with pytest.raises(ValueError, match=r"q is \[B, H, Dh\].*H divides by K: got q"):
            run(fn, impl, *bad)
    with pytest.raises(ValueError, match="splits = 0, but the keys are cut into 1 or more"):
        run(fn, impl, q, k, v, 0)
    with pytest.raises(ValueError, match=r"lengths is \[B\] = \[2\], got \[3\]"):
        run(fn, impl, q, k, v, 1, torch.tensor([1, 2, 3]))
    if NATIVE == "cpu" or impl != "triton":
        with pytest.raises(ValueError, match=r"between 0 and the 8 keys that there is room for, got \[9, 2\]"):
            run(fn, impl, q, k, v, 1, torch.tensor([9, 2]))
    if impl == "triton":
        for wrong in ((q.double(), k.double(), v.double()), (q, k.half(), v.half())):
            with pytest.raises(TypeError, match="fp32, fp16 or bf16, all of one dtype, got"):
                run(fn, impl, *wrong)
        for wrong in ((q, k, v, 129), inputs(4, 300), inputs(4, 129, H=80, K=1)):
            with pytest.raises(ValueError, match="at most 256 values a head.*got .* splits; use the torch version"):
                run(fn, impl, *wrong)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("impl", EACH)
def test_what_lies_beyond_a_length_may_be_anything(impl, splits):
    q, k, v = inputs(9)
    lengths = torch.tensor([0, 4])
    (clean,) = run(IMPLS[impl], impl, q, k, v, splits, lengths)
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = torch.nan
    assert torch.equal(run(IMPLS[impl], impl, q, k, v, splits, lengths)[0], clean)


@needs_triton
def test_a_gradient_is_not_lost_silently():
    q, k, v = inputs(9)
    with pytest.raises(RuntimeError, match="no gradient.*torch.no_grad"):
        flash_decoding_triton(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="no gradient"):
        matmul.matmul_triton(q[0], k[0, 0].T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_natively(dtype, tolerance):
    if NATIVE != "cuda":
        pytest.skip("torch finds no GPU, or TRITON_INTERPRET=1 is set")
    for H, K, Dh, S, splits in [(32, 8, 128, 4000, 16), (8, 8, 64, 1000, 1), (64, 1, 256, 777, 128), (6, 2, 20, 5, 9)]:
        q, k, v = (x.to("cuda", dtype) for x in inputs(S, Dh, 3, H, K))
        lengths = torch.tensor([S, S // 3, 0], device="cuda")
        want = reference(lengths)(q.double(), k.double(), v.double())
        for got in (
            flash_decoding_triton(q, k, v, splits, lengths),
            unified_decoding_triton(q, k, v, splits, lengths)[0],
            unified_decoding_triton(q, k, v, splits, lengths, bounds=(-1.0, 1.0))[0],
        ):
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
