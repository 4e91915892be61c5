"""How bytes travel on one mesh axis: pairwise exchange on gloo, torch's own collectives elsewhere.

[Note: why pairwise]
gloo's reduce-scatter moves as many bytes as its all-reduce, and adds in an order of its own. Here
each rank sends every peer what that peer owns, and sums what it gets in rank order: (N-1)/N of the
buffer on the wire, as ZeRO counts (arXiv:1910.02054, section 7), and the same bits everywhere.

[Note: tags]
gloo pairs messages by tag and order. Two transfers of equal size issued in different order on two
ranks would be added to each other without an error, so each message's tag says what it is.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from rayzero.layout.volume import chunk, scratch_elements, swaps
from rayzero.records import Carrier

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """A transfer under way. Its buffers must not be touched before wait() returns."""

    def wait(self) -> None:
        """Return when the result is in place (on CUDA: for the current stream)."""


class Transport(Protocol):
    """The collectives of one axis. Buffers are 1-d and contiguous; results land in place."""

    carrier: Carrier

    def all_gather(self, flat: torch.Tensor, label: str) -> Pending:
        """Fill the other ranks' equal parts of flat; this rank's is in place."""

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        label: str,
        *,
        out: torch.Tensor,
        scratch: torch.Tensor | None,
        mean: bool,
    ) -> Pending:
        """Write the sum (or mean) of this rank's equal part over ranks to out; flat is undefined.

        out: as long as the part and of its dtype, such as the part itself.
        """

    def all_reduce(
        self,
        tensor: torch.Tensor,
        label: str,
        *,
        op: str = "sum",
        scratch: torch.Tensor | None = None,
        mean: bool = False,
    ) -> Pending:
        """Take the "sum" (or average) or "max" over ranks, any length."""

    def broadcast(self, tensor: torch.Tensor, label: str) -> Pending:
        """Copy rank 0's values to all."""

    def close(self) -> None:
        """Give back what it holds besides the process group."""


TransportFactory = Callable[[dist.ProcessGroup, str], Transport]
"""Makes the transport of one axis from its group and the type of device ("cpu", "cuda")."""


class Tags:
    """Numbers that tell the messages of one axis apart. See [Note: tags]."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def next(self, label: str) -> int:
        """Return the label's next tag: even, so that a second round may use the odd one after."""
        number = self._numbers[label] = self._numbers.get(label, -1) + 1
        return zlib.crc32(f"{label}|{number}".encode()) & 0x7FFFFFFE


@dataclass(slots=True)
class Works:
    """Several handles and what remains to be done with what they brought."""

    works: Sequence[dist.Work]
    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait for every handle, then finish."""
        for work in self.works:
            work.wait()
        if self.finish is not None:
            self.finish()


class Pairwise:
    """Each pair of ranks exchanges directly; sums go in rank order. See [Note: why pairwise]."""

    carrier = Carrier.PAIRWISE

    def __init__(self, group: dist.ProcessGroup, *, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._tags = Tags()

    def all_gather(self, flat: torch.Tensor, label: str) -> Pending:
        """Send the own part to each peer, receive each peer's in place."""
        parts = flat.chunk(self._size)
        theirs = [parts[peer] for peer in self._peers]
        own = [parts[self._rank]] * len(theirs)
        return Works(self._exchange(own, theirs, self._tags.next(label)))

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        label: str,
        *,
        out: torch.Tensor,
        scratch: torch.Tensor | None,
        mean: bool,
    ) -> Pending:
        """Send each peer its part, then sum the own part's copies in rank order."""
        parts = flat.chunk(self._size)
        if scratch is None:
            scratch = self._scratch(flat, "reduce_scatter")
        received = scratch.view(self._size - 1, -1)
        theirs = [parts[peer] for peer in self._peers]
        works = self._exchange(theirs, received.unbind(), self._tags.next(label))
        terms, divisor = Terms(parts[self._rank], received, self._rank), self._size if mean else 1
        return Works(works, lambda: terms.sum(out, divisor))

    def all_reduce(
        self,
        tensor: torch.Tensor,
        label: str,
        *,
        op: str = "sum",
        scratch: torch.Tensor | None = None,
        mean: bool = False,
    ) -> Pending:
        """Reduce each rank's part, then gather the parts; or swap, the same bytes in one round."""
        flat = tensor.view(-1)
        if scratch is None:
            scratch = self._scratch(flat, "all_reduce")
        tag = self._tags.next(label)
        divisor = self._size if mean else 1
        if swaps(flat.numel(), ranks=self._size):
            received = scratch.view(1, -1)
            works = self._exchange([flat], received.unbind(), tag)
            terms = Terms(flat, received, self._rank)
            return Works(works, lambda: terms.combine(flat, op=op, divisor=divisor))
        spans = [chunk(flat.numel(), ranks=self._size, index=i) for i in range(self._size)]
        parts = [flat[s.start : s.stop] for s in spans]
        own = parts[self._rank]
        received = scratch[: own.numel() * (self._size - 1)].view(self._size - 1, own.numel())
        theirs = [parts[peer] for peer in self._peers]
        works = self._exchange(theirs, received.unbind(), tag)

        def gather() -> None:
            Terms(own, received, self._rank).combine(own, op=op, divisor=divisor)
            Works(self._exchange([own] * len(theirs), theirs, tag + 1)).wait()

        return Works(works, gather)

    def broadcast(self, tensor: torch.Tensor, label: str) -> Pending:
        """Rank 0 sends to each peer."""
        flat = tensor.view(-1)
        tag = self._tags.next(label)
        if self._rank:
            return Works([self._receive(flat, 0, tag)])
        return Works([self._send(flat, peer, tag) for peer in self._peers])

    def close(self) -> None:
        """The group belongs to others."""

    @property
    def _peers(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank]

    def _scratch(self, flat: torch.Tensor, op: str) -> torch.Tensor:
        elements = scratch_elements(self.carrier, op, flat.numel(), ranks=self._size)
        return flat.new_empty(elements)

    def _exchange(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], tag: int
    ) -> list[dist.Work]:
        """Send each peer its tensor and receive one from it, both in the order of _peers."""
        pairs = list(zip(self._peers, sent, received, strict=True))
        works = [self._receive(tensor, peer, tag) for peer, _, tensor in pairs]
        return works + [self._send(tensor, peer, tag) for peer, tensor, _ in pairs]

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.isend(tensor, group=self._group, tag=tag, group_dst=peer)
        assert work is not None, "this rank is not a member of the axis group"
        return work

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._group, tag=tag, group_src=peer)
        assert work is not None, "this rank is not a member of the axis group"
        return work


@dataclass(frozen=True, slots=True)
class Terms:
    """What every rank has of one part: `own` is this rank's, `received` has the others' as rows."""

    own: torch.Tensor
    received: torch.Tensor
    rank: int

    def combine(self, out: torch.Tensor, *, op: str, divisor: int) -> None:
        """Write the maximum, or the sum in rank order, to out; received becomes undefined."""
        if op == "sum":
            self.sum(out, divisor)
            return
        torch.maximum(self.own, self.received[0], out=out)
        for row in self.received[1:]:
            torch.maximum(out, row, out=out)

    def sum(self, out: torch.Tensor, divisor: int) -> None:
        """Write ((t0 + t1) + t2 ...) / divisor to out; received becomes undefined.

        16-bit terms are added in fp32 and rounded once.
        """
        if self.own.itemsize == 2:
            wide = self.own.float()
            Terms(wide, self.received.float(), self.rank).sum(wide, divisor)
            out.copy_(wide)
            return
        # a + b is b + a bit for bit, so own may be either of the first two terms.
        head, num_summed = self.received[0], max(1, self.rank)
        for row in self.received[1:num_summed]:
            head.add_(row)
        torch.add(self.own, head, out=out)
        for row in self.received[num_summed:]:
            out.add_(row)
        if divisor != 1:
            out.div_(divisor)


class Native:
    """torch's own collectives: NCCL, and the fake group of a dry run."""

    carrier = Carrier.NATIVE

    def __init__(self, group: dist.ProcessGroup, *, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size

    def all_gather(self, flat: torch.Tensor, label: str) -> Pending:
        """Gather in place."""
        own = self._own(flat)
        return Works([_ALL_GATHER(flat, own, group=self._group, async_op=True)])

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        label: str,
        *,
        out: torch.Tensor,
        scratch: torch.Tensor | None,
        mean: bool,
    ) -> Pending:
        """Reduce into out."""
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        return Works([_REDUCE_SCATTER(out, flat, op=op, group=self._group, async_op=True)])

    def all_reduce(
        self,
        tensor: torch.Tensor,
        label: str,
        *,
        op: str = "sum",
        scratch: torch.Tensor | None = None,
        mean: bool = False,
    ) -> Pending:
        """Reduce in place."""
        average = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        kind = dist.ReduceOp.MAX if op == "max" else average
        return Works([dist.all_reduce(tensor, op=kind, group=self._group, async_op=True)])

    def broadcast(self, tensor: torch.Tensor, label: str) -> Pending:
        """Copy rank 0's values to all."""
        return Works([dist.broadcast(tensor, group_src=0, group=self._group, async_op=True)])

    def close(self) -> None:
        """The group belongs to others."""

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        """Cut this rank's part alone: views for all of 1,024 ranks take longer than the rest."""
        elements = flat.numel() // self._size
        return flat.narrow(0, self._rank * elements, elements)


def transport_for(group: dist.ProcessGroup, device_type: str) -> Transport:
    """Pick by backend: pairwise where gloo would carry the tensors, native elsewhere."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    backend = str(dist.get_backend(group))
    if device_type == "cpu" and "gloo" in backend:
        return Pairwise(group, rank=rank, size=size)
    return Native(group, rank=rank, size=size)
