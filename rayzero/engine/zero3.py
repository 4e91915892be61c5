"""Stage 3: each rank also keeps only its shard of the parameters, gathered unit by unit for use.

Per rank and step: hold (P + G + OS)/N and the units in use, send 3 g Psi (N-1)/N for g backwards:
an all-gather before forward, one before backward, a reduce-scatter (ZeRO, arXiv:1910.02054,
sections 5.3 and 7.2.2).
"""

from collections.abc import Sequence

import torch

from rayzero.engine.flats import Flat
from rayzero.engine.gradients import ShardGradients
from rayzero.engine.options import ZeroOptions
from rayzero.engine.prefetch import Prefetcher
from rayzero.engine.stage import StageParts, all_gather_updated, average_over_replicas
from rayzero.engine.unit import Unit, build_units
from rayzero.engine.units import UnitHooks
from rayzero.records import Where


class Zero3:
    """Parameters, gradients and optimizer state sharded."""

    def __init__(self, parts: StageParts) -> None:
        self._parts = parts
        self._units = build_units(parts)
        self._unit_of = {f.layout.index: unit for unit in self._units for f in unit.flats}
        self._hooks = UnitHooks(
            parts.module,
            self._units,
            in_backward=parts.in_backward,
            used_up=self._used_up,
            called=parts.called,
            prefetcher=lambda: self._prefetcher(parts.zero),
        )
        self._wire = parts.wire("reduce_scatter", lambda f: True)
        self._gradients = ShardGradients(parts.trained, self._wire, parts.is_away)

    def part(self, flat: Flat) -> torch.Tensor:
        """The own shard."""
        return flat.shard

    def start_forward(self) -> None:
        """Forget what a forward that raised left behind."""
        self._hooks.start_forward()

    def end_forward(self) -> None:
        """Free what was gathered ahead in vain."""
        self._hooks.end_forward()

    def start_backward(self) -> None:
        """Gather ahead in the order of the backward before."""
        self._hooks.start_backward()

    def collect(self, flat: Flat, *, last: bool) -> None:
        """Reduce-scatter to the owners, whether or not another backward follows."""
        self._gradients.reduce(flat)

    def end_backward(self) -> None:
        """Free every unit."""
        self._hooks.end_backward()

    def finish(self) -> None:
        """Wait for the reduce-scatters, then average over replicas."""
        if self._gradients.finish():
            average_over_replicas(self._parts, self._gradients.gradient)

    def gradient(self, flat: Flat) -> torch.Tensor:
        """The own shard of the gradient."""
        return self._gradients.gradient(flat)

    def publish(self) -> None:
        """All-gather what stays whole; the next forward gathers the rest, so free it."""
        all_gather_updated(self._parts)
        self._hooks.end_backward()

    def clear(self) -> None:
        """Forget the gradients."""
        self._gradients.clear()

    def gathered(self, flats: Sequence[Flat]) -> None:
        """Unshard the units of these flats."""
        for unit in self._units_of(flats):
            unit.end_read_ahead()
            unit.unshard()
            unit.num_holders += 1

    def release(self, flats: Sequence[Flat]) -> None:
        """Shard them again; what was written to them has been dealt with."""
        for unit in self._units_of(flats):
            unit.take_written()
            unit.num_holders -= 1
            unit.reshard()

    def gradient_tensors(self) -> list[tuple[Flat, Where, torch.Tensor]]:
        """List the gradient buffers held, with their place."""
        return self._gradients.tensors()

    def bucket_tensors(self) -> list[torch.Tensor]:
        """List the buffers held for transfers."""
        return self._wire.tensors()

    def close(self) -> None:
        """Take the hooks off the modules."""
        self._hooks.close()

    def _units_of(self, flats: Sequence[Flat]) -> list[Unit]:
        units = [self._unit_of.get(flat.layout.index) for flat in flats]
        return list(dict.fromkeys(unit for unit in units if unit is not None))

    def _prefetcher(self, zero: ZeroOptions) -> Prefetcher:
        largest = max((unit.elements for unit in self._units), default=0)
        wanted = largest if zero.prefetch_elements is None else zero.prefetch_elements
        return Prefetcher(
            elements=wanted if zero.overlap else 0, max_live_elements=zero.max_live_elements
        )

    def _used_up(self, unit: Unit) -> None:
        for flat in unit.flats:
            self._parts.hand_out(flat)
