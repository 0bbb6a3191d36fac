"""The expert layer and its routers: each selection against its definition written out, and the invariants of all."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch.utils.flop_counter import FlopCounterMode

from llmstack import preset
from llmstack.architectures import build, routers
from llmstack.architectures.moe import Experts, MergedMoE, MoE, SoftMoE
from llmstack.architectures.routers import Routing, top_k
from llmstack.config import ConfigError

D, F, E = 8, 12, 4
TABLE = torch.arange(50) % E
SELECT = {
    "all": lambda h: top_k(h, h.shape[-1]),
    "top-1": lambda h: top_k(h, 1, normalise=False),
    "top-2": lambda h: top_k(h, 2),
    "sigmoid": lambda h: top_k(h, 2, score="sigmoid", bias=torch.tensor([0.3, 0.0, -0.3, 0.1]), scale=2.5),
    "switch": lambda h: top_k(h, 1, normalise=False, capacity=3),
    "v-moe": lambda h: top_k(h, 2, normalise=False, capacity=3, by_score=True),
    "gshard": lambda h: routers.gshard(h, 4, torch.Generator().manual_seed(0)),
    "expert choice": lambda h: routers.expert_choice(h, 3),
    "base": routers.base,
    "hash": lambda h: routers.hashed(h, torch.arange(h.shape[0] * h.shape[1]).view(h.shape[:2]), TABLE),
}


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def layer(select, n=E, activation="swiglu", dtype=torch.float32, **more):
    torch.manual_seed(0)
    return MoE(Experts(n, D, F, activation), select, **more).to(dtype)


def every_expert(experts, x):
    """f_i(x) of all experts, one at a time: [E, ..., D]."""
    return torch.stack([experts.run(x, *(m[e] for m in experts.matrices())) for e in range(len(experts.up))])


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
@pytest.mark.parametrize("name", SELECT)
def test_the_layer_is_the_sum_of_gates_times_experts(name, activation):
    moe, x = layer(SELECT[name], activation=activation), rand(2, 7, D)
    want = torch.einsum("ne,end->nd", moe.select(moe.logits(x)).matrix(), every_expert(moe.experts, x.flatten(0, 1)))
    torch.testing.assert_close(moe(x), want.view_as(x))
    torch.testing.assert_close(moe(x.transpose(0, 1).contiguous().transpose(0, 1)), want.view_as(x))


def test_all_experts_are_the_dense_mixture_of_1991():
    moe, x = layer(SELECT["all"]), rand(3, 5, D)
    gates = moe.router(x).softmax(-1)
    want = sum(gates[..., e, None] * y for e, y in enumerate(every_expert(moe.experts, x)))
    torch.testing.assert_close(moe(x), want)


@pytest.mark.parametrize("E", [4, 16, 64])
def test_operations_do_not_grow_with_the_number_of_experts(E):
    """Two experts of three matrices a token, and of the router 2 D E."""
    moe, x = layer(lambda h: top_k(h, 2), n=E), rand(1, 40, D)
    with FlopCounterMode(display=False) as counter:
        moe(x)
    assert counter.get_total_flops() == 40 * (2 * 2 * 3 * D * F + 2 * D * E)


def test_stacked_layers_have_the_right_gradients():
    """Two mixtures, one on the other's output (Eigen et al. 2013, arXiv:1312.4314); and one that chooses."""
    for select in (SELECT["all"], SELECT["top-2"]):
        net = torch.nn.Sequential(layer(select, dtype=torch.float64), layer(select, dtype=torch.float64))
        names = [name for name, _ in net.named_parameters()]
        values = [p.detach().clone().requires_grad_() for p in net.parameters()]
        x = rand(1, 3, D, dtype=torch.float64).requires_grad_()
        run = lambda x, *p: torch.func.functional_call(net, dict(zip(names, p)), (x,))
        assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


def test_the_correction_chooses_and_does_not_weigh():
    moe, x = layer(lambda h, bias: top_k(h, 1, normalise=False, bias=bias), correction=True), rand(1, 6, D)
    moe.correction[2] = 10.0
    moe(x).sum().backward()
    assert (moe.last.expert == 2).all() and moe.correction.grad is None
    for matrix in moe.experts.matrices():
        assert matrix.grad[[0, 1, 3]].abs().max() == 0 < matrix.grad[2].abs().max(), "idle experts learn nothing"
    torch.testing.assert_close(moe.last.gate, moe.router(x).softmax(-1)[0, :, 2])


@pytest.mark.parametrize("name", ["switch", "expert choice"])
def test_capacity_0_drops_everything(name):
    """The layer gives zeros, so that a block passes its input on."""
    select = {"switch": lambda h: top_k(h, 1, capacity=0), "expert choice": lambda h: routers.expert_choice(h, 0)}[name]
    moe = layer(select)
    x = rand(2, 5, D).requires_grad_()
    y = moe(x)
    assert torch.equal(y, torch.zeros_like(x)) and moe.last.load.tolist() == [0] * E
    assert moe.last.dropped == (name == "switch")
    y.sum().backward()


@pytest.mark.parametrize("k", [0, 5, -1])
def test_more_experts_a_token_than_there_are(k):
    with pytest.raises(ValueError, match=f"top_k = {k} experts a token, but there are 4"):
        top_k(rand(1, 3, E), k)


def test_bad_dials_are_refused():
    with pytest.raises(ValueError, match="capacity = -1"):
        top_k(rand(1, 3, E), 1, capacity=-1)
    with pytest.raises(ValueError, match="capacity = -2"):
        routers.expert_choice(rand(1, 3, E), -2)
    mixtral = preset("mixtral-8x7b")
    for change in (dict(top_k=9), dict(router_groups=3), dict(router_groups=4, top_k=3), dict(router_score="tanh")):
        with pytest.raises(ConfigError, match=f"{'top_k' if 'top_k' in change else next(iter(change))} = "):
            mixtral.with_(**change)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_tokens_are_placed_as_if_one_after_the_other(data):
    """Against a loop: first choices before second ones, in order or by score, while there is room."""
    draw = lambda *range_: data.draw(st.integers(*range_))
    G, N, E = draw(1, 3), draw(0, 9), draw(1, 6)
    k, capacity, by_score = draw(1, E), draw(0, 5), data.draw(st.booleans())
    logits = rand(G, N, E, seed=draw(0, 1000))
    got = top_k(logits, k, normalise=False, capacity=capacity, by_score=by_score)
    p, want = logits.softmax(-1), torch.zeros(G, N, E)
    asked = [0] * E
    for g in range(G):
        room = [capacity] * E
        order = sorted(range(N), key=lambda n: -float(p[g, n].max())) if by_score else range(N)
        for choice in range(k):
            for n in order:
                e = int(p[g, n].argsort(descending=True)[choice])
                asked[e] += 1
                if room[e]:
                    room[e] -= 1
                    want[g, n, e] = p[g, n, e]
    torch.testing.assert_close(got.matrix().view(G, N, E), want)
    assert got.asked.tolist() == asked and got.load.max() <= capacity * G
    assert got.dropped == pytest.approx(1 - len(got.token) / sum(asked) if N else 0)


@settings(deadline=None, max_examples=30)
@given(name=st.sampled_from(list(SELECT)), G=st.integers(1, 3), N=st.integers(1, 11), seed=st.integers(0, 99))
def test_what_holds_of_every_router(name, G, N, seed):
    r = SELECT[name](rand(G, N, E, seed=seed))
    assert isinstance(r, Routing) and r.scores.shape == (G * N, E)
    pairs = list(zip(r.token.tolist(), r.expert.tolist()))
    assert len(set(pairs)) == len(pairs), "no token goes to an expert twice"
    assert all(0 <= t < G * N and 0 <= e < E for t, e in pairs) and (r.gate > 0).all()
    assert (r.load <= r.asked).all() and 0 <= r.dropped <= 1
    sums = r.matrix().sum(-1)
    if name in ("all", "top-2", "sigmoid", "hash"):
        torch.testing.assert_close(sums, torch.full_like(sums, 2.5 if name == "sigmoid" else 1.0))
    if name in ("all", "top-1", "top-2", "sigmoid", "base", "hash"):
        assert r.dropped == 0
    else:
        room = 4 if name == "gshard" else 3
        assert r.load.max() <= room * G
    if name == "base":
        per_group = (r.token // N) * E + r.expert
        assert per_group.bincount().max() <= -(-N // E)
    if name == "expert choice":
        assert r.load.tolist() == [G * min(3, N)] * E


def test_dropped_tokens_fall_as_capacity_grows():
    """And a token that overflows is worth nothing: with room for all, none is."""
    h = rand(1, 256, 8) + torch.linspace(0, 2, 8)
    shares = [top_k(h, 1, capacity=routers.capacity_for(256, 8, 1, f)).dropped for f in (0.5, 1.0, 1.25, 2.0, 8.0)]
    assert shares == sorted(shares, reverse=True) and shares[0] >= 0.5 and shares[1] > 0.2 and shares[-1] == 0
    assert routers.capacity_for(256, 8, 1, 1.25) == 40 and routers.capacity_for(10, 4, 2, 1.0) == 5


def test_noisy_top_k_foretells_its_choice():
    """P(i in the top k) by the formula, against fresh noise for expert i while the others' stays."""
    k, draws = 2, 20_000
    clean, spread = rand(1, 5), rand(1, 5, seed=1).exp()
    noisy = clean + spread * rand(1, 5, seed=2)
    got = routers.chance_of_top_k(clean, noisy, spread, k)[0]
    for i in range(5):
        fresh = noisy.repeat(draws, 1)
        fresh[:, i] = clean[0, i] + spread[0, i] * rand(draws, seed=3 + i)
        share = (fresh.topk(k).indices == i).any(1).double().mean()
        assert abs(share - got[i]) < 4 * (0.25 / draws) ** 0.5
    assert (routers.chance_of_top_k(clean, noisy, spread, 5) == 1).all()


def test_noisy_top_k_and_its_losses():
    """Gates are the softmax over the chosen noisy logits; the expected load is near the load; losses are (σ/μ)²."""
    moe, x = layer(lambda h: routers.noisy_top_k(h, 2, torch.Generator().manual_seed(1)), outputs=2), rand(4, 200, D)
    moe(x)
    r, h = moe.last, moe.logits(x)
    clean, spread = h[..., :E], torch.log1p(h[..., E:].exp())
    noisy = (clean + spread * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))).flatten(0, 1)
    top = noisy.topk(2)
    want = torch.zeros_like(noisy).scatter(1, top.indices, top.values.softmax(-1))
    torch.testing.assert_close(r.matrix(), want)
    assert (r.chance.sum(0) - r.load).abs().max() < 0.1 * r.load.float().mean()
    ratio = lambda v: float(np.var(v.detach().numpy()) / np.mean(v.detach().numpy()) ** 2)
    assert routers.importance_loss(r).item() == pytest.approx(ratio(want.sum(0)), rel=1e-5)
    assert routers.load_loss(r).item() == pytest.approx(ratio(r.chance.sum(0)), rel=1e-5)
    routers.load_loss(r).backward()
    assert (moe.router.weight.grad.abs().sum(1) > 0).all(), "the load loss reaches h and the size of the noise"
    quiet = routers.noisy_top_k(h, 2, training=False)
    torch.testing.assert_close(quiet.matrix(), top_k(clean, 2).matrix())


def test_gshard_draws_its_second_expert():
    """It is kept with chance min(1, 2 g₂): measured on tokens that are all alike."""
    h = torch.tensor([2.0, 0.0, -1.0, -1.0]).expand(1, 4000, E)
    r = routers.gshard(h, rng=torch.Generator().manual_seed(0))
    g2 = 1 / (1 + math.exp(2))
    assert r.load[0] == 4000 and r.load[1] == pytest.approx(4000 * 2 * g2, rel=0.06) and r.dropped == 0
    assert float(r.gate[r.expert == 1][0]) == pytest.approx(g2, rel=1e-5)
    torch.testing.assert_close(routers.gshard(h[:, :9]).matrix(), top_k(h[:, :9], 2).matrix())


def test_expert_choice_takes_the_best_tokens():
    h = rand(2, 9, E)
    r, p = routers.expert_choice(h, 3), h.softmax(-1)
    for g in range(2):
        for e in range(E):
            of = r.token[(r.expert == e) & (r.token // 9 == g)] - 9 * g
            assert set(of.tolist()) == set(p[g, :, e].argsort(descending=True)[:3].tolist())
    assert routers.expert_choice(h, 20).load.tolist() == [18] * E


def test_base_finds_the_best_even_assignment():
    """The optimum of the transport problem by linear programming, and in use, each token's own best."""
    h = rand(1, 12, E)
    r = routers.base(h)
    rows = np.kron(np.eye(12), np.ones(E)), np.kron(np.ones(12), np.eye(E))
    best = linprog(-h.numpy().ravel(), A_eq=np.vstack(rows), b_eq=[1] * 12 + [3] * E)
    assert r.load.tolist() == [3] * E and float(h[0, r.token, r.expert].sum()) == pytest.approx(-best.fun, rel=1e-5)
    torch.testing.assert_close(r.gate, h[0, r.token, r.expert].sigmoid())
    greedy = routers.base(h, training=False)
    assert torch.equal(greedy.expert, h[0].argmax(-1))


def test_a_balanced_hash_is_more_even_than_a_random_one():
    """On words as frequent as Zipf's law has them; the same word always goes to the same expert."""
    counts = 1e6 / torch.arange(1, 2001).float()
    balanced, spread = routers.balanced_table(counts, 16), torch.randint(16, (2000,))
    load = lambda table: torch.zeros(16).index_add(0, table, counts)
    even = routers.cv_squared(load(balanced)) ** 0.5
    assert even < 0.3 < 0.5 < routers.cv_squared(load(spread)) ** 0.5, (
        "the most frequent word alone is 12 %, an even share 6 %"
    )
    assert load(balanced).sort().values[:-2].diff().max() < 2e-3 * load(balanced).mean(), (
        "all but the experts of two words are level"
    )
    ids = torch.tensor([[3, 5, 3]])
    for seed in (0, 1):
        assert routers.hashed(rand(1, 3, 16, seed=seed), ids, balanced).expert.tolist() == balanced[ids[0]].tolist()


def test_the_balance_loss_is_one_at_uniform_routing():
    """α exactly, for any α: f_i = P_i = 1/E. And E when one expert gets all."""
    even = routers.hashed(torch.zeros(1, 8, E), torch.arange(8)[None], TABLE)
    assert float(routers.balance_loss(even)) == 1.0
    one = top_k(torch.tensor([50.0, 0, 0, 0]).expand(1, 8, E), 1)
    assert float(routers.balance_loss(one)) == pytest.approx(E, rel=1e-5)
    r = top_k(rand(1, 30, E), 1, capacity=2)
    share = np.bincount(rand(1, 30, E)[0].argmax(-1), minlength=E) / 30
    want = E * (share * rand(1, 30, E)[0].softmax(-1).mean(0).numpy()).sum()
    assert float(routers.balance_loss(r)) == pytest.approx(want, rel=1e-5), "choices count before they are dropped"


@pytest.mark.parametrize("balance", [0.0, 0.05])
def test_the_load_becomes_even_in_training(balance):
    """CV of the load of a layer that learns to reproduce a function, with Switch's loss and without."""
    moe, x = layer(SELECT["top-1"]), rand(1, 256, D) + 1.0
    goal, cv = torch.sin(3 * x), []
    optimizer = torch.optim.Adam(moe.parameters(), 1e-2)
    for _ in range(150):
        loss = (moe(x) - goal).square().mean() + balance * routers.balance_loss(moe.last)
        cv.append(float(routers.cv_squared(moe.last.load.float()) ** 0.5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert cv[0] > 0.5 and (np.mean(cv[-20:]) < 0.2 if balance else np.mean(cv[-20:]) > 0.4)


def test_a_correction_makes_the_load_even_without_a_loss():
    """DeepSeek-V3's: fresh tokens in each step, scores skewed; max over mean load falls from over 3 to about 1."""
    skew, bias, rng = torch.linspace(-2, 2, 16), torch.zeros(16), torch.Generator().manual_seed(0)
    worst = []
    for _ in range(250):
        h = torch.randn(1, 2048, 16, generator=rng) + skew
        r = top_k(h, 4, score="sigmoid", bias=bias)
        worst.append(float(r.load.max() / r.load.float().mean()))
        routers.rebalance(bias, r.load, speed=5e-3)
    assert worst[0] > 2.5 and np.mean(worst[-50:]) < 1.15


def test_the_z_loss_shrinks_logits():
    h = rand(2, 5, E, dtype=torch.float64).mul(4)
    want = np.mean(np.log(np.exp(h.numpy()).sum(-1)) ** 2)
    assert float(routers.z_loss(h)) == pytest.approx(want)
    h.requires_grad_()
    for _ in range(200):
        (step,) = torch.autograd.grad(routers.z_loss(h), h)
        h.data -= step
    after = h.detach().logsumexp(-1)
    assert after.abs().max() < 0.1 * np.sqrt(want), "towards softmax sums of 1"


def test_soft_moe_mixes_tokens_into_slots_and_back():
    torch.manual_seed(0)
    soft, x = SoftMoE(Experts(3, D, F, "relu"), slots=2).double(), rand(2, 5, D, dtype=torch.float64)
    dispatch, combine = soft.weights(x)
    torch.testing.assert_close(dispatch.sum(1), torch.ones(2, 3, 2, dtype=torch.float64))
    torch.testing.assert_close(combine.sum((2, 3)), torch.ones(2, 5, dtype=torch.float64))
    for b in range(2):
        h = x[b] @ soft.phi.flatten(1)  # [5, 6]
        slots = h.softmax(0).T @ x[b]
        y = torch.cat([every_expert(soft.experts, slots[2 * e : 2 * e + 2])[e] for e in range(3)])
        torch.testing.assert_close(soft(x)[b], h.softmax(1) @ y)
    assert torch.autograd.gradcheck(soft, x.requires_grad_())


@pytest.mark.parametrize("T", [12, 10, 3, 1])
def test_lory_merges_matrices_by_the_segment_before(T):
    torch.manual_seed(0)
    lory, x = MergedMoE(Experts(3, D, F), segment=4).double(), rand(2, T, D, dtype=torch.float64)
    y = lory(x)
    for b in range(2):
        for start in range(0, T, 4):
            look = x[b, max(start - 4, 0) : max(start, 4)].mean(0)
            p = lory.router(look).softmax(-1)
            gate, up, down = (sum(p[e] * m[e] for e in range(3)) for m in lory.experts.matrices())
            part = x[b, start : start + 4]
            want = (torch.nn.functional.silu(part @ gate.T) * (part @ up.T)) @ down.T
            torch.testing.assert_close(y[b, start : start + 4], want)


def test_lory_is_causal_by_segment():
    """A token reaches itself and the next segment, and nothing before it; no gradient goes through the first mean."""
    torch.manual_seed(0)
    lory, x = MergedMoE(Experts(3, D, F), segment=4), rand(1, 12, D).requires_grad_()
    y = lory(x)
    reach = torch.stack(
        [torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0 for t in range(12)]
    )
    t, s = torch.arange(12)[:, None], torch.arange(12)[None]
    assert torch.equal(reach, (t == s) | (t // 4 - s // 4 == 1))


def test_experts_draw_their_weights_from_the_seed():
    """As spread as a dense layer's, what writes to the residual stream divided by √(2 L)."""
    config = preset("mixtral-8x7b").with_(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, vocab_size=50)
    one, same, other = (build(config, seed=s).blocks[1].ffn.experts for s in (0, 0, 1))
    assert torch.equal(one.up, same.up) and not torch.equal(one.up, other.up)
    assert float(one.up.std()) == pytest.approx(0.02, rel=0.05) and float(one.down.std()) == pytest.approx(
        0.01, rel=0.05
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_takes_no_expert_room(side):
    """Experts with room for 2 of a sequence's tokens: a sequence means the same alone and padded."""
    tiny = dict(d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, d_head=8, d_ff=24, vocab_size=50, n_experts=4)
    model = build(preset("mixtral-8x7b").with_(**tiny, d_expert=8, expert_capacity=2)).double()
    ids = torch.randint(0, 50, (1, 6), generator=torch.Generator().manual_seed(3))
    alone = model(ids)
    assert max(m.last.dropped for m in model.modules() if isinstance(m, MoE)) > 0.2
    some = torch.full((1, 5), 7)
    padded = torch.cat([some, ids] if side == "left" else [ids, some], 1)
    real = torch.cat([some < 0, ids >= 0] if side == "left" else [ids >= 0, some < 0], 1)
    torch.testing.assert_close(model(padded, real)[real], alone[0], rtol=1e-12, atol=1e-14)


def test_a_router_scores_in_single_precision_beside_weights_of_sixteen_bits():
    """Its logits are those of the rounded input and weights in double, to fp32's roundoff, and not to bf16's."""
    torch.manual_seed(0)
    moe = MoE(Experts(4, 64, 8), partial(top_k, k=2)).bfloat16()
    x = torch.randn(2, 5, 64).bfloat16()
    logits = moe.logits(x)
    exact = x.double() @ moe.router.weight.double().mT
    sizes = x.double().abs() @ moe.router.weight.double().abs().mT  # the error of a sum of n: at most n u of these
    assert logits.dtype == torch.float32
    assert ((logits - exact).abs() <= 64 * 2**-24 * sizes).all()
    moe(x)
    assert moe.last.scores.dtype == torch.float32
