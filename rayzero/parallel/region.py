"""Where activations enter and leave a part of the model that is split over the tp ranks.

    whole x --enter--> split layers --leave--> whole y         forward    backward
                                                    enter:     nothing    all-reduce
                                                    leave:     all-reduce nothing

(f and g of Shoeybi et al., arXiv:1909.08053, section 3.) One enter and one leave around attention
and one pair around the feed-forward part make the four all-reduces of a layer.
"""

from typing import Any

import torch
from torch import Tensor

from rayzero.dist.comm import Communicator

AXIS = "tp"


def enter(x: Tensor, comm: Communicator, unit: str) -> Tensor:
    """Pass x on; sum its gradient over the tp ranks, each of which used it for its own part."""
    entered: Tensor = _Enter.apply(x, comm, unit)  # type: ignore[no-untyped-call]
    return entered


def leave(partial: Tensor, comm: Communicator, unit: str) -> Tensor:
    """Sum the tp ranks' partial results, in place; the gradient is whole on each rank already."""
    whole: Tensor = _Leave.apply(partial, comm, unit)  # type: ignore[no-untyped-call]
    return whole


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, unit: str) -> Tensor:
        ctx.comm, ctx.unit = comm, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # A copy: autograd may have handed the same tensor to other users of x.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        return ctx.comm.all_reduce(grad, axis=AXIS, unit=ctx.unit), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Communicator, unit: str) -> Tensor:
        ctx.mark_dirty(partial)
        return comm.all_reduce(partial, axis=AXIS, unit=unit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None
