"""What the four stages have in common: their parts, and the verbs the engine calls on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.engine.flats import Flat
from rayzero.engine.options import ZeroOptions
from rayzero.engine.wire import Wire
from rayzero.records import Where


@dataclass(slots=True)
class Called:
    """What the forwards of a unit's module told: do gradients come to it, and go on from it?"""

    is_reached: bool = False
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What a stage is made of: all flats, those with gradients, and the door to collectives."""

    module: nn.Module
    flats: Sequence[Flat]
    trained: Sequence[Flat]
    comm: Communicator
    zero: ZeroOptions
    units: Sequence[str]
    device: torch.device
    called: dict[str, Called]
    """Units whose modules have run, which stage 3 notes."""
    in_backward: Callable[[], bool]
    hand_out: Callable[[Flat], None]
    """Begin the reduction of a flat's gradients of this backward."""
    is_away: Callable[[Flat], bool]
    """Whether a flat's optimizer states, and with them its gradient shard, are offloaded."""

    @property
    def data_axis(self) -> str:
        """The axis that gradients are first reduced over."""
        return data_axis(self.zero.stage, self.comm)

    def wire(self, op: str, buffered: Callable[[Flat], bool]) -> Wire:
        """Make the wire for reductions by "all_reduce" or "reduce_scatter" over the data ranks."""
        return Wire(
            self.trained,
            self.comm,
            axis=self.data_axis,
            op=op,
            buffered=buffered,
            overlap=self.zero.overlap,
            device=self.device,
        )


def data_axis(stage: int, comm: Communicator) -> str:
    """Stage 0 shards nothing: to it, replicas and shards are one axis of data ranks."""
    return "data" if stage == 0 and comm.size("replicate") > 1 else "shard"


def average_over_replicas(parts: StageParts, gradient: Callable[[Flat], torch.Tensor]) -> None:
    """Average shards of gradients over the groups that hold the same shards (hybrid sharding).

    Once per step, after the micro-batches' reductions inside the groups: 2 (R-1)/R Psi/N elements.
    """
    handles = [
        parts.comm.start_all_reduce(
            gradient(flat), axis="replicate", unit=flat.layout.name, mean=True
        )
        for flat in parts.trained
    ]
    for handle in handles:
        handle.wait()


def all_gather_updated(parts: StageParts) -> None:
    """Fill each trained flat that stays whole with the shards that other ranks have updated."""
    handles = [
        parts.comm.all_gather(flat.whole, axis="shard", unit=flat.layout.name)
        for flat in parts.trained
        if not flat.sharded
    ]
    for handle in handles:
        handle.wait()


class Stage(Protocol):
    """One ZeRO stage. The engine calls these verbs in this order; siblings keep it too."""

    def part(self, flat: Flat) -> torch.Tensor:
        """Return what this rank's optimizer updates of a flat."""

    def start_forward(self) -> None:
        """Prepare for the module's forward."""

    def end_forward(self) -> None:
        """Leave nothing of the forward behind but what its backward needs."""

    def start_backward(self) -> None:
        """Prepare for a backward."""

    def collect(self, flat: Flat, *, last: bool) -> None:
        """Take a flat's final gradients of one backward; send them on where the stage does so."""

    def end_backward(self) -> None:
        """Leave nothing of the backward behind but gradients."""

    def finish(self) -> None:
        """Wait until every gradient of the window is reduced."""

    def gradient(self, flat: Flat) -> torch.Tensor:
        """Return the window's reduced gradient, as long as `part`."""

    def publish(self) -> None:
        """Bring updated parameters to where the next forward reads them."""

    def clear(self) -> None:
        """Begin a new window."""

    def gathered(self, flats: Sequence[Flat]) -> None:
        """Make these flats whole until `release`."""

    def release(self, flats: Sequence[Flat]) -> None:
        """End what `gathered` began."""

    def gradient_tensors(self) -> list[tuple[Flat, Where, torch.Tensor]]:
        """List the gradient buffers held, with their place."""

    def bucket_tensors(self) -> list[torch.Tensor]:
        """List the buffers held for transfers."""

    def close(self) -> None:
        """Take hooks off."""
