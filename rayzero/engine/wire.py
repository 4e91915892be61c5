"""What reductions under way need: send buffers, receive scratch, and at most two of each.

With overlap a reduction is waited for when the next but one begins, without it at once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rayzero.dist.comm import Communicator, Handle
from rayzero.dist.dtypes import BY_NAME
from rayzero.engine.flats import Flat


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSizes:
    """Elements of one slot by dtype name: the longest buffer and the most scratch."""

    buffer: dict[str, int] = field(default_factory=dict)
    scratch: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class WireSlot:
    """Buffers that one reduction uses from its start to its end."""

    buffer: dict[str, torch.Tensor]
    scratch: dict[str, torch.Tensor]


class Wire:
    """Reductions of one axis under way, oldest first."""

    def __init__(
        self,
        flats: Sequence[Flat],
        comm: Communicator,
        *,
        axis: str,
        op: str,
        buffered: Callable[[Flat], bool],
        overlap: bool,
        device: torch.device,
    ) -> None:
        self._comm = comm
        self._axis = axis
        self._op = op
        self._device = device
        self._sizes = _sizes(flats, comm, axis=axis, op=op, buffered=buffered)
        self._count = min(2 if overlap else 1, len(flats))
        self._slots: list[WireSlot] = []
        self._next = 0
        self._under_way: deque[tuple[Handle, Callable[[], None]]] = deque()

    def buffer(self, flat: Flat) -> torch.Tensor:
        """Return the send buffer of the reduction that starts next, cut to the flat's length."""
        self._make_room()
        return self._slot().buffer[flat.dtypes.reduce][: flat.layout.padded]

    def reduce(
        self,
        flat: Flat,
        buffer: torch.Tensor,
        then: Callable[[], None],
        *,
        out: torch.Tensor | None = None,
    ) -> None:
        """Start reducing buffer in place, or to out; `then` runs when the result has come."""
        self._make_room()
        scratch = self._slot().scratch.get(flat.dtypes.reduce)
        needed = self._comm.scratch_elements(self._op, self._axis, buffer.numel())
        scratch = scratch[:needed] if scratch is not None else None
        if self._op == "all_reduce":
            handle = self._comm.start_all_reduce(
                buffer, axis=self._axis, unit=flat.layout.name, scratch=scratch, mean=True
            )
        else:
            handle = self._comm.reduce_scatter(
                buffer, axis=self._axis, unit=flat.layout.name, out=out, scratch=scratch, mean=True
            )
        self._next += 1
        self._under_way.append((handle, then))
        if self._count == 1:
            self.drain()

    def drain(self) -> None:
        """Wait for everything under way."""
        while self._under_way:
            self._finish_oldest()

    def tensors(self) -> list[torch.Tensor]:
        """List the buffers held."""
        return [t for s in self._slots for t in (*s.buffer.values(), *s.scratch.values())]

    def _make_room(self) -> None:
        while len(self._under_way) >= self._count:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        handle, then = self._under_way.popleft()
        handle.wait()
        then()

    def _slot(self) -> WireSlot:
        if not self._slots:
            self._slots = [self._allocate() for _ in range(self._count)]
        return self._slots[self._next % self._count]

    def _allocate(self) -> WireSlot:
        def make(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
            return {
                name: torch.zeros(n, dtype=BY_NAME[name], device=self._device)
                for name, n in sizes.items()
            }

        return WireSlot(buffer=make(self._sizes.buffer), scratch=make(self._sizes.scratch))


def _sizes(
    flats: Sequence[Flat],
    comm: Communicator,
    *,
    axis: str,
    op: str,
    buffered: Callable[[Flat], bool],
) -> WireSizes:
    sizes = WireSizes()
    for flat in flats:
        name, padded = flat.dtypes.reduce, flat.layout.padded
        if buffered(flat):
            sizes.buffer[name] = max(sizes.buffer.get(name, 0), padded)
        scratch = comm.scratch_elements(op, axis, padded)
        sizes.scratch[name] = max(sizes.scratch.get(name, 0), scratch)
    return sizes
