"""The engine: every op's gradient is torch's and a finite difference's, a graph is the eager program, fused or not."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from llmstack.execution.autograd import OPS, Graph, Tensor, apply, trace

MASK = np.tri(5, dtype=bool)
PEERS = {  # op: settings, the same in torch, shapes of the inputs
    "add": ({}, torch.add, (4, 5), (5,)),
    "sub": ({}, torch.sub, (4, 1), (1, 5)),
    "mul": ({}, torch.mul, (3, 4, 5), (4, 1)),
    "div": ({}, torch.div, (4, 5), (4, 5)),
    "power": (dict(n=3), lambda a: a**3, (4, 5)),
    "exp": ({}, torch.exp, (4, 5)),
    "log": ({}, torch.log, (4, 5)),
    "tanh": ({}, torch.tanh, (4, 5)),
    "relu": ({}, torch.relu, (4, 5)),
    "gelu": ({}, F.gelu, (4, 5)),
    "gelu_tanh": ({}, lambda a: F.gelu(a, approximate="tanh"), (4, 5)),
    "gelu_sigmoid": ({}, lambda a: a * torch.sigmoid(1.702 * a), (4, 5)),
    "silu": ({}, F.silu, (4, 5)),
    "matmul": ({}, torch.matmul, (2, 3, 4), (4, 5)),
    "sum": (dict(axis=1), lambda a: a.sum(1), (3, 4, 5)),
    "reshape": (dict(shape=(5, 4)), lambda a: a.reshape(5, 4), (4, 5)),
    "transpose": (dict(axes=(2, 0, 1)), lambda a: a.permute(2, 0, 1), (3, 4, 5)),
    "linear": ({}, F.linear, (2, 3, 4), (5, 4), (5,)),
    "embedding": ({}, F.embedding, "ids", (7, 4)),
    "layernorm": ({}, lambda x, g, b: F.layer_norm(x, (5,), g, b), (2, 3, 5), (5,), (5,)),
    "rmsnorm": ({}, lambda x, g: F.rms_norm(x, (5,), g, 1e-6), (2, 3, 5), (5,)),
    "softmax": ({}, lambda x: x.softmax(-1), (4, 5)),
    "attention": (
        dict(mask=MASK),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *[(2, 3, 5, 4)] * 3,
    ),
    "cross_entropy": ({}, lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()), (2, 6, 7), "ids"),
    "fused": (
        dict(graph=trace(lambda a, b: (a * b).exp() / b, np.ones((4, 5)), np.ones(5))),
        lambda a, b: torch.exp(a * b) / b,
        (4, 5),
        (5,),
    ),
}


def arrays(shapes):
    draw = np.random.default_rng(0)
    make = lambda s: draw.integers(0, 7, (2, 6)) if s == "ids" else draw.uniform(0.5, 1.5, s) * draw.choice([1, -1], s)
    return [make(s) for s in shapes]


def test_every_op_has_a_peer():
    assert set(OPS) == set(PEERS)


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_torchs_value_and_gradients(op):
    settings, peer, *shapes = PEERS[op]
    xs = arrays(shapes) if op != "log" else [np.abs(a) for a in arrays(shapes)]
    ours = [Tensor(x) for x in xs]
    theirs = [torch.tensor(x, requires_grad=x.dtype.kind == "f") for x in xs]
    y, expected = apply(op, *ours, **settings), peer(*theirs)
    np.testing.assert_allclose(y.data, expected.detach(), rtol=1e-10, atol=1e-12)
    dy = np.random.default_rng(1).normal(size=y.shape)
    y.backward(dy)
    expected.backward(torch.tensor(dy))
    for a, t in zip(ours, theirs):
        if t.requires_grad:
            np.testing.assert_allclose(a.grad, t.grad, rtol=1e-9, atol=1e-11)
        else:
            assert a.grad is None


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_the_gradients_of_finite_differences(op):
    """Along a random direction: (f(x + h d) − f(x − h d)) / 2h = gradient · d."""
    settings, _, *shapes = PEERS[op]
    xs = arrays(shapes) if op != "log" else [np.abs(a) for a in arrays(shapes)]
    draw = np.random.default_rng(2)
    way = [draw.normal(size=x.shape) * (x.dtype.kind == "f") for x in xs]
    weight = draw.normal(size=apply(op, *map(Tensor, xs), **settings).shape)
    moved = lambda h: [x + h * d if x.dtype.kind == "f" else x for x, d in zip(xs, way)]
    value = lambda h: (apply(op, *map(Tensor, moved(h)), **settings).data * weight).sum()
    ours = [Tensor(x) for x in xs]
    apply(op, *ours, **settings).backward(weight)
    slope = sum((t.grad * d).sum() for t, d in zip(ours, way) if t.grad is not None)
    assert slope == pytest.approx((value(1e-5) - value(-1e-5)) / 2e-5, rel=1e-6, abs=1e-7)


def program(x, w, b):
    """Elementwise chains, a value with two readers (h), broadcasting, a residual."""
    h = x @ w + b
    y = (h * 0.5).tanh() * 2.0 + h
    return ((y - 1.0) ** 2).mean()


@pytest.fixture
def given():
    return [np.random.default_rng(3).normal(size=s).astype(np.float32) for s in ((6, 4), (4, 5), (5,))]


def test_eager_and_graph_are_the_same_bits(given):
    eager = [Tensor(a) for a in given]
    loss = program(*eager)
    loss.backward()
    graph = trace(program, *[np.zeros_like(a) for a in given])  # traced on other values than it runs on
    for version in (graph, graph.fuse()):
        y, grads = version.gradients(*given)
        assert y == loss.data == version(*given) and y.dtype == np.float32
        for t, grad in zip(eager, grads):
            np.testing.assert_array_equal(t.grad, grad)


def test_fusing_leaves_fewer_values_and_nothing_else_to_fuse(given):
    graph = trace(program, *given)
    fused = graph.fuse()
    names = lambda g: [node.op for node in g.nodes.values()]
    assert names(graph) == ["matmul", "add", "mul", "tanh", "mul", "add", "sub", "power", "sum", "div"]
    assert names(fused) == ["matmul", "add", "fused", "sum", "div"]  # h has two readers: it stays
    assert names(fused.fuse()) == names(fused)
    assert len(fused.values(*given)) < len(graph.values(*given))


def test_the_gradients_of_a_program_are_torchs(given):
    theirs = [torch.tensor(a, requires_grad=True) for a in given]
    h = theirs[0] @ theirs[1] + theirs[2]
    (((h * 0.5).tanh() * 2 + h - 1) ** 2).mean().backward()
    for grad, t in zip(trace(program, *given).gradients(*given)[1], theirs):
        np.testing.assert_allclose(grad, t.grad, rtol=1e-5, atol=1e-6)


def test_a_value_read_twice_and_backward_called_twice_add_up():
    x = Tensor([3.0])
    y = x * x + x
    y.backward()
    assert x.grad == 7
    y.backward()
    assert x.grad == 14


def test_a_trace_freezes_what_python_decided():
    scale = {"by": 2.0}
    graph = trace(lambda x: x * scale["by"] if x.data.sum() > 0 else x * -1.0, np.ones(2))
    scale["by"] = 100.0
    np.testing.assert_array_equal(graph(np.array([-1.0, -1.0])), [-2, -2])


def test_wrong_use_is_refused_with_its_reason():
    with pytest.raises(ValueError, match="reshape a vector"):
        Tensor([1.0]) @ Tensor([1.0])
    with pytest.raises(AttributeError, match="no op 'sine'"):
        Tensor([1.0]).sine()
    with pytest.raises(ValueError, match="ops made"):
        trace(lambda x: x, np.ones(2))
    with pytest.raises(ValueError, match="zip"):
        trace(lambda x: x * 2.0, np.ones(2))(np.ones(2), np.ones(2))
    assert isinstance(trace(lambda x: 3.0 - np.ones(2) * x, np.ones(2)), Graph)


def test_numbers_and_arrays_on_either_side():
    """A fraction beside whole numbers stays one, and what Python or NumPy hold on the left works as on the right."""
    assert (Tensor(2) * 0.5).data == 1.0 and (Tensor(np.float32(2)) * 0.5).data.dtype == np.float32
    two = Tensor(np.float32(2))
    quotient = 10.0 / two
    quotient.backward()
    assert quotient.data == 5.0 and two.grad == -2.5
    left, right = np.arange(6.0).reshape(2, 3), Tensor(np.arange(12.0).reshape(3, 4))
    product = (left @ right).sum()
    product.backward()
    assert (right.grad == left.T @ np.ones((2, 4))).all()


@pytest.mark.parametrize("n", [0, 1, 2])
def test_powers_at_zero(n):
    ours = Tensor(np.array([0.0, 2.0]))
    theirs = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    (ours**n).sum().backward()
    (theirs**n).sum().backward()
    assert (ours.grad == theirs.grad.numpy()).all()
