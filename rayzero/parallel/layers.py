"""Layers that hold one rank's block of a weight and end in a sum over the tp ranks.

B batch, T tokens, I and O a linear's inputs and outputs, D hidden, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from rayzero.dist.comm import Communicator
from rayzero.parallel.region import AXIS, leave


class RowLinear(nn.Module):
    """A linear whose inputs are split, as the column-cut layer before it leaves them.

    x_BTI = | x0 | x1 |    weight_OI = | w0 | w1 |    y_BTO = x0 w0' + x1 w1' + bias
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, comm: Communicator, unit: str
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self._comm = comm
        self._unit = unit

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Return the whole output. The bias is whole on every rank and added once, to the sum."""
        y_BTO = leave(F.linear(x_BTI, self.weight), self._comm, self._unit)
        return y_BTO if self.bias is None else y_BTO + self.bias


class VocabEmbedding(nn.Module):
    """An embedding whose rows are split: a rank looks up its own tokens and gives zeros for others.

    weight_VD = | rows of rank 0 |
                | rows of rank 1 |
    """

    def __init__(self, weight: nn.Parameter, comm: Communicator, unit: str) -> None:
        super().__init__()
        self.weight = weight
        self._comm = comm
        self._unit = unit

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the whole embeddings."""
        first = self._comm.rank(AXIS) * self.weight.shape[0]
        local_BT, is_elsewhere_BT = local_index(tokens_BT, first, self.weight.shape[0])
        rows_BTD = F.embedding(local_BT, self.weight)
        own_BTD = rows_BTD.masked_fill(is_elsewhere_BT.unsqueeze(-1), 0.0)
        return leave(own_BTD, self._comm, self._unit)


def local_index(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (place in rows first .. first + count, whether it is elsewhere); 0 where it is."""
    local = tokens - first
    is_elsewhere = (local < 0) | (local >= count)
    return local.masked_fill(is_elsewhere, 0), is_elsewhere
