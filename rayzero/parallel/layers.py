"""Layers that hold one rank's block of a weight, or whole weights beside such layers.

B batch, T tokens, I and O a linear's inputs and outputs, D hidden, V vocabulary.
"""

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayzero.dist.comm import Communicator
from rayzero.parallel.entry import SharedEntry
from rayzero.parallel.region import AXIS, sum_together
from rayzero.parallel.stream import Stream


class Share(Protocol):
    """Return the parameters such that their gradients are summed over the ranks."""

    def __call__(self, parameters: tuple[Tensor, ...], *, unit: str) -> tuple[Tensor, ...]:
        """Name the transfer by its unit."""


class ColumnLinear(nn.Module):
    """A linear whose outputs are split; each rank has all of its inputs.

    x_BTI = | x |    weight_OI = | w0 |    y_BTO = | x w0' + b0 | x w1' + b1 |
                                 | w1 |
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, entry: SharedEntry) -> None:
        super().__init__()
        self.weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = weight.shape
        self._entry = entry
        entry.add(self)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Return this rank's outputs."""
        return self._entry.read(x_BTI, self)

    def rows(self, parameter: Tensor) -> Tensor:
        """Return the weight's or bias' rows that this rank computes with: all that it has."""
        return parameter

    def gradients(self, of_rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of the parameters whose rows have these."""
        return of_rows


class RowLinear(nn.Module):
    """A linear whose inputs are split, as the column-cut layer before it leaves them.

    x_BTI = | x0 | x1 |    weight_OI = | w0 | w1 |    y_BTO = x0 w0' + x1 w1' + bias
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, stream: Stream, unit: str
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self._stream = stream
        self._unit = unit

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Return the outputs. The bias is whole on every rank and added once, to the sum."""
        y_BTO = self._stream.leave(F.linear(x_BTI, self.weight), self._unit)
        if self.bias is None:
            return y_BTO
        (bias_O,) = self._stream.shared((self.bias,), f"{self._unit}.bias")
        return y_BTO + bias_O


class WholeHeads(nn.Module):
    """A column linear with fewer heads than ranks: whole on each, which computes the one it needs.

    4 ranks, 2 key heads:     rank 0: head 0    rank 1: head 0    rank 2: head 1    rank 3: head 1
    """

    def __init__(
        self, linear: nn.Linear, num_heads: int, entry: SharedEntry, comm: Communicator, unit: str
    ) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", linear.bias)
        self._size = self.weight.shape[0] // num_heads
        self._head = comm.rank(AXIS) * num_heads // comm.size(AXIS)
        self._comm = comm
        self._unit = unit
        self._entry = entry
        entry.add(self)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return this rank's head."""
        return self._entry.read(x_BTD, self)

    def rows(self, parameter: Tensor) -> Tensor:
        """Return the weight's or bias' rows that this rank computes with: its head's."""
        return parameter.narrow(0, self._head * self._size, self._size)

    def gradients(self, of_rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of the parameters whose rows have these: each rank gives a part."""
        wholes = [grad.new_zeros(self.weight.shape[0], *grad.shape[1:]) for grad in of_rows]
        for whole, grad in zip(wholes, of_rows, strict=True):
            self.rows(whole).copy_(grad)
        return sum_together(wholes, self._comm, self._unit)


class VocabEmbedding(nn.Module):
    """An embedding whose rows are split: a rank looks up its own tokens and gives zeros for others.

    weight_VD = | rows of rank 0 |
                | rows of rank 1 |
    """

    def __init__(
        self, weight: nn.Parameter, stream: Stream, unit: str, *, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self._padding_idx = padding_idx
        self._stream = stream
        self._unit = unit

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the embeddings."""
        first = self._stream.comm.rank(AXIS) * self.weight.shape[0]
        local_BT, is_elsewhere_BT = local_index(tokens_BT, first, self.weight.shape[0])
        rows_BTD = F.embedding(local_BT, self.weight)
        if self._padding_idx is not None:
            # As torch does: the token of padding has a row, and the row no gradient.
            is_padding_BT1 = (tokens_BT == self._padding_idx).unsqueeze(-1)
            rows_BTD = torch.where(is_padding_BT1, rows_BTD.detach(), rows_BTD)
        own_BTD = rows_BTD.masked_fill(is_elsewhere_BT.unsqueeze(-1), 0.0)
        return self._stream.leave(own_BTD, self._unit)


class SharedWeights(nn.Module):
    """A module, such as a norm, whose whole weights meet this rank's tokens or heads alone."""

    def __init__(self, inner: nn.Module, share: Share, unit: str) -> None:
        super().__init__()
        for key, parameter in inner.named_parameters():
            self.register_parameter(key, parameter)
        # In a tuple, as it is no child; without parameters, so that attributes can stand for them.
        shadow = copy.copy(inner)
        shadow._parameters = {k: p for k, p in inner._parameters.items() if p is None}
        self._inner = (shadow,)
        self._share = share
        self._unit = unit

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return what the module returns for its part."""
        named, (inner,) = dict(self.named_parameters()), self._inner
        shared = self._share(tuple(named.values()), unit=self._unit)
        try:
            vars(inner).update(zip(named, shared, strict=True))
            result: Tensor = inner.forward(x_BTD)
        finally:
            for key in named:
                vars(inner).pop(key, None)
        return result


def local_index(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (place in rows first .. first + count, whether it is elsewhere); 0 where it is."""
    local = tokens - first
    is_elsewhere = (local < 0) | (local >= count)
    return local.masked_fill(is_elsewhere, 0), is_elsewhere
