"""The CPU engines' attention against torch's sdpa: values, gradients, masks, and what goes to sdpa itself."""

import pytest
import torch
import torch.nn.functional as F

from verl_fl.engine import attention

ROWS, HEADS, GROUPS, LENGTH, DIM = 3, 6, 2, 7, 8


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    shapes = (ROWS, HEADS, LENGTH, DIM), (ROWS, GROUPS, LENGTH, DIM), (ROWS, GROUPS, LENGTH, DIM)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def reference(query, key, value, mask, causal):
    repeated = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query, *repeated, attn_mask=mask, is_causal=causal and mask is None, scale=0.3
    )


@pytest.mark.parametrize("kind", ["causal", "bool", "additive", "none"])
def test_values_and_gradients_are_sdpas(tensors, kind):
    mask, causal = None, kind == "causal"
    if kind in ("bool", "additive"):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(ROWS, 1, -1, -1).clone()
        mask[1, :, :, 4:] = False
        mask = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    got = attention.folded(*tensors, mask, 0.3, causal)
    expected = reference(*tensors, mask, causal)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(got.square().sum(), tensors)
    for ours, theirs in zip(grads, torch.autograd.grad(expected.square().sum(), tensors), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_fully_masked_row_is_finite_forward_and_backward(tensors):
    mask = torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool)
    out = attention.folded(*tensors, mask, 0.3, True)
    grads = torch.autograd.grad(out.sum(), tensors)
    assert torch.isfinite(out).all() and all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize(("limit", "handed_over"), [(LENGTH, False), (LENGTH - 1, True)])
def test_rows_above_the_limit_go_to_sdpa(monkeypatch, tensors, limit, handed_over):
    calls = []
    monkeypatch.setattr(attention, "SHORT", limit)
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *a, **k: calls.append(1) or (torch.zeros(1), None))
    attention.attention(torch.nn.Module(), *tensors, None, scaling=0.3)
    assert bool(calls) is handed_over
