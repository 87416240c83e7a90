"""Log-probabilities and entropy of tokens, in fp32 and a slice of rows at a time.

Shapes: N tokens, V vocabulary entries. The logits are read where they are; no [N, V] copy in fp32 is ever made, and the
backward pass makes one gradient of the logits' own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_SLICE_ELEMENTS = 1 << 19
"""Elements of one fp32 slice: 2 MiB, which stays in a core's cache between the passes over it."""


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``log_softmax(logits)`` at ``labels``, in fp32, differentiable.

    Args:
        logits: ``[..., V]``, any floating dtype.
        labels: ``[...]``, int64.

    Returns:
        ``[...]`` fp32.
    """
    flat = _TokenLogProbs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return flat.view(labels.shape)


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of ``softmax(logits)`` over the last dim in nats, in fp32, differentiable: ``[..., V] -> [...]``."""
    return _TokenEntropy.apply(logits.reshape(-1, logits.shape[-1])).view(logits.shape[:-1])


def _slices(logits_NV: torch.Tensor) -> Iterator[slice]:
    rows = max(1, _SLICE_ELEMENTS // logits_NV.shape[-1])
    for start in range(0, logits_NV.shape[0], rows):
        yield slice(start, start + rows)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        norm_N = logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32)
        for rows in _slices(logits_NV):
            norm_N[rows] = torch.logsumexp(logits_NV[rows].float(), dim=-1)
        ctx.save_for_backward(logits_NV, labels_N, norm_N)
        return logits_NV.gather(-1, labels_N[:, None]).squeeze(-1).float() - norm_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_NV, labels_N, norm_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for rows in _slices(logits_NV):
            # d logp[label] / d logit = onehot - softmax
            part = torch.sub(logits_NV[rows].float(), norm_N[rows, None]).exp_().mul_(-grad_N[rows, None])
            part.scatter_add_(-1, labels_N[rows, None], grad_N[rows, None].float())
            grad_NV[rows] = part
        return grad_NV, None


class _TokenEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor) -> torch.Tensor:
        norm_N = logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32)
        entropy_N = torch.empty_like(norm_N)
        for rows in _slices(logits_NV):
            logits = logits_NV[rows].float()
            norm_N[rows] = torch.logsumexp(logits, dim=-1)
            probs = torch.sub(logits, norm_N[rows, None]).exp_()
            # H = log Z - sum p * logit; a logit of -inf has p = 0 and adds nothing
            entropy_N[rows] = norm_N[rows] - probs.mul_(logits).nan_to_num_(nan=0.0).sum(-1)
        ctx.save_for_backward(logits_NV, norm_N, entropy_N)
        return entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> torch.Tensor:
        logits_NV, norm_N, entropy_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for rows in _slices(logits_NV):
            # dH / d logit = -p * (log p + H)
            log_p = torch.sub(logits_NV[rows].float(), norm_N[rows, None])
            part = log_p.exp() * (log_p + entropy_N[rows, None])
            grad_NV[rows] = part.nan_to_num_(nan=0.0).mul_(-grad_N[rows, None])
        return grad_NV
