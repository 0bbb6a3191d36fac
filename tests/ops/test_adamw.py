"""The fused step is torch.optim.AdamW's, in NumPy, torch and Triton."""

import numpy as np
import pytest
import torch

from llmstack.ops.adamw import IMPLS

SETTINGS = dict(lr=0.02, betas=(0.8, 0.95), eps=1e-6)


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("shape", [(0,), (1,), (7, 9), (1000,)], ids=str)
def test_five_steps_are_torchs(name, shape):
    draw = torch.Generator().manual_seed(0)
    peer, grads = torch.randn(shape, generator=draw), torch.randn(5, *shape, generator=draw)
    w, m, v = peer.clone(), torch.zeros(shape), torch.zeros(shape)
    optimizer = torch.optim.AdamW([peer], weight_decay=0.1, **SETTINGS)
    for t, g in enumerate(grads, 1):
        peer.grad = g
        optimizer.step()
        given = [x.numpy() for x in (w, g, m, v)] if name == "numpy" else (w, g, m, v)
        w, m, v = map(torch.as_tensor, IMPLS[name](*given, t, decay=0.1, **SETTINGS))
    torch.testing.assert_close(w, peer, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", IMPLS)
def test_the_first_step_is_the_sign_of_the_gradient(name):
    g = np.array([1e-2, -5, 200, -0.1, 7], np.float32)
    given = [np.zeros(5, np.float32), g, np.zeros(5, np.float32), np.zeros(5, np.float32)]
    given = given if name == "numpy" else list(map(torch.tensor, given))
    np.testing.assert_allclose(IMPLS[name](*given, 1, 0.1)[0], -0.1 * np.sign(g), rtol=1e-5)


@pytest.mark.skipif("triton" not in IMPLS, reason="Triton is not installed")
def test_the_kernel_refuses_other_layouts():
    a, b = torch.zeros(4, 3), torch.zeros(3, 4).T
    with pytest.raises(ValueError, match="m must be contiguous"):
        IMPLS["triton"](a, a.clone(), b, a.clone(), 1, 0.1)
