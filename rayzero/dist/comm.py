"""The only door to collectives: each call goes out on its axis' transport and into the ledger."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from rayzero.dist.dtypes import name_of
from rayzero.dist.ledger import Ledger, Line
from rayzero.dist.transport import (
    Pending,
    Transport,
    TransportFactory,
    transport_for,
)
from rayzero.dist.watch import Watch
from rayzero.errors import CollectiveError
from rayzero.layout import volume
from rayzero.records import Carrier, Phase, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis as this rank sees it."""

    name: str
    rank: int
    size: int
    transport: Transport


class Handle:
    """A transfer under way, and the ledger line that its wait completes."""

    __slots__ = ("_line", "_pending", "_watch")

    def __init__(self, pending: Pending | None, line: Line | None, watch: Watch) -> None:
        self._pending = pending
        self._line = line
        self._watch = watch

    def wait(self) -> None:
        """Return when the result is in place; raise CollectiveError if a peer never answers."""
        pending, line = self._pending, self._line
        if pending is None or line is None:
            return
        self._pending = None
        started = time.perf_counter()
        try:
            with self._watch.waiting(describe(line.transfer)):
                pending.wait()
        except RuntimeError as error:
            self._watch.publish(describe(line.transfer))
            raise CollectiveError(
                f"{describe(line.transfer)} did not complete: {error}. {self._watch.report()}"
            ) from error
        now = time.perf_counter()
        line.waited_s, line.done_s = now - started, now - line.started_s


class Communicator:
    """Collectives over a mesh's axes. On an axis of one rank they do nothing and cost nothing."""

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        store: Store | None = None,
        transport: TransportFactory = transport_for,
    ) -> None:
        self.ledger = Ledger()
        self._axes = {n: _axis(mesh, n, transport) for n in mesh.mesh_dim_names or ()}
        if self.size("replicate") > 1:
            # All data ranks in one axis, for what is not sharded at all.
            flat = mesh["replicate", "shard"]._flatten("data")
            self._axes["data"] = _axis(flat, "data", transport)
        self._watch = Watch(store, rank=dist.get_rank(), world=dist.get_world_size())
        self.is_fake = str(dist.get_backend()) == "fake"
        self.device_type = mesh.device_type

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all: the first on every axis."""
        return all(axis.rank == 0 for axis in self._axes.values())

    def carrier(self, axis: str) -> Carrier:
        """How tensors travel on the axis."""
        return self._axes[axis].transport.carrier

    def size(self, axis: str) -> int:
        """Ranks on the axis; 1 where the mesh has no such axis."""
        return self._axes[axis].size if axis in self._axes else 1

    def rank(self, axis: str) -> int:
        """This rank's place on the axis."""
        return self._axes[axis].rank if axis in self._axes else 0

    def scratch_elements(self, op: str, axis: str, elements: int) -> int:
        """Elements of scratch a reduce_scatter or all_reduce of `elements` takes on this axis."""
        if self.size(axis) == 1:
            return 0
        return volume.scratch_elements(self.carrier(axis), op, elements, ranks=self.size(axis))

    def all_gather(self, flat: torch.Tensor, *, axis: str, unit: str) -> Handle:
        """Fill the other ranks' parts of flat (1-d, a multiple of the axis' size)."""
        if self.size(axis) == 1 or not flat.numel():
            return self._nothing()
        a = self._axes[axis]
        sent = volume.gathered(flat.numel(), ranks=a.size)
        line = self._write("all_gather", a, flat, unit, sent)
        return self._handle(a.transport.all_gather(flat, _label(line.transfer)), line)

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        *,
        axis: str,
        unit: str,
        out: torch.Tensor | None = None,
        scratch: torch.Tensor | None = None,
        mean: bool = False,
    ) -> Handle:
        """Sum (or average) this rank's part of flat over the axis; other parts become undefined.

        The result is written to out (as long as the part, of its dtype), else over the part.
        """
        if self.size(axis) == 1 or not flat.numel():
            if out is not None:
                out.copy_(flat)
            return self._nothing()
        a = self._axes[axis]
        elements = flat.numel() // a.size
        own = flat.narrow(0, a.rank * elements, elements)
        sent = volume.gathered(flat.numel(), ranks=a.size)
        line = self._write("reduce_scatter", a, flat, unit, sent)
        pending = a.transport.reduce_scatter(
            flat,
            _label(line.transfer),
            out=own if out is None else out,
            scratch=scratch,
            mean=mean,
        )
        return self._handle(pending, line)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        axis: str,
        unit: str,
        op: str = "sum",
        phase: Phase | None = None,
    ) -> torch.Tensor:
        """Reduce a contiguous tensor in place by "sum" (in rank order) or "max"; return it."""
        self.start_all_reduce(tensor, axis=axis, unit=unit, op=op, phase=phase).wait()
        return tensor

    def start_all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        axis: str,
        unit: str,
        op: str = "sum",
        phase: Phase | None = None,
        scratch: torch.Tensor | None = None,
        mean: bool = False,
    ) -> Handle:
        """Begin an all-reduce in place; the tensor holds the result after the handle's wait."""
        if self.size(axis) == 1 or not tensor.numel():
            return self._nothing()
        a = self._axes[axis]
        sent = volume.all_reduced(tensor.numel(), ranks=a.size, index=a.rank)
        line = self._write("all_reduce", a, tensor, unit, sent, phase)
        label = _label(line.transfer)
        return self._handle(
            a.transport.all_reduce(tensor, label, op=op, scratch=scratch, mean=mean), line
        )

    def broadcast(self, tensor: torch.Tensor, *, axis: str, unit: str) -> torch.Tensor:
        """Copy the values of the axis' rank 0 to all, in place; return the tensor."""
        if self.size(axis) == 1 or not tensor.numel():
            return tensor
        a = self._axes[axis]
        sent = volume.broadcast(tensor.numel(), ranks=a.size, index=a.rank)
        line = self._write("broadcast", a, tensor, unit, sent)
        self._handle(a.transport.broadcast(tensor, _label(line.transfer)), line).wait()
        return tensor

    def exchange(self, vector: torch.Tensor, *, axis: str, unit: str) -> torch.Tensor:
        """Return every rank's vector as rows [axis size, elements]; control values, few bytes."""
        size = self.size(axis)
        rows = vector.new_empty(size, vector.numel())
        rows[self.rank(axis)] = vector
        with self.ledger.during(Phase.CONTROL):
            self.all_gather(rows.view(-1), axis=axis, unit=unit).wait()
        return rows

    def gather_rows(self, vector: torch.Tensor, *, axes: tuple[str, ...]) -> torch.Tensor:
        """Return every rank's vector over several axes as rows, the last axis running fastest."""
        rows = vector.reshape(1, -1)
        for axis in reversed(axes):
            rows = self.exchange(rows.flatten(), axis=axis, unit="rows").view(-1, vector.numel())
        return rows

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.gather_rows(torch.zeros(1), axes=tuple(a for a in self._axes if a != "data"))

    def read(self, values: torch.Tensor) -> list[float]:
        """Bring control values to the host: the one place where a tensor's value is read.

        A dry run has no values; it reads what healthy ranks agree on, all ones.
        """
        if self.is_fake:
            return [1.0] * values.numel()
        return [float(v) for v in values.reshape(-1).tolist()]

    def close(self) -> None:
        """Stop watching for long waits, and close the transports."""
        self._watch.close()
        for axis in self._axes.values():
            axis.transport.close()

    def _write(
        self,
        op: str,
        axis: Axis,
        tensor: torch.Tensor,
        unit: str,
        sent_elements: int,
        phase: Phase | None = None,
    ) -> Line:
        transfer = Transfer(
            op=op,
            axis=axis.name,
            phase=phase or self.ledger.phase,
            unit=unit,
            elements=tensor.numel(),
            dtype=name_of(tensor.dtype),
            sent_bytes=sent_elements * tensor.itemsize,
        )
        return self.ledger.write(transfer, time.perf_counter())

    def _handle(self, pending: Pending, line: Line) -> Handle:
        return Handle(pending, line, self._watch)

    def _nothing(self) -> Handle:
        return Handle(None, None, self._watch)


def describe(transfer: Transfer) -> str:
    """Say in words which collective this is."""
    return (
        f"{transfer.op} of {transfer.unit} ({transfer.elements} x {transfer.dtype}) "
        f"on axis {transfer.axis} in {transfer.phase.value}"
    )


def _label(transfer: Transfer) -> str:
    return f"{transfer.op}|{transfer.unit}|{transfer.elements}|{transfer.dtype}"


def _axis(mesh: DeviceMesh, name: str, transport: TransportFactory) -> Axis:
    group = mesh.get_group(name)
    return Axis(
        name=name,
        rank=dist.get_rank(group),
        size=dist.get_world_size(group),
        transport=transport(group, mesh.device_type),
    )
