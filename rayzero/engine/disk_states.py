"""Optimizer states of flats on disk: staged in, stepped on, staged out, with two sets of buffers.

While one flat is updated the next one's states are read and the last one's written; one worker does
both in order, so a set is free again before it is filled.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rayzero.engine.flats import to_host
from rayzero.engine.shelf import AnyShelf
from rayzero.records import Kind

MASTER = "master"


@dataclass(slots=True)
class DiskFlat:
    """One flat's target parameter, empty between uses, and the optimizer's state for it.

    shared_master: the file of the parameters, where they are what the optimizer updates.
    """

    index: int
    target: nn.Parameter
    elements: int
    state: dict[str, Any]
    moments: Sequence[str]
    shared_master: str | None
    has_moments: bool = False

    def files(self) -> list[str]:
        """Names of the files that are its own: the master and each moment."""
        shared = self.shared_master is not None
        return [self.file(key) for key in (MASTER, *self.moments) if key != MASTER or not shared]

    def file(self, key: str) -> str:
        """Name the file of the master or of one moment."""
        if key == MASTER and self.shared_master is not None:
            return self.shared_master
        return f"{self.index}.{key}"


@dataclass(slots=True)
class StagingSet:
    """Buffers for the master and each moment of one flat."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


class DiskStates:
    """The flats whose states are on disk."""

    def __init__(self, shelf: AnyShelf, flats: Sequence[DiskFlat]) -> None:
        self._shelf = shelf
        self._flats = flats
        self._longest = max((flat.elements for flat in flats), default=0)
        self._sets = [StagingSet(), StagingSet()]
        for flat in flats:
            for name in flat.files():
                shelf.reserve(name, flat.elements * flat.target.itemsize)

    def write_master(self, index: int, values: torch.Tensor) -> None:
        """Set a flat's master on disk."""
        flat = self._flats[self._place(index)]
        buffer = values.detach().to("cpu", flat.target.dtype).contiguous()
        self._shelf.write(flat.file(MASTER), buffer).result()

    def staged(self) -> Iterator[int]:
        """Yield each flat's index, its states in memory; changes to them go back to disk."""
        reads = [self._read(0)] if self._flats else []
        writes: list[Future[None]] = []
        for place, flat in enumerate(self._flats):
            if place + 1 < len(self._flats):
                reads.append(self._read(place + 1))
            for done in reads[place]:
                done.result()
            self._lend(place)
            yield flat.index
            writes += self._write(place)
        for done in writes:
            done.result()

    def buffers(self, index: int) -> dict[str, torch.Tensor]:
        """Return the buffers of a flat's master and of the moments it has."""
        place = self._place(index)
        return {key: self._buffer(place, key) for key in self._keys(place)}

    def bring(self, index: int) -> None:
        """Read a flat's states into its buffers."""
        for done in self._read(self._place(index)):
            done.result()

    def forget_moments(self) -> None:
        """Take the moments on disk for unwritten."""
        for flat in self._flats:
            flat.has_moments = False

    def tensors(self) -> list[torch.Tensor]:
        """List the staging buffers held."""
        return [tensor for one in self._sets for tensor in one.buffers.values()]

    def files(self) -> list[tuple[Kind, int, int]]:
        """List the files that hold values: kind, index of the flat, bytes of an element."""
        found = []
        for flat in self._flats:
            if flat.shared_master is None:
                found.append((Kind.MASTER, flat.index, flat.target.itemsize))
            if flat.has_moments:
                moment = (Kind.MOMENTS, flat.index, flat.target.itemsize)
                found += [moment] * len(flat.moments)
        return found

    def _buffer(self, place: int, key: str) -> torch.Tensor:
        flat, buffers = self._flats[place], self._sets[place % 2].buffers
        name = f"{key}.{flat.target.dtype}"
        if name not in buffers:
            buffers[name] = to_host(torch.zeros(self._longest, dtype=flat.target.dtype))
        return buffers[name][: flat.elements]

    def _read(self, place: int) -> "list[Future[None]]":
        file = self._flats[place].file
        return [self._shelf.read(file(key), self._buffer(place, key)) for key in self._keys(place)]

    def _place(self, index: int) -> int:
        return next(i for i, flat in enumerate(self._flats) if flat.index == index)

    def _keys(self, place: int) -> tuple[str, ...]:
        flat = self._flats[place]
        return (MASTER, *flat.moments) if flat.has_moments else (MASTER,)

    def _lend(self, place: int) -> None:
        flat = self._flats[place]
        flat.target.data = self._buffer(place, MASTER)
        if flat.has_moments:
            for key in flat.moments:
                flat.state[key] = self._buffer(place, key)

    def _write(self, place: int) -> "list[Future[None]]":
        flat = self._flats[place]
        writes = [self._shelf.write(flat.file(MASTER), flat.target.data)]
        flat.target.data = flat.target.data.new_empty(0)
        for key in flat.moments:
            if isinstance(flat.state.get(key), torch.Tensor):
                buffer = self._buffer(place, key)
                if not flat.has_moments:
                    buffer.copy_(flat.state[key])
                flat.state[key] = buffer.new_empty(0)
                writes.append(self._shelf.write(flat.file(key), buffer))
        flat.has_moments = flat.has_moments or len(writes) > 1
        return writes
