"""Stage 0: every rank holds everything; gradients are all-reduced. The reference for all others.

Per rank and step: hold P + G + OS, send 2 Psi (N-1)/N (ZeRO, arXiv:1910.02054, section 7.1).
"""

from collections.abc import Sequence

import torch

from rayzero.engine.flats import Flat
from rayzero.engine.gradients import FullGradients
from rayzero.engine.stage import StageParts
from rayzero.records import Where


class Replicated:
    """Parameters, gradients and optimizer state whole on each rank."""

    def __init__(self, parts: StageParts) -> None:
        self._wire = parts.wire("all_reduce", lambda f: f.dtypes.reduce != f.dtypes.accumulate)
        self._gradients = FullGradients(parts.trained, self._wire, lambda flat, buffer: buffer)

    def part(self, flat: Flat) -> torch.Tensor:
        """The whole flat."""
        return flat.whole

    def start_forward(self) -> None:
        """Parameters are always whole."""

    def end_forward(self) -> None:
        """Parameters stay whole."""

    def start_backward(self) -> None:
        """Parameters are always whole."""

    def collect(self, flat: Flat, *, last: bool) -> None:
        """Add to the local sum; all-reduce it after the last backward."""
        self._gradients.add(flat)
        if last:
            self._gradients.reduce(flat)

    def end_backward(self) -> None:
        """Nothing to free."""

    def finish(self) -> None:
        """Wait for the all-reduces."""
        self._gradients.finish()

    def gradient(self, flat: Flat) -> torch.Tensor:
        """The whole gradient."""
        return self._gradients.gradient(flat)

    def publish(self) -> None:
        """Each rank made the same update to all parameters."""

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
