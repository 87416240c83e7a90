"""Log-probabilities and entropy against torch's own, values and gradients, across slices."""

import pytest
import torch

from verl_fl.engine import log_probs


@pytest.fixture(autouse=True)
def several_slices(monkeypatch):
    monkeypatch.setattr(log_probs, "_SLICE_ELEMENTS", 64)


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(3, 5, 31) * 4, torch.randint(31, (3, 5)), torch.randn(3, 5)


def check(ours, reference, logits, weight, tolerance=1e-5):
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got, expected = ours(a), reference(b)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, atol=tolerance, rtol=tolerance)


def test_token_log_probs_equal_log_softmax(data):
    logits, labels, weight = data
    reference = lambda x: torch.log_softmax(x, -1).gather(-1, labels[..., None]).squeeze(-1)  # noqa: E731
    check(lambda x: log_probs.token_log_probs(x, labels), reference, logits, weight)


def test_entropy_equals_minus_p_log_p(data):
    logits, _, weight = data
    reference = lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1)  # noqa: E731
    # log Z - sum(p * x) cancels where the entropy is small, so fp32 keeps fewer digits than -sum(p * log p)
    check(log_probs.token_entropy, reference, logits, weight, tolerance=5e-5)


def test_bfloat16_logits_give_fp32_log_probs(data):
    logits, labels, _ = data
    half = logits.bfloat16().requires_grad_()
    got = log_probs.token_log_probs(half, labels)
    exact = torch.log_softmax(half.detach().float(), -1).gather(-1, labels[..., None]).squeeze(-1)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-5)
    got.sum().backward()
    assert half.grad.dtype is torch.bfloat16


def test_a_masked_token_has_no_entropy_and_a_finite_gradient():
    logits = torch.tensor([[0.0, 1.0, float("-inf")]], requires_grad=True)
    entropy = log_probs.token_entropy(logits)
    torch.testing.assert_close(
        entropy, torch.distributions.Categorical(logits=torch.tensor([0.0, 1.0])).entropy()[None]
    )
    entropy.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_verl_uses_them_on_the_cpu(monkeypatch, fresh_platform, data):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    from verl.utils import torch_functional

    logits, labels, _ = data
    got = torch_functional.logprobs_from_logits(logits.bfloat16(), labels)
    assert got.dtype is torch.float32
    assert torch_functional.entropy_from_logits(logits.bfloat16()).dtype is torch.float32


def test_the_difference_of_log_probs_is_logged():
    from tensordict import TensorDict
    from verl import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    ours, theirs = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -2.0, 0.0]])
    mask = torch.tensor([[1, 1, 0]])
    batch = {"rollout_log_probs": ours, "old_log_probs": theirs, "response_mask": mask, "responses": mask}
    metrics = calculate_debug_metrics(DataProto(batch=TensorDict(batch, batch_size=1)))
    assert metrics["training/rollout_log_probs_diff/mean"] == 0.25
    assert metrics["training/rollout_log_probs_diff/max"] == 0.5
