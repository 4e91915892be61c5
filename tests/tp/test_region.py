"""Entering and leaving the split region: which direction sums, and that nothing else is touched."""

import torch
from torch import Tensor

from rayzero.dist.comm import Communicator
from rayzero.parallel.region import enter, leave
from tests.ranks import Pools, RankContext


def gradient_of_shared_input(context: RankContext) -> tuple[Tensor, Tensor]:
    """Use x both inside the split region and beside it; return value and gradient."""
    comm = Communicator(context.mesh(tp=context.world))
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    weights = torch.tensor([5.0, 7.0, 11.0])
    y = (enter(x, comm, "x") + x) * weights
    y.sum().backward()
    comm.close()
    return y.detach(), x.grad


def test_enter_sums_the_gradient_of_the_split_use_alone(ranks: Pools) -> None:
    """Autograd hands one tensor to both uses of x: summing it in place would count one twice."""
    for value, gradient in ranks(2)(gradient_of_shared_input):
        assert value.tolist() == [10.0, 28.0, 66.0]
        assert gradient.tolist() == [15.0, 21.0, 33.0]


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
