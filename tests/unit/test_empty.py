"""Case empty-answer: responses [[], [5, 6]] and [[], []], through verl's own losses, advantages and metrics."""

import math

import numpy as np
import pytest
import torch

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ONE_EMPTY, ALL_EMPTY = [[0, 0], [1, 1]], [[0, 0], [0, 0]]


def make_batch(mask):
    from verl import DataProto
    from verl.trainer.ppo import core_algos

    mask = torch.tensor(mask)
    scores = torch.tensor([[-1.0, 0.0], [0.0, 1.0]])
    advantages, returns = core_algos.compute_gae_advantage_return(
        scores, torch.zeros(2, 2), mask.float(), torch.tensor(1.0), torch.tensor(0.95)
    )
    tensors = {
        "prompts": torch.ones(2, 3).long(),
        "responses": torch.ones(2, 2).long(),
        "response_mask": mask,
        "attention_mask": torch.ones(2, 5).long(),
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "rm_scores": scores,
        "advantages": advantages * mask,
        "returns": returns,
        "values": torch.zeros(2, 2),
        "prompt_length": torch.tensor([3.0, 3.0]),
        "response_length": torch.tensor([1.0, 2.0]),
    }
    return DataProto.from_dict(tensors=tensors)


@pytest.mark.parametrize("mask", [ONE_EMPTY, ALL_EMPTY])
def test_metrics_of_a_batch_with_empty_answers_are_finite(mask):
    from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_variance_proxy_metrics

    batch = make_batch(mask)
    metrics = compute_data_metrics(batch, use_critic=True) | compute_variance_proxy_metrics(batch, 0.5)
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
    assert metrics["critic/score/min"] == -1.0


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_no_token_is_zero_with_a_gradient_of_zeros(mode):
    from verl.trainer.ppo.core_algos import agg_loss

    losses = torch.ones(2, 2, requires_grad=True)
    loss = agg_loss(losses, torch.tensor(ALL_EMPTY), mode, batch_num_tokens=0, global_batch_size=2)
    loss.backward()
    assert loss.item() == 0.0
    assert losses.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_with_tokens_is_verls_own_bit_for_bit(mode):
    from verl.trainer.ppo.core_algos import agg_loss

    losses, mask = torch.rand(2, 2), torch.tensor(ONE_EMPTY)
    assert torch.equal(agg_loss(losses, mask, mode), agg_loss.__wrapped__(losses, mask, mode))


def test_grpo_keeps_the_score_of_an_empty_answer_in_the_groups_mean():
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    scores = torch.tensor([[-1.0, 0.0], [0.0, 1.0]])  # the first stands on the padding token of an empty answer
    advantages, _ = compute_grpo_outcome_advantage(
        scores, torch.tensor(ONE_EMPTY).float(), np.array(["u", "u"], dtype=object)
    )
    assert advantages[0].abs().tolist() == [0.0, 0.0]
    assert advantages[1].tolist() == pytest.approx([0.7071, 0.7071], abs=1e-4)
