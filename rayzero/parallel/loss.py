"""Cross-entropy over logits whose vocabulary is split over the tp ranks.

The whole logits exist nowhere: two small all-reduces (the maximum; then the sum of exponentials
together with the target's logit) stand for them. N tokens of the batch, V this rank's vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rayzero.dist.comm import Communicator
from rayzero.parallel.layers import local_index
from rayzero.parallel.region import AXIS

IGNORED = -100
"""A target of this value counts nowhere, as in torch's cross_entropy."""


class VocabCrossEntropy(nn.Module):
    """Mean over all tokens of -log softmax(whole logits)[target], in fp32 or better."""

    def __init__(self, comm: Communicator, unit: str) -> None:
        super().__init__()
        self._comm = comm
        self._unit = unit

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar that every rank of the tp group shares."""
        loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits.flatten(0, -2), targets.flatten(), self._comm, self._unit
        )
        return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, comm: Communicator, unit: str
    ) -> Tensor:
        ctx.dtype = logits_NV.dtype
        exact_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        max_N = comm.all_reduce(exact_NV.amax(-1), axis=AXIS, unit=f"{unit}.max", op="max")
        shifted_NV = exact_NV - max_N.unsqueeze(-1)
        num_rows = logits_NV.shape[-1]
        local_N, is_elsewhere_N = local_index(targets_N, comm.rank(AXIS) * num_rows, num_rows)
        target_N = shifted_NV.gather(-1, local_N.unsqueeze(-1)).squeeze(-1)
        exp_NV = shifted_NV.exp_()
        sums_2N = torch.stack((exp_NV.sum(-1), target_N.masked_fill(is_elsewhere_N, 0.0)))
        sum_N, logit_N = comm.all_reduce(sums_2N, axis=AXIS, unit=f"{unit}.sum")
        counts_N = (targets_N != IGNORED).to(exact_NV.dtype)
        weight_N = counts_N / counts_N.sum()
        probability_NV = exp_NV.div_(sum_N.unsqueeze(-1))
        ctx.save_for_backward(probability_NV, local_N, is_elsewhere_N, weight_N)
        loss: Tensor = ((sum_N.log() - logit_N) * weight_N).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d loss / d logit = weight x (probability - 1 at the target)."""
        probability_NV, local_N, is_elsewhere_N, weight_N = ctx.saved_tensors
        own_N = torch.where(is_elsewhere_N, 0.0, -1.0).to(probability_NV.dtype)
        grad_NV = probability_NV.scatter_add(-1, local_N.unsqueeze(-1), own_N.unsqueeze(-1))
        grad_NV *= (weight_N * grads[0]).unsqueeze(-1)
        return grad_NV.to(ctx.dtype), None, None, None
