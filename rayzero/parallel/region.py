"""Where activations enter and leave a part of the model that is split over the tp ranks.

    whole x --entry--> split layers --leave--> whole y         forward         backward
                                                    entry:     nothing         all-reduce
                                                    leave:     all-reduce      nothing

(f and g of Shoeybi et al., arXiv:1909.08053, section 3.) One entry and one leave around attention
and one pair around the feed-forward part make the four all-reduces of a layer. With sequence
parallelism each rank has its own tokens outside the split parts:

    tokens x --entry--> split layers --scatter--> tokens y     forward         backward
                                                    entry:     all-gather      reduce-scatter
                                                    scatter:   reduce-scatter  all-gather

(g and g-bar of Korthikanti et al., arXiv:2205.05198, section 4.2.2.) The same bytes, but that the
entry gathers once more in backward. Its transfers are begun here and waited for in entry.py.
B batch (any dims before the tokens), T tokens, D hidden; t tp ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.dist.comm import Communicator
from rayzero.errors import ConfigError

AXIS = "tp"


class Coming:
    """A tensor whose transfer has begun."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._tensor: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the tensor when it is here."""
        if self._finish is not None:
            self._tensor, self._finish = self._finish(), None
        assert self._tensor is not None
        return self._tensor


def begin_sum(partial: Tensor, comm: Communicator, unit: str) -> Coming:
    """Sum the tp ranks' partial results, in place."""
    handle = comm.start_all_reduce(partial, axis=AXIS, unit=unit)

    def finish() -> Tensor:
        handle.wait()
        return partial

    return Coming(finish)


def begin_gather(own_BTD: Tensor, comm: Communicator, unit: str) -> Coming:
    """Put the tokens of rank 0, those of rank 1, and so on, together along the dim before last."""
    ranks = comm.size(AXIS)
    parts_tBTD = own_BTD.new_empty(ranks, *own_BTD.shape)
    parts_tBTD[comm.rank(AXIS)].copy_(own_BTD)
    handle = comm.all_gather(parts_tBTD.view(-1), axis=AXIS, unit=unit)

    def finish() -> Tensor:
        handle.wait()
        *batch, tokens, hidden = own_BTD.shape
        return parts_tBTD.movedim(0, -3).reshape(*batch, ranks * tokens, hidden)

    return Coming(finish)


def begin_scatter(partial_BTD: Tensor, comm: Communicator, unit: str) -> Coming:
    """Sum the tp ranks' partial results, of which each rank gets its tokens."""
    parts_tBTD = _by_rank(partial_BTD, comm, unit).clone(memory_format=torch.contiguous_format)
    handle = comm.reduce_scatter(parts_tBTD.view(-1), axis=AXIS, unit=unit)

    def finish() -> Tensor:
        handle.wait()
        return parts_tBTD[comm.rank(AXIS)].clone()

    return Coming(finish)


def leave(partial: Tensor, comm: Communicator, unit: str) -> Tensor:
    """Sum the tp ranks' partial results, in place; the gradient is whole on each rank already."""
    whole: Tensor = _Leave.apply(partial, comm, unit)  # type: ignore[no-untyped-call]
    return whole


def enter_together(
    parameters: tuple[Tensor, ...], comm: Communicator, unit: str
) -> tuple[Tensor, ...]:
    """Pass parameters on; sum the gradients of all of them in one all-reduce."""
    entered: tuple[Tensor, ...] = _EnterTogether.apply(  # type: ignore[no-untyped-call]
        comm, unit, *parameters
    )
    return entered


def sum_together(tensors: Sequence[Tensor], comm: Communicator, unit: str) -> list[Tensor]:
    """Sum several tensors over the tp ranks in one all-reduce; theirs stay as they are."""
    summed = torch.cat([tensor.flatten() for tensor in tensors])
    comm.all_reduce(summed, axis=AXIS, unit=unit)
    parts = torch.split(summed, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def scatter(partial_BTD: Tensor, comm: Communicator, unit: str) -> Tensor:
    """Sum the tp ranks' partial results, of which each rank keeps its tokens."""
    own: Tensor = _Scatter.apply(partial_BTD, comm, unit)  # type: ignore[no-untyped-call]
    return own


def split(whole_BTD: Tensor, comm: Communicator, unit: str) -> Tensor:
    """Keep this rank's tokens of what all ranks hold; their gradients are gathered."""
    own: Tensor = _Split.apply(whole_BTD, comm, unit)  # type: ignore[no-untyped-call]
    return own


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Communicator, unit: str) -> Tensor:
        ctx.mark_dirty(partial)
        return comm.all_reduce(partial, axis=AXIS, unit=unit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


class _EnterTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, unit: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.unit = comm, unit
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *sum_together(grads, ctx.comm, ctx.unit))


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_BTD: Tensor, comm: Communicator, unit: str) -> Tensor:
        ctx.comm, ctx.unit = comm, unit
        return begin_scatter(partial_BTD, comm, unit).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return begin_gather(grads[0], ctx.comm, ctx.unit).wait(), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole_BTD: Tensor, comm: Communicator, unit: str) -> Tensor:
        ctx.comm, ctx.unit = comm, unit
        return _by_rank(whole_BTD, comm, unit)[comm.rank(AXIS)].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return begin_gather(grads[0], ctx.comm, ctx.unit).wait(), None, None


def _by_rank(whole_BTD: Tensor, comm: Communicator, unit: str) -> Tensor:
    """View tokens as one block for each rank, in front: [t, ..., T/t, D]."""
    ranks, num_tokens = comm.size(AXIS), whole_BTD.shape[-2]
    if num_tokens % ranks:
        allowed = ", ".join(str(n) for n in range(1, num_tokens + 1) if num_tokens % n == 0)
        raise ConfigError(
            f"parallel.sequence=true: parallel.tp={ranks} does not divide the {num_tokens} tokens "
            f"that {unit} has; allowed for so many tokens: {allowed}"
        )
    *batch, _, hidden = whole_BTD.shape
    return whole_BTD.reshape(*batch, ranks, num_tokens // ranks, hidden).movedim(-3, 0)
