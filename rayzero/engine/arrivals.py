"""Decide when a flat's gradients are final, by counting, and hand flats out in index order.

[Note: counting]
A parameter's gradient is final when its hook has fired as often as in the last backward: once, also
when it is used several times; twice when two reentrant checkpoints use it; never when it takes no
part. All ranks hand flats out in index order, so reductions meet even where gradients arrive in
different order. What has not come by the end of backward is handed out then. A gradient that comes
after its flat went out is late: it stays on the parameter and is reduced before the step.
"""

from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from rayzero.engine.flats import Flat
from rayzero.errors import EngineError


class Arrivals:
    """Gradients of trained flats, counted from the first to the last of one backward."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        self._flats = flats
        self._positions = {flat.layout.index: i for i, flat in enumerate(flats)}
        self._final: Callable[[Flat], None] = _nothing
        self._ready: Callable[[Flat], None] = _nothing
        self._flat_of = [i for i, flat in enumerate(flats) for _ in flat.members]
        self._counts = [0] * len(self._flat_of)
        self._expected = [1] * len(self._flat_of)
        self._missing = [len(flat.members) for flat in flats]
        self._next = len(flats)
        self._open = False
        self.saw_outside_backward = False
        self._handles = self._register()

    def begin(self, *, final: Callable[[Flat], None], ready: Callable[[Flat], None]) -> None:
        """Open a backward: final(flat) when its last gradient came, ready(flat) in index order."""
        self._final, self._ready = final, ready
        self._missing = [0] * len(self._flats)
        for flat, expected in zip(self._flat_of, self._expected, strict=True):
            self._missing[flat] += expected > 0
        self._counts = [0] * len(self._counts)
        self._next = 0
        self._open = True

    def end(self) -> None:
        """Hand out what is left and remember how often each gradient came."""
        self._open = False
        for flat in self._flats[self._next :]:
            self._ready(flat)
        self._expected = self._counts

    def close_backward(self) -> None:
        """Close the backward, also one that raised."""
        self._open = False
        self._next = len(self._flats)

    def late_flats(self) -> list[Flat]:
        """List flats with gradients that came after the flat was handed out."""
        return [f for f in self._flats if any(m.parameter.grad is not None for m in f.members)]

    def is_final(self, flat: Flat) -> bool:
        """Whether all expected gradients of a flat have come in this backward; frozen: always."""
        position = self._positions.get(flat.layout.index)
        return position is None or not self._missing[position]

    @property
    def is_open(self) -> bool:
        """Whether a backward is under way."""
        return self._open

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _register(self) -> list[RemovableHandle]:
        members = [m for flat in self._flats for m in flat.members]
        return [
            m.parameter.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]
            for i, m in enumerate(members)
        ]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def arrived(parameter: torch.Tensor) -> None:
            self._arrived(index)

        return arrived

    def _arrived(self, index: int) -> None:
        if not self._open:
            self.saw_outside_backward = True
            return
        count = self._counts[index] = self._counts[index] + 1
        if count != self._expected[index]:
            return
        flat = self._flat_of[index]
        self._missing[flat] -= 1
        if not self._missing[flat]:
            self._final(self._flats[flat])
            while self._next < len(self._flats) and not self._missing[self._next]:
                self._next += 1
                self._ready(self._flats[self._next - 1])


def _nothing(flat: Flat) -> None:
    """Stand in until the first backward."""


def check_trained_flags(flats: Sequence[Flat], trained: bool) -> None:
    """Raise EngineError for a parameter frozen or unfrozen after the engine was built."""
    for flat in flats:
        for member in flat.members:
            if member.parameter.requires_grad is not trained:
                was, now = ("trained", "frozen") if trained else ("frozen", "trained")
                raise EngineError(
                    f"parameter {member.name!r} was {was} when the engine was built and is {now} "
                    "now; build a new engine after changing requires_grad"
                )
