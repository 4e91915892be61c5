"""Leaving the split region: which direction sums, and that nothing else is touched."""

import torch
from torch import Tensor

from rayzero.dist.comm import Communicator
from rayzero.parallel.region import leave
from tests.ranks import Pools, RankContext


def left_region(context: RankContext) -> tuple[Tensor, Tensor]:
    """Leave with another part on each rank; return the sum and the gradient."""
    comm = Communicator(context.mesh(tp=context.world))
    x = torch.tensor([1.0, 10.0], requires_grad=True)
    whole = leave(x * (context.rank + 1), comm, "x")
    (whole * whole).sum().backward()
    comm.close()
    return whole.detach(), x.grad


def test_leave_sums_the_values_and_passes_the_gradient(ranks: Pools) -> None:
    for rank, (whole, gradient) in enumerate(ranks(2)(left_region)):
        assert whole.tolist() == [3.0, 30.0]
        assert gradient.tolist() == [6.0 * (rank + 1), 60.0 * (rank + 1)]
