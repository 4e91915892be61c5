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

from rayzero.layout.volume import chunk, swaps

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """A transfer under way. Its buffers must not be touched before wait() returns."""

    def wait(self) -> None:
        """Return when the result is in place (on CUDA: for the current stream)."""


class Transport(Protocol):
    """The collectives of one axis. Buffers are 1-d and contiguous; results land in place."""

    def scratch_elements(self, op: str, elements: int) -> int:
        """Elements of receive buffer that a reduce_scatter or all_reduce of `elements` needs."""

    def all_gather(self, flat: torch.Tensor, label: str) -> Pending:
        """Fill the other ranks' equal parts of flat; this rank's is in place."""

    def reduce_scatter(
        self, flat: torch.Tensor, label: str, *, scratch: torch.Tensor | None, mean: bool
    ) -> Pending:
        """Sum (or average) this rank's equal part over ranks; the other parts become undefined."""

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


TransportFactory = Callable[[dist.ProcessGroup, str], Transport]
"""Makes the transport of one axis from its group and the type of device ("cpu", "cuda")."""


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

    def __init__(self, group: dist.ProcessGroup, *, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._numbers: dict[str, int] = {}

    def scratch_elements(self, op: str, elements: int) -> int:
        """One part from each peer; where two ranks swap, the peer's whole buffer."""
        if op == "all_reduce" and swaps(elements, ranks=self._size):
            return elements
        return -(-elements // self._size) * (self._size - 1)

    def all_gather(self, flat: torch.Tensor, label: str) -> Pending:
        """Send the own part to each peer, receive each peer's in place."""
        parts = flat.chunk(self._size)
        theirs = [parts[peer] for peer in self._peers]
        own = [parts[self._rank]] * len(theirs)
        return Works(self._exchange(own, theirs, self._tag(label)))

    def reduce_scatter(
        self, flat: torch.Tensor, label: str, *, scratch: torch.Tensor | None, mean: bool
    ) -> Pending:
        """Send each peer its part, then sum the own part's copies in rank order."""
        parts = flat.chunk(self._size)
        if scratch is None:
            scratch = flat.new_empty(self.scratch_elements("reduce_scatter", flat.numel()))
        received = scratch.view(self._size - 1, -1)
        theirs = [parts[peer] for peer in self._peers]
        works = self._exchange(theirs, received.unbind(), self._tag(label))
        own, divisor = parts[self._rank], self._size if mean else 1
        return Works(works, lambda: sum_in_rank_order(own, received, self._rank, divisor))

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
            scratch = flat.new_empty(self.scratch_elements("all_reduce", flat.numel()))
        tag = self._tag(label)
        divisor = self._size if mean else 1
        if swaps(flat.numel(), ranks=self._size):
            received = scratch.view(1, -1)
            works = self._exchange([flat], received.unbind(), tag)
            return Works(works, lambda: combine(flat, received, self._rank, op=op, divisor=divisor))
        spans = [chunk(flat.numel(), ranks=self._size, index=i) for i in range(self._size)]
        parts = [flat[s.start : s.stop] for s in spans]
        own = parts[self._rank]
        received = scratch[: own.numel() * (self._size - 1)].view(self._size - 1, own.numel())
        theirs = [parts[peer] for peer in self._peers]
        works = self._exchange(theirs, received.unbind(), tag)

        def gather() -> None:
            combine(own, received, self._rank, op=op, divisor=divisor)
            Works(self._exchange([own] * len(theirs), theirs, tag + 1)).wait()

        return Works(works, gather)

    def broadcast(self, tensor: torch.Tensor, label: str) -> Pending:
        """Rank 0 sends to each peer."""
        flat = tensor.view(-1)
        tag = self._tag(label)
        if self._rank:
            return Works([self._receive(flat, 0, tag)])
        return Works([self._send(flat, peer, tag) for peer in self._peers])

    @property
    def _peers(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank]

    def _exchange(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], tag: int
    ) -> list[dist.Work]:
        """Send each peer its tensor and receive one from it, both in the order of _peers."""
        pairs = list(zip(self._peers, sent, received, strict=True))
        works = [self._receive(tensor, peer, tag) for peer, _, tensor in pairs]
        return works + [self._send(tensor, peer, tag) for peer, tensor, _ in pairs]

    def _tag(self, label: str) -> int:
        # See [Note: tags]. Even, so that a second round may use the odd one after it.
        number = self._numbers[label] = self._numbers.get(label, -1) + 1
        return zlib.crc32(f"{label}|{number}".encode()) & 0x7FFFFFFE

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.isend(tensor, group=self._group, tag=tag, group_dst=peer)
        assert work is not None, "this rank is not a member of the axis group"
        return work

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._group, tag=tag, group_src=peer)
        assert work is not None, "this rank is not a member of the axis group"
        return work


def combine(own: torch.Tensor, received: torch.Tensor, rank: int, *, op: str, divisor: int) -> None:
    """Reduce the peers' rows of `received` into own, by sum in rank order or by maximum."""
    if op == "max":
        for row in received:
            torch.maximum(own, row, out=own)
    else:
        sum_in_rank_order(own, received, rank, divisor)


def sum_in_rank_order(own: torch.Tensor, received: torch.Tensor, rank: int, divisor: int) -> None:
    """Set own to ((t0 + t1) + t2 ...) / divisor; own is term `rank`, received has the others.

    16-bit terms are added in fp32 and rounded once.
    """
    if own.itemsize == 2:
        wide = own.float()
        sum_in_rank_order(wide, received.float(), rank, divisor)
        own.copy_(wide)
        return
    # a + b is b + a bit for bit, so own may be either of the first two terms.
    if rank <= 1:
        own.add_(received[0])
        rest = received[1:]
    else:
        head = received[0]
        for row in received[1:rank]:
            head.add_(row)
        own.add_(head)
        rest = received[rank:]
    for row in rest:
        own.add_(row)
    if divisor != 1:
        own.div_(divisor)


class Native:
    """torch's own collectives: NCCL, and the fake group of a dry run."""

    def __init__(self, group: dist.ProcessGroup, *, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size

    def scratch_elements(self, op: str, elements: int) -> int:
        """NCCL receives into its own buffers."""
        return 0

    def all_gather(self, flat: torch.Tensor, label: str) -> Pending:
        """Gather in place."""
        own = self._own(flat)
        return Works([_ALL_GATHER(flat, own, group=self._group, async_op=True)])

    def reduce_scatter(
        self, flat: torch.Tensor, label: str, *, scratch: torch.Tensor | None, mean: bool
    ) -> Pending:
        """Reduce in place."""
        own = self._own(flat)
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        return Works([_REDUCE_SCATTER(own, flat, op=op, group=self._group, async_op=True)])

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
