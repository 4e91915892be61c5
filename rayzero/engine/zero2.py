"""Stage 2: each rank also keeps only its shard of the gradients, reduced in each backward.

Per rank and step: hold P + (G + OS)/N, send (g + 1) Psi (N-1)/N for g backwards: one reduce-scatter
each and one all-gather of parameters (ZeRO, arXiv:1910.02054, sections 5.2 and 7.2.1).
"""

from collections.abc import Sequence

import torch

from rayzero.engine.flats import Flat
from rayzero.engine.gradients import ShardGradients
from rayzero.engine.stage import StageParts, all_gather_updated, average_over_replicas
from rayzero.records import Where


class Zero2:
    """Parameters whole on each rank, gradients and optimizer state sharded."""

    def __init__(self, parts: StageParts) -> None:
        self._parts = parts
        self._wire = parts.wire("reduce_scatter", lambda f: True)
        self._gradients = ShardGradients(parts.trained, self._wire, parts.is_away)

    def part(self, flat: Flat) -> torch.Tensor:
        """The own shard."""
        return flat.shard

    def start_forward(self) -> None:
        """Parameters are always whole."""

    def end_forward(self) -> None:
        """Parameters stay whole."""

    def start_backward(self) -> None:
        """Parameters are always whole."""

    def collect(self, flat: Flat, *, last: bool) -> None:
        """Reduce-scatter to the owners, whether or not another backward follows."""
        self._gradients.reduce(flat)

    def end_backward(self) -> None:
        """Nothing to free."""

    def finish(self) -> None:
        """Wait for the reduce-scatters, then average over replicas."""
        if self._gradients.finish():
            average_over_replicas(self._parts, self._gradients.gradient)

    def gradient(self, flat: Flat) -> torch.Tensor:
        """The own shard of the gradient."""
        return self._gradients.gradient(flat)

    def publish(self) -> None:
        """All-gather the updated shards into the whole flats."""
        all_gather_updated(self._parts)

    def clear(self) -> None:
        """Forget the gradients."""
        self._gradients.clear()

    def gathered(self, flats: Sequence[Flat]) -> None:
        """Parameters are always whole."""

    def release(self, flats: Sequence[Flat]) -> None:
        """Parameters stay whole."""

    def gradient_tensors(self) -> list[tuple[Flat, Where, torch.Tensor]]:
        """List the gradient buffers held, with their place."""
        return self._gradients.tensors()

    def bucket_tensors(self) -> list[torch.Tensor]:
        """List the buffers held for transfers."""
        return self._wire.tensors()

    def close(self) -> None:
        """There are no hooks."""
