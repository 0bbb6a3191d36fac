"""Masks as functions: what each pattern allows, how they compose, how much work and how many steps they leave."""

from functools import reduce

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from llmstack.architectures import build
from llmstack.architectures.efficient_attention import masks as m
from llmstack.config import ModelConfig
from llmstack.ops.attention import attention_torch

T = 24
PATTERNS = {
    "everything": (m.everything(), lambda i, j: True),
    "causal": (m.causal(), lambda i, j: j <= i),
    "window": (m.window(5) & m.causal(), lambda i, j: 0 <= i - j < 5),
    "both ways": (m.window(5, ahead=3), lambda i, j: -3 <= i - j < 5),
    "sinks": ((m.window(5) | m.sinks(2)) & m.causal(), lambda i, j: j <= i and (i - j < 5 or j < 2)),
    "longformer": (m.window(3, 2) | m.hubs([0, 9]), lambda i, j: abs(i - j) < 3 or i in (0, 9) or j in (0, 9)),
    "strided": (m.strided(5), lambda i, j: j <= i and (i - j < 5 or (i - j) % 5 == 0)),
    "dilated": (m.dilated(8, 2, 1), lambda i, j: i // 8 == j // 8 and i % 2 == 1 == j % 2),
    "pcw": (
        m.parallel_windows([5, 7], 12),
        lambda i, j: j <= i and (i >= 12 or (i < 5) == (j < 5)),
    ),
    "not": (~m.causal(), lambda i, j: j > i),
}


def table(rule, T=T):
    return torch.tensor([[bool(rule(i, j)) for j in range(T)] for i in range(T)])


def qkv(T=T, H=2, Dh=8, dtype=torch.float32):
    return [torch.randn(1, H, T, Dh, generator=torch.Generator().manual_seed(s), dtype=dtype) for s in range(3)]


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pattern_is_its_rule(name):
    mask, rule = PATTERNS[name]
    assert torch.equal(mask.matrix(T), table(rule))
    assert mask.nnz(T) == table(rule).sum()
    assert torch.equal(torch.cat(list(mask.rows(T, block=7))), table(rule)), "in pieces"
    assert torch.equal(mask.matrix(3, T), table(rule)[-3:]), "queries are the last of S"


@pytest.mark.parametrize("name", PATTERNS)
def test_a_gradient_flows_where_the_mask_is_true_and_nowhere_else(name):
    """d out_i / d v_j is the weight of j for i. Under a causal mask the upper triangle is exactly zero."""
    mask = PATTERNS[name][0].matrix(T)
    q, k, v = (x[:, :1] for x in qkv())
    v.requires_grad_()
    out = attention_torch(q, k, v, mask)
    flows = torch.stack(
        [torch.autograd.grad(out[0, 0, i].sum(), v, retain_graph=True)[0][0, 0, :, 0] for i in range(T)]
    )
    assert torch.equal(flows != 0, mask)
    torch.testing.assert_close(flows.sum(-1), mask.any(-1).float())


def test_a_full_mask_is_dense_attention():
    q, k, v = qkv()
    torch.testing.assert_close(
        attention_torch(q, k, v, m.everything().matrix(T)), scaled_dot_product_attention(q, k, v)
    )
    causal = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention_torch(q, k, v, (m.everything() & m.causal()).matrix(T)), causal)


def test_masks_compose_as_sets_do():
    a, b = m.window(4) & m.causal(), m.hubs([3])
    x, y = a.matrix(T), b.matrix(T)
    assert torch.equal((a & b).matrix(T), x & y)
    assert torch.equal((a | b).matrix(T), x | y)
    assert torch.equal((~(a | b)).matrix(T), (~a & ~b).matrix(T))
    assert (a | b).name == "((window(4) & causal) | hubs([3]))"


def test_a_mask_draws_itself():
    assert str(m.causal()).splitlines()[:3] == ["causal", "■" + 23 * "·", "■■" + 22 * "·"]


def test_queries_that_see_nothing_are_named_and_get_zeros():
    every_second = m.dilated(8, 2)
    assert every_second.blind(T).tolist() == list(range(1, T, 2))
    assert m.causal().blind(T).tolist() == []
    q, k, v = (x.requires_grad_() for x in qkv())
    out = attention_torch(q, k, v, every_second.matrix(T))
    assert (out[:, :, 1::2] == 0).all() and (out[:, :, ::2] != 0).any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("root", [8, 16, 32])
def test_strided_work_is_s_root_s(root):
    """A late query sees 2√s − 1 keys, half of them local; over a causal triangle the mean is 1.5 √s."""
    s = root * root
    mask = m.strided(root)
    assert int(mask.matrix(1, s).sum()) == 2 * root - 1
    assert mask.nnz(s) <= 2 * s * root
    assert mask.nnz(s) / (s * root) == pytest.approx(1.5, rel=1.2 / root)
    assert m.causal().nnz(s) / mask.nnz(s) > root / 3.5


@pytest.mark.parametrize("stride", [4, 5, 7])
def test_two_hops_of_strided_attention_cover_the_past(stride):
    local, column = (m.window(stride) & m.causal()).matrix(T), m.column(stride).matrix(T)
    assert torch.equal(column.float() @ local.float() > 0, m.causal().matrix(T)), "one local layer, one of columns"
    assert torch.equal(m.hops(m.strided(stride).matrix(T)) >= 0, m.causal().matrix(T))
    assert m.hops(m.strided(stride).matrix(T)).max() == 2
    assert m.hops(local).max() == -(-(T - 1) // (stride - 1)), "a window alone needs as many layers as windows"


def test_big_bird_is_linear_and_two_steps_wide():
    work = {n: m.big_bird(n, 8, random=2).nnz(n) for n in (256, 512, 1024)}
    assert work[1024] - work[512] == 2 * (work[512] - work[256]), "a straight line"
    steps = m.hops(m.big_bird(256, 8).matrix(256)).float()
    assert steps.max() == 2 and 1 < steps.mean() < 2
    no_hubs = m.window(12, ahead=11).matrix(256)
    assert m.hops(no_hubs).max() > 20
    layout = m.big_bird(256, 8, near=3, random=2, seed=1).blocks(256, 8)
    assert layout[0].all() and layout[-1].all() and layout[:, 0].all() and layout[:, -1].all()
    assert set(layout.sum(-1)[2:-2].tolist()) == {7}, "two global, three near, two random squares"
    assert not torch.equal(layout, m.big_bird(256, 8, random=2).blocks(256, 8)), "another seed, other squares"


def test_other_counts():
    s, w = 200, 16
    assert (m.window(w) & m.causal()).nnz(s) == s * w - w * (w - 1) // 2
    assert ((m.window(w) | m.sinks(4)) & m.causal()).nnz(s) == s * w - w * (w - 1) // 2 + sum(
        min(4, max(0, i - w + 1)) for i in range(s)
    )
    assert m.dilated(40, 4).nnz(s) == 5 * 10**2
    n, B = 50, 4
    windows = reduce(lambda a, b: a + b, [n * (n + 1) // 2] * B)
    assert m.parallel_windows([n] * B, 0).nnz(B * n) == windows, "PCW: from (B n)² to B n²"


def test_squares_of_a_mask():
    mask = m.strided(5)
    pooled = torch.nn.functional.max_pool2d(mask.matrix(T)[None].float(), 4)[0] > 0
    assert torch.equal(mask.blocks(T, 4), pooled)


@pytest.fixture(scope="module")
def model():
    config = ModelConfig("small", 32, 2, 4, 50, n_kv_heads=2, d_ff=48, max_seq_len=64)
    model = build(config).eval()
    for p in model.parameters():
        p.data *= 3  # so that a token's logits feel every other token
    return model


def ids(n, seed):
    return torch.randint(50, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_one_parallel_window_is_the_plain_model(model):
    x = ids(12, 0)
    pattern, positions = m.parallel_windows([8], 4), m.parallel_positions([8], 4)
    torch.testing.assert_close(model(x, pattern=pattern, positions=positions), model(x))


@torch.no_grad()
def test_a_task_does_not_know_the_order_of_its_windows(model):
    parts, task = [ids(n, n) for n in (6, 4, 6)], ids(5, 9)

    def run(order, **how):
        lengths = [parts[i].shape[1] for i in order]
        x = torch.cat([*(parts[i] for i in order), task], 1)
        how = dict(pattern=m.parallel_windows(lengths, 5), positions=m.parallel_positions(lengths, 5)) | how
        return model(x, **how)[:, -5:]

    torch.testing.assert_close(run([0, 1, 2]), run([2, 0, 1]), rtol=1e-4, atol=1e-5)
    assert (run([0, 1, 2], positions=None) - run([2, 0, 1], positions=None)).abs().max() > 1e-3, "positions matter"
    assert (run([0, 1, 2], pattern=None) - run([2, 0, 1], pattern=None)).abs().max() > 1e-3, "and so does the pattern"


def test_reused_positions():
    assert m.parallel_positions([3, 2], 2).tolist() == [0, 1, 2, 0, 1, 3, 4]


@torch.no_grad()
def test_a_models_pattern_narrows_and_takes_padding(model):
    x = ids(10, 3)
    torch.testing.assert_close(model(x, pattern=m.everything()), model(x))
    near = build(model.config.with_(sliding_window=3)).eval()
    near.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x, pattern=m.window(3)), near(x))
    padding = torch.ones(1, 12, dtype=torch.bool)
    padding[:, 10:] = False
    longer = torch.cat([x, ids(2, 4)], 1)
    torch.testing.assert_close(model(longer, padding, pattern=m.window(3))[:, :10], near(x))
    with pytest.raises(ValueError, match=r"positions \[3\] go with a pass over 10 tokens, uncached"):
        model(x, positions=torch.arange(3))


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: m.window(0), "window = 0, ahead = 0: a query sees itself"),
        (lambda: m.window(3, ahead=-1), "ahead = -1"),
        (lambda: m.column(0), "stride = 0.*√T is usual"),
        (lambda: m.dilated(10, 4), "segment = 10, rate = 4: the rate must divide"),
        (lambda: m.big_bird(100, 16), "block = 16 does not divide length = 100"),
        (lambda: m.causal().blocks(100, 16), "block = 16 does not divide T = 100: pad"),
        (lambda: m.causal().nnz(0), "T = 0 queries"),
        (lambda: m.causal().matrix(5, 3), "T = 5 queries are the last of S = 3"),
    ],
)
def test_bad_input(make, says):
    with pytest.raises(ValueError, match=says):
        make()
