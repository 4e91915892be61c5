"""How activations lie on the tp ranks outside the split parts: whole, or each rank its tokens."""

from typing import Protocol

from torch import Tensor

from rayzero.dist.comm import Communicator
from rayzero.parallel import region
from rayzero.parallel.region import Coming


class Stream(Protocol):
    """The residual stream and what goes along with it. `unit` names the transfers."""

    @property
    def comm(self) -> Communicator:
        """The door to the other ranks."""

    def begin_whole(self, x: Tensor, unit: str) -> Coming:
        """Make whole what a split part reads."""

    def begin_sum(self, grad: Tensor, unit: str) -> Coming:
        """Sum the gradient of what was made whole, which may be overwritten: that of x."""

    def leave(self, partial: Tensor, unit: str) -> Tensor:
        """Sum what the ranks computed of a split part's result."""

    def own(self, whole: Tensor, unit: str) -> Tensor:
        """Bring something whole, such as positions, to where it is added to the stream."""

    def shared(self, parameters: tuple[Tensor, ...], unit: str) -> tuple[Tensor, ...]:
        """Use parameters that all ranks hold whole on what this rank has of the stream."""


class WholeStream:
    """Every rank has every token (Megatron's first form): all-reduces."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def begin_whole(self, x: Tensor, unit: str) -> Coming:
        """Change nothing."""
        return Coming(lambda: x)

    def begin_sum(self, grad: Tensor, unit: str) -> Coming:
        """Sum the values."""
        return region.begin_sum(grad.contiguous(), self.comm, unit)

    def leave(self, partial: Tensor, unit: str) -> Tensor:
        """Sum the values."""
        return region.leave(partial, self.comm, unit)

    def own(self, whole: Tensor, unit: str) -> Tensor:
        """Change nothing."""
        return whole

    def shared(self, parameters: tuple[Tensor, ...], unit: str) -> tuple[Tensor, ...]:
        """Change nothing: all ranks compute the same gradient."""
        return parameters


class SequenceStream:
    """Every rank has 1/t of the tokens (sequence parallelism): all-gathers and reduce-scatters."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def begin_whole(self, x: Tensor, unit: str) -> Coming:
        """Gather the tokens."""
        return region.begin_gather(x, self.comm, unit)

    def begin_sum(self, grad: Tensor, unit: str) -> Coming:
        """Sum, and keep the own tokens'."""
        return region.begin_scatter(grad, self.comm, unit)

    def leave(self, partial: Tensor, unit: str) -> Tensor:
        """Sum, and keep the own tokens."""
        return region.scatter(partial, self.comm, unit)

    def own(self, whole: Tensor, unit: str) -> Tensor:
        """Keep the own tokens."""
        return region.split(whole, self.comm, unit)

    def shared(self, parameters: tuple[Tensor, ...], unit: str) -> tuple[Tensor, ...]:
        """Sum the gradients, to which each rank's tokens give a part."""
        return region.enter_together(parameters, self.comm, unit)
