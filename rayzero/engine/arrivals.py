"""Decide when a flat's gradients are final, by counting, and hand flats out to be reduced.

[Note: counting]
A parameter's gradient is final when its hook has fired as often as in the last backward: once, also
when it is used several times; twice when two reentrant checkpoints use it; never when it takes no
part. What has not come by the end of backward is handed out then. A gradient that comes after its
flat went out is late: it stays on the parameter and is reduced before the step.

[Note: the same order on all ranks]
Counts may differ between ranks, where data chooses branches; the order of transfers must not. Where
backward reduces and does nothing else, flats are handed out in index order, and a rank whose
gradients come late is waited for. At stage 3 backward gathers too: a rank that waits for a peer's
reduction while that peer waits for its all-gather would wait for ever. There `hand_out` is called
where all ranks come by, at the end of a unit's last use, whatever has arrived.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.flats import Flat
from rayzero.errors import EngineError


class Arrivals:
    """Gradients of trained flats, counted from the first to the last of one backward."""

    def __init__(self, flats: Sequence[Flat], *, by_count: bool) -> None:
        self._flats = flats
        self._by_count = by_count
        self._positions = {flat.layout.index: i for i, flat in enumerate(flats)}
        self._ready: Callable[[Flat], None] = _nothing
        self._flat_of = [i for i, flat in enumerate(flats) for _ in flat.members]
        self._counts = [0] * len(self._flat_of)
        self._expected = [1] * len(self._flat_of)
        self._missing = [len(flat.members) for flat in flats]
        self._next = len(flats)
        self._handed_out = [True] * len(flats)
        self._open = False
        self.saw_outside_backward = False
        self._handles = self._register()

    def begin(self, *, ready: Callable[[Flat], None]) -> None:
        """Open a backward: ready(flat) reduces a flat's gradients."""
        self._ready = ready
        self._missing = [0] * len(self._flats)
        for flat, expected in zip(self._flat_of, self._expected, strict=True):
            self._missing[flat] += expected > 0
        self._counts = [0] * len(self._counts)
        self._next = 0
        self._handed_out = [False] * len(self._flats)
        self._open = True

    def hand_out(self, flat: Flat) -> None:
        """Hand a flat out, once in a backward. See [Note: the same order on all ranks]."""
        position = self._positions.get(flat.layout.index)
        if position is not None and not self._handed_out[position]:
            self._handed_out[position] = True
            self._ready(flat)

    def end(self) -> None:
        """Hand out what is left and remember how often each gradient came."""
        self._open = False
        for flat in self._flats:
            self.hand_out(flat)
        self._expected = self._counts

    def close_backward(self) -> None:
        """Close the backward, also one that raised."""
        self._open = False
        self._handed_out = [True] * len(self._flats)

    def late_flats(self) -> list[Flat]:
        """List flats with gradients that came after the flat was handed out."""
        return [f for f in self._flats if any(m.parameter.grad is not None for m in f.members)]

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
        if self._by_count and not self._missing[flat]:
            self._hand_out_in_order()

    def _hand_out_in_order(self) -> None:
        while self._next < len(self._flats) and not self._missing[self._next]:
            self.hand_out(self._flats[self._next])
            self._next += 1


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


def check_memory(flats: Sequence[Flat]) -> None:
    """Raise EngineError for a parameter that was given other memory than the engine updates."""
    for flat in flats:
        for member, _ in flat.moved():
            raise EngineError(
                f"parameter {member.name!r} was given other memory (by `parameter.data = ...`, "
                "module.to(...), module.half() or the like), which the engine does not update; "
                "write into it in place, as with parameter.copy_(...) under torch.no_grad(), or "
                "convert the module before the engine is built"
            )


def check_known(module: nn.Module, flats: Sequence[Flat]) -> None:
    """Raise EngineError for a parameter that the module got after the engine was built."""
    known = {id(member.parameter) for flat in flats for member in flat.members}
    for name, parameter in module.named_parameters():
        if id(parameter) not in known:
            raise EngineError(
                f"parameter {name!r} was added or replaced after the engine was built; build a "
                "new engine after changing the module"
            )
