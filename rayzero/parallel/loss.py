"""Cross-entropy over logits whose vocabulary is split over the tp ranks.

The whole logits exist nowhere: two small all-reduces (the maximum; then the sum of exponentials,
the target's logit and, with label smoothing, the sum of logits) stand for them. N tokens of the
batch, V this rank's vocabulary. The last ranks' V may end in padding, which counts nowhere.

    smoothed loss = log sum exp(logits) - (1 - e) logit of target - e mean(logits)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.dist.comm import Communicator
from rayzero.parallel.layers import local_index
from rayzero.parallel.region import AXIS

IGNORED = -100
"""A target of this value counts nowhere, as in torch's cross_entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What this rank has of the vocabulary: columns of logits, of which the first are real."""

    comm: Communicator
    unit: str
    size: int
    smoothing: float

    @property
    def num_columns(self) -> int:
        """Columns of a rank's logits, padding included."""
        return -(-self.size // self.comm.size(AXIS))

    @property
    def first(self) -> int:
        """The token of this rank's first column."""
        return self.comm.rank(AXIS) * self.num_columns

    @property
    def num_real(self) -> int:
        """Columns that stand for tokens."""
        return min(max(self.size - self.first, 0), self.num_columns)


class VocabCrossEntropy(nn.Module):
    """Mean over all tokens of -log softmax(whole logits)[target], in fp32 or better."""

    def __init__(
        self,
        comm: Communicator,
        unit: str,
        *,
        vocab_size: int,
        label_smoothing: float = 0.0,
        eval_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self._comm = comm
        self._unit = unit
        self._vocab_size = vocab_size
        self.label_smoothing = label_smoothing
        self._eval_smoothing = eval_smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar that every rank of the tp group shares."""
        vocabulary = Vocabulary(
            comm=self._comm,
            unit=self._unit,
            size=self._vocab_size,
            smoothing=self.label_smoothing if self.training else self._eval_smoothing,
        )
        loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits.flatten(0, -2), targets.flatten(), vocabulary
        )
        return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, own: Vocabulary) -> Tensor:
        ctx.dtype, ctx.own = logits_NV.dtype, own
        exact_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        shifted_NV = exact_NV - _max_of(exact_NV[:, : own.num_real], own).unsqueeze(-1)
        local_N, is_elsewhere_N = local_index(targets_N, own.first, own.num_real)
        target_N = shifted_NV.gather(-1, local_N.unsqueeze(-1)).squeeze(-1)
        rows = [target_N.masked_fill(is_elsewhere_N, 0.0)]
        if own.smoothing:
            rows.append(shifted_NV[:, : own.num_real].sum(-1))
        exp_NV = shifted_NV.exp_()
        exp_NV[:, own.num_real :] = 0.0
        sums = torch.stack((exp_NV.sum(-1), *rows))
        sum_N, logit_N, *total_N = own.comm.all_reduce(sums, axis=AXIS, unit=f"{own.unit}.sum")
        counts_N = (targets_N != IGNORED).to(exact_NV.dtype)
        weight_N = counts_N / counts_N.sum()
        probability_NV = exp_NV.div_(sum_N.unsqueeze(-1))
        ctx.save_for_backward(probability_NV, local_N, is_elsewhere_N, weight_N)
        loss_N = sum_N.log() - (1.0 - own.smoothing) * logit_N
        for logits_N in total_N:
            loss_N = loss_N - own.smoothing / own.size * logits_N
        loss: Tensor = (loss_N * weight_N).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d loss / d logit = weight x (probability - e / vocabulary - (1 - e) at the target)."""
        probability_NV, local_N, is_elsewhere_N, weight_N = ctx.saved_tensors
        own: Vocabulary = ctx.own
        own_N = (own.smoothing - 1.0) * (~is_elsewhere_N).to(probability_NV.dtype)
        grad_NV = probability_NV.scatter_add(-1, local_N.unsqueeze(-1), own_N.unsqueeze(-1))
        if own.smoothing:
            grad_NV[:, : own.num_real] -= own.smoothing / own.size
        grad_NV *= (weight_N * grads[0]).unsqueeze(-1)
        return grad_NV.to(ctx.dtype), None, None


def _max_of(real_NV: Tensor, own: Vocabulary) -> Tensor:
    if real_NV.shape[-1]:
        max_N = real_NV.amax(-1)
    else:
        max_N = real_NV.new_full(real_NV.shape[:1], -torch.inf)
    return own.comm.all_reduce(max_N, axis=AXIS, unit=f"{own.unit}.max", op="max")
