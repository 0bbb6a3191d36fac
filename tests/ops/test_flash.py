"""FlashAttention against PyTorch's attention in double precision: values, gradients, bytes moved, memory used."""

import tracemalloc

import numpy as np
import pytest
import torch
from op_checks import NATIVE, check, randn, run, strided
from torch.nn.functional import scaled_dot_product_attention

from llmstack.ops import traffic
from llmstack.ops._triton import HAVE_TRITON
from llmstack.ops.flash import HBM, IMPLS, flash_np, flash_np_backward, flash_torch, flash_triton, kernel, ref
from llmstack.ops.flash import flash_varlen_torch as varlen_torch
from llmstack.ops.flash import flash_varlen_triton as varlen_triton

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
interpreted = pytest.mark.skipif(not HAVE_TRITON or NATIVE == "cuda", reason="counts in Triton's interpreter")


def flash_triton_backward(dout, q, k, v, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(flash_triton(*leaves, **options), leaves, dout)


BACKWARDS = {"numpy": flash_np_backward} | ({"triton": flash_triton_backward} if HAVE_TRITON else {})
LENGTHS = [(1, 1), (1, 63), (7, 7), (63, 100), (100, 63), (100, 100)]


def inputs(T, S, Dh=16, B=2, H=4, K=2, seed=0):
    return [randn(B, n, s, Dh, seed=seed + i) for i, (n, s) in enumerate([(H, T), (K, S), (K, S)])]


def reference(causal=False, window=0, bias=None, alibi=None, scale=None):
    """PyTorch's operator with one additive mask, written out pair by pair; zeros where a query sees no key."""

    def attend(q, k, v):
        T, S = q.shape[2], k.shape[2]
        away = torch.arange(T)[:, None] + S - T - torch.arange(S)  # [T, S]
        added = torch.zeros(q.shape[0], q.shape[1], T, S, dtype=q.dtype)
        if causal:
            added = added.masked_fill((away < 0) | (away >= (window or S + T)), -torch.inf)
        if bias is not None:
            added = added + bias.to(q.dtype)
        if alibi is not None:
            added = added - alibi.to(q.dtype)[:, None, None] * away.abs()
        lost = (added == -torch.inf).all(-1, keepdim=True)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, added.masked_fill(lost, 0), scale=scale)
        return out.masked_fill(lost, 0)

    return attend


def agree(impl, tensors, back=False, **options):
    """The implementation, and with `back` its gradients, as near to double precision as PyTorch's fp32."""
    attend, dout = reference(**options), randn(*tensors[0].shape, seed=9)

    def all_of(dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
        out = attend(*leaves)
        return [out.detach(), *(torch.autograd.grad(out, leaves, dout.to(dtype)) if back else ())]

    to = (lambda x: x.numpy()) if impl == "numpy" else lambda x: x
    given = {name: to(x) if torch.is_tensor(x) else x for name, x in options.items()}
    got = run(IMPLS[impl], impl, *tensors, **given)
    if back:
        got += run(BACKWARDS[impl], impl, dout, *tensors, **given)
    assert not any(g.isnan().any() for g in got)
    check(got, all_of(torch.float64), all_of(torch.float32))


def test_all_three_are_here():
    assert list(IMPLS) == ["numpy", "torch"] + ["triton"] * HAVE_TRITON


@pytest.mark.parametrize("T, S", LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("impl", IMPLS)
def test_lengths(impl, causal, T, S):
    """100 queries of 63 keys, causal: the first 37 see nothing, and get zeros. Gradients where they are not zero."""
    agree(impl, inputs(T, S, H=2, K=1), back=impl in BACKWARDS and S > 1, causal=causal)


HIDDEN = randn(2, 1, 40, 40, seed=4).masked_fill(randn(2, 1, 40, 40, seed=5) > 0.5, -torch.inf)
HIDDEN[:, :, 3] = HIDDEN[:, :, :, 6] = -torch.inf
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS = {
    "window": dict(causal=True, window=9),
    "window of itself": dict(causal=True, window=1),
    "alibi": dict(alibi=SLOPES),
    "alibi causal": dict(alibi=SLOPES, causal=True),
    "bias with hidden keys and a row of none": dict(bias=HIDDEN),
    "everything": dict(causal=True, window=17, alibi=SLOPES, bias=HIDDEN[:1], scale=0.3),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("impl", IMPLS)
def test_masks_and_biases(impl, name):
    agree(impl, inputs(40, 40), back=impl in BACKWARDS, **OPTIONS[name])


@pytest.mark.parametrize("H, K, Dh", [(2, 2, 5), (4, 4, 80), (4, 1, 128), (1, 1, 256)])
@pytest.mark.parametrize("impl", IMPLS)
def test_heads_and_widths(impl, H, K, Dh):
    agree(impl, inputs(33, 33, Dh, B=1, H=H, K=K), back=impl in BACKWARDS, causal=True)


@needs_triton
@pytest.mark.parametrize("options", [dict(), dict(causal=True, window=140)], ids=["full", "window"])
def test_kernels_over_many_tiles(options):
    """300 rows are three tiles; the window reaches over one tile's edge and not the next's."""
    agree("triton", inputs(300, 300, B=1, H=2, K=1), back=True, **options)


@pytest.mark.parametrize("blocks", [(1, 1), (3, 8), (64, 7)], ids=str)
def test_numpy_with_any_blocks(blocks):
    q, k, v = (x.double().numpy() for x in inputs(20, 31))
    options, dout = dict(causal=True, window=6), np.ones_like(q)
    whole, parts = (flash_np(q, k, v, **options, return_lse=True, blocks=b) for b in ((99, 99), blocks))
    grads = [ref.flash_np_backward(dout, q, k, v, **options, saved=whole, blocks=b) for b in ((99, 99), blocks)]
    for a, b in zip((*whole, *grads[0]), (*parts, *grads[1])):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("impl", IMPLS)
def test_log_sum_exp(impl):
    q, k, v = inputs(30, 20)
    out, lse = run(IMPLS[impl], impl, q, k, v, causal=True, return_lse=True, scale=0.5)
    scores = 0.5 * q.double() @ k.double().repeat_interleave(2, 1).mT
    scores = scores.masked_fill(torch.arange(30)[:, None] - 10 < torch.arange(20), -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert (lse[:, :, :10] == -torch.inf).all() and (out[:, :, :10] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_strides_do_not_matter_and_empty_input_is_fine(impl):
    q, k, v = inputs(25, 25)
    plain = run(IMPLS[impl], impl, q, k, v)[0]
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]  # as a model's projections lie
    for views in (by_token, [by_token[0], k, by_token[2]], [strided(x) for x in (q, k, v)]):
        torch.testing.assert_close(run(IMPLS[impl], impl, *views)[0], plain, rtol=0, atol=1e-6)
    assert run(IMPLS[impl], impl, q[:, :, :0], k, v)[0].shape == (2, 4, 0, 16)
    assert (run(IMPLS[impl], impl, q, k[:, :, :0], v[:, :, :0])[0] == 0).all()
    assert run(IMPLS[impl], impl, q[:0], k[:0], v[:0])[0].shape == (0, 4, 25, 16)


@needs_triton
def test_gradients_through_the_log_sum_exp():
    """A gradient of lse alone goes to q and k."""
    q, k, v = inputs(20, 25)
    bias, dout, dlse = randn(1, 4, 20, 25, seed=7), randn(*q.shape, seed=8), randn(2, 4, 20, seed=9)
    for wanted in ((dout, None), (None, dlse), (dout, dlse)):
        found = []
        for f, dtype in ((flash_triton, torch.float32), (flash_torch, torch.float64), (flash_torch, torch.float32)):
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
            to = NATIVE if f is flash_triton else "cpu"
            results = f(*(x.to(to) for x in leaves), causal=True, bias=bias.to(to, dtype), return_lse=True)
            outs, grads = zip(*((r, w.to(r)) for r, w in zip(results, wanted) if w is not None))
            found.append(torch.autograd.grad(outs, leaves, grads, materialize_grads=True))
        check(*found)


@needs_triton
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_narrow_types(dtype, tolerance):
    q, k, v = (x.to(dtype) for x in inputs(70, 70, 32))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want = reference(causal=True)(*leaves)
    gradients = torch.autograd.grad(want, leaves, torch.ones_like(want))
    got = run(flash_triton, "triton", q, k, v, causal=True)
    got += run(BACKWARDS["triton"], "triton", torch.ones_like(q), q, k, v, causal=True)
    for a, b in zip(got, (want, *gradients)):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= tolerance * b.norm()


# ------------------------------------------------------------------------------------------------ sequences, packed
SPANS = [5, 0, 40, 1, 17]
STARTS = torch.tensor([0, *np.cumsum(SPANS)])


@needs_triton
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_is_padded(causal):
    """Sequences one after another give what they give side by side in a padded batch, gradients as well."""
    q, k, v = (randn(sum(SPANS), heads, 16, seed=s) for s, heads in enumerate([4, 2, 2]))
    dout, B, longest = randn(*q.shape, seed=3), len(SPANS), max(SPANS)
    place = torch.cat([b * longest + torch.arange(s) for b, s in enumerate(SPANS)])  # of a packed row in the batch

    def padded(q, k, v):
        side = lambda x: x.new_zeros(B * longest, *x.shape[1:]).index_put((place,), x).view(B, longest, *x.shape[1:])
        there = torch.arange(longest) < torch.tensor(SPANS)[:, None]
        hide = torch.zeros(B, 1, 1, longest).masked_fill(~there[:, None, None], -torch.inf)
        out = reference(causal=causal, bias=hide)(*(side(x).transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2).flatten(0, 1)[place]

    def all_of(f, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = f(*leaves)
        return [out.detach().cpu(), *torch.autograd.grad(out, leaves, dout.to(out))]

    to = lambda *tensors: varlen_triton(*(x.to(NATIVE) for x in tensors), STARTS.to(NATIVE), causal)
    check(all_of(to, torch.float32), all_of(padded, torch.float64), all_of(padded, torch.float32))
    torch.testing.assert_close(varlen_torch(q, k, v, STARTS, causal), padded(q, k, v))


@interpreted
def test_packed_work_is_the_sum_of_squares(monkeypatch):
    """Operations of the kernel's products: Σ s_i² packed, B · max s² padded. Blocks of 16 divide the lengths."""
    from triton.runtime.interpreter import InterpreterBuilder

    small_tiles(monkeypatch, 16, 16)
    counted, dot = [0], InterpreterBuilder.create_dot

    def counting_dot(self, a, b, *rest):
        counted[0] += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counting_dot)
    lengths, H = [16, 64, 32], 2
    x, batch = randn(sum(lengths), H, 32), randn(len(lengths), H, max(lengths), 32)
    varlen_triton(x, x, x, torch.tensor([0, 16, 80, 112]))
    assert counted[0] == 4 * H * 32 * sum(s * s for s in lengths)
    counted[0] = 0
    flash_triton(batch, batch, batch)
    assert counted[0] == 4 * H * 32 * len(lengths) * max(lengths) ** 2


# --------------------------------------------------------------------------------------------------- bytes and memory
def small_tiles(monkeypatch, rows, keys):
    """Whole numbers of blocks where the interpreter would take one."""
    monkeypatch.setattr(kernel.Call, "tiles", lambda call, table: dict(ROWS=rows, KEYS=keys, COLS=32))


@interpreted
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_kernels_move_the_bytes_of_the_formula(monkeypatch, causal):
    """63 queries and keys in blocks of 32 and 16; causal, a block of queries reads only the keys up to its end."""
    small_tiles(monkeypatch, 32, 16)
    T, S, Dh, b = 63, 63, 20, 4
    q, k, v = inputs(T, S, Dh, B=1, H=1, K=1)
    rows, keys = range(0, T, 32), range(0, S, 16)
    key_rows = sum(min(first + 32, S) if causal else S for first in rows)  # keys read by all blocks of queries
    query_rows = sum(T - first // 32 * 32 if causal else T for first in keys)  # queries read by all blocks of keys
    with traffic.counting() as moved:
        flash_triton(q, k, v, causal=causal)
    assert moved.loaded == b * (T * Dh + 2 * Dh * key_rows)
    assert moved.stored == b * T * Dh + 4 * T
    if not causal:
        assert moved.bytes == b * ref.values_moved(T, S, Dh, 32, 16)["flash-2"]
    with traffic.counting() as both:
        BACKWARDS["triton"](torch.ones_like(q), q, k, v, causal=causal)
    delta = 2 * b * T * Dh + 4 * T
    of_keys = 4 * b * S * Dh + query_rows * (2 * b * Dh + 8)
    of_queries = 3 * b * T * Dh + 8 * T + 2 * b * Dh * key_rows
    assert both.bytes - moved.bytes == delta + of_keys + of_queries


@interpreted
def test_unfused_attention_moves_the_scores():
    """What a chip must move: T² scores four times without tiles, never with them."""
    q = randn(1, 1, 256, 16).numpy()
    tiled, whole = HBM(), HBM()
    flash_np(q, q, q, hbm=tiled, blocks=(128, 128))
    ref.standard_np(q, q, q, whole)
    with traffic.counting() as moved:
        flash_triton(*[torch.from_numpy(q)] * 3)
    assert moved.bytes == tiled.read + tiled.written < (whole.read + whole.written) / 5


def first_order(q, k, v, blocks, hbm):
    """Algorithm 1 of arXiv:2205.14135: keys outermost, so that out, m and l come and go with each block of them."""
    (T, Dh), S = q.shape, len(k)
    out, m, l = np.empty((T, Dh)), np.empty(T), np.empty(T)
    for array, start in ((out, 0), (m, -np.inf), (l, 0)):
        hbm.store(array, start)
    for j in range(0, S, blocks[1]):
        k_j, v_j = hbm.load(k[j : j + blocks[1]]), hbm.load(v[j : j + blocks[1]])
        for i in range(0, T, blocks[0]):
            at = slice(i, i + blocks[0])
            q_i, out_i, m_i, l_i = (hbm.load(x[at]) for x in (q, out, m, l))
            s = q_i @ k_j.T / Dh**0.5
            new = np.maximum(m_i, s.max(1))
            p, old = np.exp(s - new[:, None]), l_i * np.exp(m_i - new)
            total = old + p.sum(1)
            hbm.store(out[at], (old[:, None] * out_i + p @ v_j) / total[:, None])
            hbm.store(l[at], total)
            hbm.store(m[at], new)
    return out


@pytest.mark.parametrize("T, S, Br, Bc", [(64, 64, 16, 16), (50, 31, 8, 7)])
def test_the_tiles_that_numpy_moves_are_those_of_the_formulas(T, S, Br, Bc):
    q, k, v = (x.double().numpy() for x in inputs(T, S, 8, B=1, H=1, K=1))
    expected = ref.values_moved(T, S, 8, Br, Bc)
    first, second, back, whole = HBM(), HBM(), HBM(), HBM()
    saved = flash_np(q, k, v, return_lse=True, blocks=(Br, Bc), hbm=second)
    np.testing.assert_allclose(first_order(q[0, 0], k[0, 0], v[0, 0], (Br, Bc), first), saved[0][0, 0])
    np.testing.assert_allclose(ref.standard_np(q, k, v, whole), saved[0])
    ref.flash_np_backward(np.ones_like(q), q, k, v, saved=saved, blocks=(Br, Bc), hbm=back)
    counts = dict(zip(["standard", "flash-1", "flash-2", "flash-2 backward"], (whole, first, second, back)))
    assert {name: hbm.read + hbm.written for name, hbm in counts.items()} == {n: 8 * x for n, x in expected.items()}


def test_bytes_are_s_squared_d_squared_over_m():
    """Values moved · M / (S² Dh²) tends to 8 in the second order and 12 + 16/Dh in the first, as M shrinks."""
    S, Dh = 1024, 32
    q, found = np.zeros((1, 1, S, Dh), np.float32), []
    for M in [4 * Dh * Bc for Bc in (32, 8, 4)]:  # up to 4 Dh², where Br = Bc
        hbm, blocks = HBM(), ref.block_rule(M, Dh)
        assert blocks == (M // (4 * Dh),) * 2
        flash_np(q, q, q, blocks=blocks, hbm=hbm)
        moved = ref.values_moved(S, S, Dh, *blocks)
        assert hbm.read + hbm.written == 4 * moved["flash-2"]
        found.append([moved[n] * M / (S * Dh) ** 2 for n in ("flash-2", "flash-1")])
    away = np.abs(np.array(found) - [8, 12 + 16 / Dh])
    assert (np.diff(away, axis=0) < 0).all() and (away[-1] < 0.06).all(), found
    assert ref.block_rule(100 * Dh, Dh) == (25, 25) and ref.block_rule(1000 * Dh, Dh) == (Dh, 250)
    with pytest.raises(ValueError, match="holds no row of q, k, v and out of 32: it takes 128"):
        ref.block_rule(127, 32)


def test_hidden_tiles_are_not_moved():
    """Causal halves the keys that are read, a window makes them grow as the length."""
    q = np.zeros((1, 1, 256, 8))

    def keys_read(T, **options):
        hbm = HBM()
        flash_np(q[:, :, :T], q[:, :, :T], q[:, :, :T], blocks=(8, 8), hbm=hbm, **options)
        return hbm.read - q[:, :, :T].nbytes

    assert keys_read(256, causal=True) / keys_read(256) == pytest.approx((32 + 1) / (2 * 32))
    window = [keys_read(T, causal=True, window=16) for T in (64, 128, 256)]
    assert np.diff(window)[1] == 2 * np.diff(window)[0]


def test_peak_memory_grows_as_the_length():
    """Flash: twice the length, twice what is kept; standard attention: four times."""

    def peak(f, T):
        q = np.zeros((1, 1, T, 16), np.float32)
        f(q, q, q)  # what is allocated once
        tracemalloc.start()
        try:
            f(q, q, q)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    flash, whole = ([peak(f, T) for T in (512, 1024, 2048)] for f in (flash_np, ref.standard_np))
    kept = np.diff(flash) / [512, 1024]  # bytes a token: out and the log-sum-exp, beside tiles of one size
    np.testing.assert_allclose(kept, 4 * (16 + 1), rtol=0.25)
    assert whole[2] > 3.8 * whole[1] > 14 * whole[0] and flash[2] < whole[2] / 50


# ------------------------------------------------------------------------------------------------------ what it takes
@needs_triton
def test_bad_input():
    q, k, v = inputs(8, 8)
    for error, message, call in [
        (ValueError, r"q is \[B, H, T, Dh\].*H divides by K.*\[2, 3, 8, 16\]", lambda: flash_triton(q[:, :3], k, v)),
        (ValueError, r"\[2, 2, 7, 16\]", lambda: flash_triton(q, k, v[:, :, 1:])),
        (
            TypeError,
            "fp32, fp16 or bf16, all of one dtype, got .torch.float64",
            lambda: flash_triton(*map(torch.Tensor.double, (q, k, v))),
        ),  # fmt: skip
        (TypeError, "torch.float16.*use the torch version", lambda: flash_triton(q, k, v.half())),
        (ValueError, "window = 4.*with causal=True", lambda: flash_triton(q, k, v, window=4)),
        (TypeError, "torch.bool: give a mask as 0 where allowed", lambda: flash_triton(q, k, v, bias=q[..., :8] > 0)),
        (ValueError, r"slope for each of 4 heads, got \[3\]", lambda: flash_triton(q, k, v, alibi=SLOPES[:3])),
        (ValueError, "detach them", lambda: flash_triton(q, k, v, alibi=SLOPES.clone().requires_grad_())),
        (ValueError, "use flash_torch", lambda: flash_triton(q, k, v, bias=q[..., :8].clone().requires_grad_())),
        (
            ValueError,
            r"rises from 0 to N = 8, got \[0, 7\]",
            lambda: varlen_triton(
                q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), torch.tensor([0, 7])
            ),
        ),  # fmt: skip
        (ValueError, r"q is \[N, H, Dh\]", lambda: varlen_triton(q, k, v, STARTS, longest=3)),
    ]:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("impl", ["numpy", "torch"])
def test_bad_input_without_a_kernel(impl):
    q, k, v = inputs(8, 8)
    fn = IMPLS[impl]
    for message, args, how in [
        (r"H divides by K: got \[2, 3, 8, 16\]", (q[:, :3], k, v), {}),
        (r"H divides by K: got .*\[2, 0, 8, 16\]", (q, k[:, :0], v[:, :0]), {}),
        ("window = 4.*with causal=True", (q, k, v), {"window": 4}),
    ]:
        with pytest.raises(ValueError, match=message):
            run(fn, impl, *args, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("Dh", [64, 80, 128, 256])
def test_kernels_run_natively(Dh, dtype):
    if NATIVE != "cuda":
        pytest.skip("torch finds no GPU, or TRITON_INTERPRET=1 is set")
    q, k, v = (x.to("cuda", dtype) for x in inputs(300, 300, Dh))
    leaves = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    want = reference(causal=True, window=200, alibi=SLOPES)(*leaves)
    gradients = torch.autograd.grad(want, leaves, torch.ones_like(want))
    options = dict(causal=True, window=200, alibi=SLOPES.cuda())
    got = flash_triton(q, k, v, **options), *BACKWARDS["triton"](torch.ones_like(q), q, k, v, **options)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for a, b in zip(got, (want, *gradients)):
        assert (a.cpu().double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("starts", [[0, 3], [1, 5], [0, 4, 3, 5], [0]])
def test_rows_that_no_packed_sequence_holds_are_refused(starts):
    q = randn(5, 2, 16)
    with pytest.raises(ValueError, match="rises from 0 to N = 5"):
        varlen_torch(q, q, q, torch.tensor(starts))
