"""LSH attention against dense attention with shared queries and keys, and the reversible stack against autograd."""

import pytest
import torch
from torch import nn

from llmstack.architectures.efficient_attention import reformer as r


def vectors(T=32, H=2, Dh=8, seed=0, dtype=torch.float64):
    return torch.randn(2, H, T, Dh, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(qk, v, seen):
    """Shared-QK attention under a mask: keys at unit length, a token sees itself only where it sees nothing else."""
    T = qk.shape[2]
    keys = qk / qk.norm(dim=-1, keepdim=True)
    alone = torch.eye(T, dtype=torch.bool)
    others = seen & ~alone
    mask = torch.where(others.any(-1, keepdim=True), others, alone)
    weights = (qk @ keys.mT / qk.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return weights @ v


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
def test_one_bucket_is_dense_attention(causal, rounds):
    qk, v = vectors(), vectors(seed=1)
    mask = torch.ones(32, 32, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    torch.testing.assert_close(r.lsh_attention(qk, v, 1, rounds, causal=causal), dense(qk, v, mask))


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("n_buckets, rounds", [(2, 1), (4, 1), (4, 3), (8, 4)])
def test_whole_buckets_are_dense_attention_under_their_mask(n_buckets, rounds, causal):
    """One chunk holds everything, so buckets alone decide; pairs that meet in several rounds count once."""
    qk, v = (x.requires_grad_() for x in (vectors(), vectors(seed=1)))
    seen = r.shared_buckets(r.lsh_buckets(qk, n_buckets, rounds))
    seen = seen & torch.ones(32, 32, dtype=torch.bool).tril() if causal else seen
    ours, theirs = r.lsh_attention(qk, v, n_buckets, rounds, chunk=32, causal=causal), dense(qk, v, seen)
    torch.testing.assert_close(ours, theirs)
    for a, c in zip(*(torch.autograd.grad(out.sin().sum(), (qk, v)) for out in (ours, theirs))):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("rounds", [1, 3])
def test_chunks_cut_buckets_as_the_paper_says(rounds):
    qk, v, chunk = vectors(), vectors(seed=1), 8
    seen = torch.zeros(2, 2, 32, 32, dtype=torch.bool)
    for bucket in r.lsh_buckets(qk, 4, rounds):
        for b, h in ((b, h) for b in range(2) for h in range(2)):
            order = sorted(range(32), key=lambda t: (int(bucket[b, h, t]), t))
            place = {t: i // chunk for i, t in enumerate(order)}
            for i in range(32):
                for j in range(32):
                    near = place[i] - place[j] in (0, 1)
                    seen[b, h, i, j] |= near and bool(bucket[b, h, i] == bucket[b, h, j])
    torch.testing.assert_close(r.lsh_attention(qk, v, 4, rounds, chunk), dense(qk, v, seen))
    assert not torch.equal(seen, r.shared_buckets(r.lsh_buckets(qk, 4, rounds))), "chunks did cut something"


def test_recall_rises_with_rounds_and_falls_with_buckets():
    qk = vectors(T=128, dtype=torch.float32)
    found = {
        (n, rounds): r.recall(qk, r.shared_buckets(r.lsh_buckets(qk, n, rounds)), top=4)
        for n, rounds in [(1, 1), (4, 1), (16, 1), (16, 2), (16, 4), (16, 8)]
    }
    assert found[1, 1] == 1
    assert found[16, 1] < found[16, 2] < found[16, 4] < found[16, 8]
    assert found[16, 1] < found[4, 1]
    chance = float(r.shared_buckets(r.lsh_buckets(qk, 16, 8)).float().mean())
    assert found[16, 8] > chance + 0.2, "better than as many keys drawn at random"


def test_near_vectors_meet_more_often_than_far_ones():
    x = vectors(T=1, H=1, Dh=16, dtype=torch.float32)[:1].expand(1, 1, 2, 16).clone()
    step = vectors(T=1, H=1, Dh=16, seed=1, dtype=torch.float32)[0, 0, 0]
    meeting = []
    for size in (0.0, 0.3, 3.0):
        x[0, 0, 1] = x[0, 0, 0] + size * step
        buckets = r.lsh_buckets(x, 8, rounds=400)
        meeting.append(float((buckets[..., 0] == buckets[..., 1]).float().mean()))
    assert meeting[0] == 1 > meeting[1] > meeting[2]


def test_work_is_linear_in_length():
    from llmstack.architectures.efficient_attention.blocks import pairs

    hashed = lambda q, k, v: r.lsh_attention(q, v, q.shape[2] // 16, rounds=2, chunk=32)
    rotations = lambda T: 2 * T * (T // 16) // 4  # in rounds; 2 T Dh n_buckets / 2 operations, of which a pair has 4 Dh
    work = {T: pairs(hashed, T) - rotations(T) for T in (128, 256, 512)}
    assert work == {T: 2 * T * 64 for T in work}, "each query looks at two chunks, in two rounds"


def test_bad_input():
    qk = vectors()
    for call, says in [
        (lambda: r.lsh_buckets(qk, 3), "n_buckets = 3, rounds = 1: 1 or an even number"),
        (lambda: r.lsh_buckets(qk, 4, 0), "rounds = 0"),
        (lambda: r.lsh_attention(qk, qk, 4, chunk=5), "chunk = 5 does not divide T = 32: pad"),
    ]:
        with pytest.raises(ValueError, match=says):
            call()


def stack(depth=3, width=6):
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width))
    return r.Reversible([(make(), make()) for _ in range(depth)]).double()


def plain(layers, x1, x2):
    for f, g in layers.pairs:
        x1 = x1 + f(x2)
        x2 = x2 + g(x1)
    return x1, x2


def halves():
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (1, 2)]


def test_a_reversible_stack_recovers_its_inputs():
    layers, x = stack(depth=20), halves()
    with torch.no_grad():
        y = layers(*x)
        assert (y[0] - x[0]).abs().max() > 0.5
        for a, b in zip(layers.inverse(*y), x):
            torch.testing.assert_close(a, b)


def test_gradients_are_those_of_plain_autograd():
    layers, x = stack(), [t.requires_grad_() for t in halves()]
    wanted = [*x, *layers.parameters()]
    grads = []
    for y1, y2 in (layers(*x), plain(layers, *x)):
        grads.append(torch.autograd.grad((y1.sin() * y2).sum(), wanted))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_shared_and_frozen_parameters():
    f = nn.Linear(6, 6).double()
    layers = r.Reversible([(f, f), (f, nn.Linear(6, 6).double())])
    layers.pairs[1][1].weight.requires_grad_(False)
    x = halves()
    wanted = [p for p in layers.parameters() if p.requires_grad]
    ours, theirs = (
        torch.autograd.grad(y[0].pow(2).sum() + y[1].sum(), wanted) for y in (layers(*x), plain(layers, *x))
    )
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("depth", [2, 16])
def test_a_reversible_stack_keeps_two_activations_at_any_depth(depth):
    layers, x = stack(depth), [t.requires_grad_() for t in halves()]
    own, kept = {p.data_ptr() for p in layers.parameters()}, {"reversible": 0, "plain": 0}
    for name, run in (("reversible", layers), ("plain", lambda *x: plain(layers, *x))):

        def keep(t, name=name):
            kept[name] += t.numel() * (t.data_ptr() not in own)
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            run(*x)
    assert kept["reversible"] == 2 * x[0].numel()
    assert kept["plain"] >= depth * 2 * x[0].numel()
