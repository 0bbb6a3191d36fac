"""Attention over pages against the same cache in one piece: any page size, any order of pages, shared pages."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_checks import NATIVE, check, randn, run
from torch.nn.functional import scaled_dot_product_attention

from llmstack.ops import traffic
from llmstack.ops._triton import HAVE_TRITON
from llmstack.ops.flash_decoding import flash_decoding_triton
from llmstack.ops.paged_attention import IMPLS, paged_attention_triton

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
interpreted = pytest.mark.skipif(not HAVE_TRITON or NATIVE == "cuda", reason="counts in Triton's interpreter")
EACH = [pytest.param(impl, marks=[needs_triton] if impl == "triton" else []) for impl in ("numpy", "torch", "triton")]


def contiguous(q, ks, vs, scale=None):
    """PyTorch's operator for each sequence: ks, vs lists of [n, K, Dh]."""
    outs = []
    for q_b, k, v in zip(q, ks, vs):
        k, v = (x.transpose(0, 1).repeat_interleave(len(q_b) // x.shape[1], 0).to(q.dtype) for x in (k, v))
        out = scaled_dot_product_attention(q_b[:, None], k, v, scale=scale)[:, 0]
        outs.append(out if k.shape[1] else torch.zeros_like(q_b))
    return torch.stack(outs)


def caches(lengths, K=2, Dh=16, seed=0):
    return [[randn(n, K, Dh, seed=seed + 10 * i + s) for i, n in enumerate(lengths)] for s in (1, 2)]


def paged(ks, vs, page, spare=3, seed=0):
    """The caches in pages in a random order, NaN wherever nothing belongs to a sequence, junk in unused entries."""
    lengths = torch.tensor([len(k) for k in ks])
    counts = [-(-int(n) // page) for n in lengths]
    order = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.full((len(ks), max(*counts, 1) + 1), 10**6, dtype=torch.int32)
    pages = [torch.full((len(order), page, *x[0].shape[1:]), torch.nan) for x in (ks, vs)]
    for b, count in enumerate(counts):
        for j in range(count):
            tables[b, j] = mine = order.pop()
            for room, x in zip(pages, (ks, vs)):
                part = x[b][j * page : (j + 1) * page]
                room[mine, : len(part)] = part
    return *pages, tables, lengths


def agree(impl, q, ks, vs, page, **options):
    (got,) = run(IMPLS[impl], impl, q, *paged(ks, vs, page), **options)
    want = [contiguous(q.to(d), ks, vs, options.get("scale")) for d in (torch.float64, torch.float32)]
    check([got], want[:1], want[1:])


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("impl", EACH)
def test_equals_attention_over_one_piece(impl, page):
    """Lengths that no page divides, one that every page does, one of nothing."""
    ks, vs = caches([1, 7, 63, 0, 48])
    agree(impl, randn(5, 4, 16), ks, vs, page)


@pytest.mark.parametrize("H, K, Dh", [(1, 1, 20), (6, 1, 64), (4, 2, 256)])
@pytest.mark.parametrize("impl", EACH)
def test_heads_groups_and_widths(impl, H, K, Dh):
    ks, vs = caches([37, 100], K, Dh)
    agree(impl, randn(2, H, Dh), ks, vs, 8, scale=0.2)


@needs_triton
@pytest.mark.parametrize("splits", [3, 9])
def test_splits(splits):
    """600 keys are several tiles in each split."""
    ks, vs = caches([600, 5])
    agree("triton", randn(2, 4, 16), ks, vs, 16, splits=splits)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4), page=st.integers(1, 20), seed=st.integers(0, 99))
@pytest.mark.parametrize("impl", ["numpy", "torch"])
def test_any_lengths_pages_and_order(impl, lengths, page, seed):
    ks, vs = caches(lengths, seed=seed)
    q = randn(len(lengths), 4, 16, seed=seed)
    (got,) = run(IMPLS[impl], impl, q, *paged(ks, vs, page, seed=seed))
    torch.testing.assert_close(got, contiguous(q, ks, vs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", EACH)
def test_sequences_share_the_pages_of_a_common_beginning(impl):
    """Two sequences go on from the same 8 keys: their tables begin with the same two pages."""
    k_pages, v_pages = randn(5, 4, 2, 16, seed=1), randn(5, 4, 2, 16, seed=2)
    tables, lengths = torch.tensor([[3, 0, 1], [3, 0, 4]]), torch.tensor([10, 11])
    q = randn(1, 4, 16).repeat(2, 1, 1)
    (out,) = run(IMPLS[impl], impl, q, k_pages, v_pages, tables, lengths)
    whole = lambda x: [x[[3, 0, 1]].flatten(0, 1)[:10], x[[3, 0, 4]].flatten(0, 1)[:11]]
    torch.testing.assert_close(out, contiguous(q, whole(k_pages), whole(v_pages)))
    (short,) = run(IMPLS[impl], impl, q, k_pages, v_pages, tables, torch.tensor([8, 8]))
    assert torch.equal(short[0], short[1])


@needs_triton
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_narrow_types_and_strided_pages(dtype, tolerance):
    ks, vs = caches([30, 17])
    k_pages, v_pages, tables, lengths = paged(ks, vs, 5)
    both = torch.stack([k_pages, v_pages], 1).to(dtype)  # one cache [pages, 2, page, K, Dh], as engines keep it
    q = randn(2, 4, 16).to(dtype)
    out = paged_attention_triton(*(x.to(NATIVE) for x in (q, both[:, 0], both[:, 1], tables, lengths)), splits=2).cpu()
    assert out.dtype == dtype
    want = contiguous(q.double(), *([x.to(dtype) for x in each] for each in (ks, vs)))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=tolerance)


@interpreted
@pytest.mark.parametrize("page", [1, 16])
def test_bytes_are_the_formula(page):
    """What the same keys in one piece move, and the look-up; unused room and shared entries of tables move nothing."""
    ks, vs = caches([40, 40])
    q, (K, Dh) = randn(2, 4, 16), (2, 16)
    with traffic.counting() as moved:
        paged_attention_triton(q, *paged(ks, vs, page), splits=2)
    with traffic.counting() as straight:
        flash_decoding_triton(q, *(torch.stack(x).transpose(1, 2) for x in (ks, vs)), 2, torch.tensor([40, 40]))
    N = 80
    assert moved.by("argument")["tables_ptr"] == 4 * N * K
    assert moved.by("argument")["k_ptr"] + moved.by("argument")["v_ptr"] == 4 * 2 * N * K * Dh
    assert (moved.loaded, moved.stored) == (straight.loaded + 4 * N * K, straight.stored)


@pytest.mark.parametrize("impl", EACH)
def test_bad_input(impl):
    ks, vs = caches([9, 4])
    q, (k_pages, v_pages, tables, lengths) = randn(2, 4, 16), paged(ks, vs, 4)
    fn = IMPLS[impl]
    for bad in (
        (q[0], k_pages, v_pages, tables),
        (q[:, :3], k_pages, v_pages, tables),
        (q, k_pages, v_pages[:-1], tables),
        (q, k_pages, v_pages, tables[:1]),
    ):
        with pytest.raises(ValueError, match=r"k_pages and v_pages are \[pages, page, K, Dh\].*got q"):
            run(fn, impl, *bad, lengths)
    if NATIVE == "cpu" or impl != "triton":
        with pytest.raises(ValueError, match=r"between 0 and the 16 keys that there is room for, got \[9, 17\]"):
            run(fn, impl, q, k_pages, v_pages, tables, torch.tensor([9, 17]))
        for entry in (-1, len(k_pages)):
            wrong = tables.clone()
            wrong[1, 0] = entry
            with pytest.raises(
                ValueError, match=f"tables name pages 0 to {len(k_pages) - 1} within each length.*{entry}"
            ):
                run(fn, impl, q, k_pages, v_pages, wrong, lengths)
            run(fn, impl, q, k_pages, v_pages, wrong, torch.tensor([9, 0]))
    with pytest.raises(ValueError, match="H divides by K"):
        run(fn, impl, q, k_pages[:, :, :0], v_pages[:, :, :0], tables, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_natively(dtype, tolerance):
    if NATIVE != "cuda":
        pytest.skip("torch finds no GPU, or TRITON_INTERPRET=1 is set")
    for page, splits in [(1, 1), (16, 8), (100, 3)]:
        ks, vs = caches([2000, 3, 0], 4, 128)
        k_pages, v_pages, tables, lengths = paged(ks, vs, page)
        q = randn(3, 16, 128)
        given = [x.to("cuda", dtype) for x in (q, k_pages, v_pages)]
        out = paged_attention_triton(*given, tables.cuda(), lengths.cuda(), splits=splits)
        torch.testing.assert_close(out.double().cpu(), contiguous(q.double(), ks, vs), rtol=tolerance, atol=tolerance)
