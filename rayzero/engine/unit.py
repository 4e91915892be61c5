"""A unit: the flats that stage 3 gathers together, and the state they are in."""

from collections.abc import Sequence
from enum import Enum

from rayzero.dist.comm import Communicator, Handle
from rayzero.engine.flats import Flat
from rayzero.engine.stage import StageParts
from rayzero.errors import EngineError


class UnitState(Enum):
    """Where a unit's values are.

    SHARDED: each rank has its shard, parameters refuse to be used (after `reshard`).
    GATHERING: the whole has bytes that are still coming (after `start_unshard`).
    WHOLE: parameters can be used (after `unshard`).
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


class Unit:
    """The flats that are gathered together."""

    def __init__(self, name: str, flats: Sequence[Flat], comm: Communicator) -> None:
        self.name = name
        self.flats = flats
        self.state = UnitState.SHARDED
        self.running = 0
        """Modules whose forward is under way."""
        self.open_uses = 0
        """Forward uses whose backward is not over."""
        self.ended_uses, self.expected_ends = 0, 1
        """Marked uses whose end this backward has seen, and those that the last one saw."""
        self.num_holders = 0
        """Blocks of engine.gathered that keep it whole."""
        self.backward_users: set[tuple[Unit, ...]] = set()
        """Uses whose backward is under way."""
        self._comm = comm
        self._handles: list[Handle] = []

    @property
    def elements(self) -> int:
        """Elements of the whole unit, padding included."""
        return sum(flat.layout.padded for flat in self.flats)

    def read_ahead(self) -> None:
        """Begin to read the own shard from disk; of flats that share a buffer, the first."""
        for flat in self.flats if self.state is UnitState.SHARDED else ():
            if flat.file is not None:
                flat.file.read_ahead()

    def end_read_ahead(self) -> None:
        """Leave the buffers to others; what was read for nothing is dropped."""
        for flat in self.flats:
            if flat.file is not None:
                flat.file.ahead.end()

    def start_unshard(self) -> None:
        """Begin the all-gather; a unit that is not sharded stays as it is."""
        if self.state is not UnitState.SHARDED:
            return
        for flat in self.flats:
            flat.allocate()
            # From a file the shard is in a buffer that the next flat needs.
            flat.own(flat.whole).copy_(flat.fetch(), non_blocking=flat.file is None)
            self._handles.append(
                self._comm.all_gather(flat.whole, axis="shard", unit=flat.layout.name)
            )
        self.state = UnitState.GATHERING

    def unshard(self) -> None:
        """Make the parameters usable."""
        self.start_unshard()
        if self.state is UnitState.GATHERING:
            for handle in self._handles:
                handle.wait()
            self._handles = []
            for flat in self.flats:
                flat.make_whole()
            self.state = UnitState.WHOLE

    def reshard(self) -> None:
        """Free the whole unless it is held; raise EngineError where it was written to."""
        for handle in self._handles:
            handle.wait()
        self._handles = []
        if self.state is UnitState.SHARDED or self.num_holders:
            return
        written = self.take_written() if self.state is UnitState.WHOLE else []
        for flat in self.flats:
            flat.free()
        self.state = UnitState.SHARDED
        if written:
            raise EngineError(
                f"parameter {written[0]!r} was written to while its unit ran; at stage 3 that is "
                "gone when the unit is sharded again. Make it a buffer, keep it whole with "
                "zero.persistence_elements, or write it between steps inside "
                "engine.gathered(module, writer_rank=0)"
            )

    def take_written(self) -> list[str]:
        """Name the parameters that were written in place since the last call."""
        return [name for flat in self.flats for name in flat.take_written()]


def build_units(parts: StageParts) -> list[Unit]:
    """Group the flats by unit, in the modules' order."""
    by_name: dict[str, list[Flat]] = {}
    for flat in parts.flats:
        if flat.sharded:
            by_name.setdefault(flat.layout.unit, []).append(flat)
    return [Unit(n, by_name.get(n, []), parts.comm) for n in parts.units]
