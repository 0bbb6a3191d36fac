"""Gated units against their composition and transformers' LlamaMLP; SwiGLU's kernel, forward and backward."""

import pytest
import torch
from op_checks import SHAPES, check, check_backward, check_forward, randn, run, strided
from test_activations import REFERENCE as ACTIVATIONS

from llmstack.ops.glu import BACKWARDS, GATES, GLU_NP, GLU_NP_BACKWARD, GLU_TORCH, IMPLS, swiglu_triton

FAMILY = {"numpy": GLU_NP, "torch": GLU_TORCH}
swiglu = lambda gate, up: torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("impl", FAMILY)
@pytest.mark.parametrize("name", GATES)
def test_forward(name, impl):
    gate, up = randn(3, 5, 100), randn(3, 5, 100, seed=1)
    reference = lambda gate, up: ACTIVATIONS[GATES[name]](gate) * up
    check(run(FAMILY[impl][name], impl, gate, up), [reference(gate.double(), up.double())], [reference(gate, up)])


def test_names_are_the_papers():
    assert GATES == {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


@pytest.mark.parametrize("name", GATES)
def test_backward(name):
    gate, up, dy = randn(3, 5, 100), randn(3, 5, 100, seed=1), randn(3, 5, 100, seed=2)
    reference = lambda gate, up: ACTIVATIONS[GATES[name]](gate) * up
    check_backward(GLU_NP_BACKWARD[name], "numpy", reference, [gate, up], dy, gate, up)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_swiglu_forward(impl, shape):
    check_forward(IMPLS[impl], impl, swiglu, 4 * randn(*shape), randn(*shape, seed=1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", BACKWARDS)
def test_swiglu_backward(impl, shape):
    gate, up = 4 * randn(*shape), randn(*shape, seed=1)
    check_backward(BACKWARDS[impl], impl, swiglu, [gate, up], randn(*shape, seed=2), gate, up)


@pytest.mark.parametrize("impl", IMPLS)
def test_swiglu_ffn_equals_llamas(impl):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    mlp = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=64, num_attention_heads=4)).requires_grad_(False)
    x = randn(2, 7, 24)
    (inner,) = run(IMPLS[impl], impl, mlp.gate_proj(x), mlp.up_proj(x))
    torch.testing.assert_close(mlp.down_proj(inner), mlp(x), rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in mlp.parameters()) == 8 * 24**2  # at F = 8D/3, as two matrices of 4D have


@pytest.mark.skipif("triton" not in IMPLS, reason="Triton is not installed")
def test_strides_do_not_matter_and_shapes_must_agree():
    gate, up = randn(5, 30), randn(5, 30, seed=1)
    got = run(swiglu_triton, "triton", strided(gate), up.T.contiguous().T)[0]
    assert torch.equal(got, run(swiglu_triton, "triton", gate, up)[0])
    with pytest.raises(ValueError, match=r"up has the shape of gate: expected \[5, 30\], got \[30\]"):
        swiglu_triton(gate, up[0])
    with pytest.raises(ValueError, match="dy has the shape of gate"):
        BACKWARDS["triton"](gate[:1], gate, up)
