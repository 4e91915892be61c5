"""The transport among ranks of one host: each reads what it needs from the others' memory.

The same bytes as pairwise exchange and the same sums in rank order, without the network's copies.
A sum goes piece by piece, so that its terms stay in the cache. See dist/board.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayzero.dist.board import Board, Deal, Lines, meet
from rayzero.dist.transport import Pending, Tags, Terms, Transport, transport_for
from rayzero.errors import ClusterError
from rayzero.layout.volume import PIECE_ELEMENTS, chunk
from rayzero.records import Carrier


@dataclass(slots=True)
class Open:
    """A transfer under way on the board."""

    board: Board
    timeout_s: float
    is_over: bool = False

    def wait(self) -> None:
        """Serve the board until the result is in place and this rank's bytes have been read."""
        self.board.wait(lambda: self.is_over, timeout_s=self.timeout_s)

    def end(self) -> None:
        """Say that it is over."""
        self.is_over = True


class Shared:
    """Collectives of one axis whose ranks are all on one host. `ranks` are those of the world."""

    carrier = Carrier.SHARED

    def __init__(
        self, board: Board, ranks: Sequence[int], *, rank: int, axis: int, timeout_s: float
    ) -> None:
        self._board = board
        self._ranks = ranks
        self._rank = rank
        self._axis = axis
        self._timeout_s = timeout_s
        self._tags = Tags()
        self._peers = {place: r for place, r in enumerate(ranks) if place != rank}
        """Ranks of the world by place on the axis."""

    def all_gather(self, flat: torch.Tensor, label: str) -> Pending:
        """Show the own part to each peer, read each peer's in place."""
        parts = flat.chunk(len(self._ranks))
        return self._start(self._gathering(parts, self._tag(label)))

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        label: str,
        *,
        out: torch.Tensor,
        scratch: torch.Tensor | None,
        mean: bool,
    ) -> Pending:
        """Show each peer its part, sum the own part from theirs in rank order."""
        parts = flat.chunk(len(self._ranks))
        return self._start(self._reducing(parts, self._tag(label), out, scratch, "sum", mean))

    def all_reduce(
        self,
        tensor: torch.Tensor,
        label: str,
        *,
        op: str = "sum",
        scratch: torch.Tensor | None = None,
        mean: bool = False,
    ) -> Pending:
        """Reduce each rank's part, then gather the parts."""
        flat, size = tensor.view(-1), len(self._ranks)
        spans = [chunk(flat.numel(), ranks=size, index=i) for i in range(size)]
        parts = [flat[s.start : s.stop] for s in spans]
        tag = self._tag(label)
        reducing = self._reducing(parts, tag, parts[self._rank], scratch, op, mean)
        return self._start(reducing, lambda: self._gathering(parts, tag + 1))

    def broadcast(self, tensor: torch.Tensor, label: str) -> Pending:
        """Rank 0 shows its values to each peer."""
        flat = tensor.view(-1)
        shown = {} if self._rank else dict.fromkeys(self._peers.values(), flat)
        awaited = [self._ranks[0]] if self._rank else []

        def take(lines: Mapping[int, Lines]) -> None:
            for peer, theirs in lines.items():
                self._board.read(peer, theirs, flat)

        return self._start(Deal(tag=self._tag(label), shown=shown, awaited=awaited, take=take))

    def close(self) -> None:
        """Hang up, on all axes."""
        self._board.close()

    def _gathering(self, parts: Sequence[torch.Tensor], tag: int) -> Deal:
        peers = self._peers

        def take(lines: Mapping[int, Lines]) -> None:
            for place, peer in peers.items():
                self._board.read(peer, lines[peer], parts[place])

        shown = dict.fromkeys(peers.values(), parts[self._rank])
        return Deal(tag=tag, shown=shown, awaited=[*peers.values()], take=take)

    def _reducing(
        self,
        parts: Sequence[torch.Tensor],
        tag: int,
        out: torch.Tensor,
        scratch: torch.Tensor | None,
        op: str,
        mean: bool,
    ) -> Deal:
        peers, own = self._peers, parts[self._rank]
        divisor = len(self._ranks) if mean else 1

        def take(lines: Mapping[int, Lines]) -> None:
            longest = min(PIECE_ELEMENTS, own.numel())
            room = scratch if scratch is not None else own.new_empty(len(peers) * longest)
            for start in range(0, own.numel(), PIECE_ELEMENTS):
                piece = own[start : start + PIECE_ELEMENTS]
                received = room[: len(peers) * piece.numel()].view(len(peers), -1)
                for row, peer in zip(received, peers.values(), strict=True):
                    self._board.read(peer, lines[peer], row, skip_bytes=start * own.itemsize)
                result = out[start : start + PIECE_ELEMENTS]
                Terms(piece, received, self._rank).combine(result, op=op, divisor=divisor)

        shown = {peer: parts[place] for place, peer in peers.items()}
        return Deal(tag=tag, shown=shown, awaited=[*peers.values()], take=take)

    def _start(self, first: Deal, following: Callable[[], Deal] | None = None) -> Open:
        transfer = Open(self._board, self._timeout_s)

        def go_on() -> None:
            assert following is not None
            last = following()
            last.then = transfer.end
            self._board.open(last)

        first.then = transfer.end if following is None else go_on
        self._board.open(first)
        self._board.serve()
        return transfer

    def _tag(self, label: str) -> int:
        return self._axis << 32 | self._tags.next(label)


class SharedTransports:
    """Makes the transports of all axes over one board; pairwise where the ranks cannot meet."""

    def __init__(self, *, timeout_s: float, is_required: bool = False) -> None:
        self._timeout_s = timeout_s
        self._is_required = is_required
        self._has_met = False
        self._board: Board | None = None
        self._num_axes = 0

    def __call__(self, group: dist.ProcessGroup, device_type: str) -> Transport:
        """Return the transport of one axis. All ranks must make their axes in the same order."""
        if not self._has_met:
            self._has_met, self._board = True, meet()
        if self._board is None and self._is_required:
            raise ClusterError(
                "cluster.transport=shared needs all ranks on one Linux host, in one process and "
                "network namespace, allowed to read each other's memory (ptrace); these cannot. "
                "Set cluster.transport=pairwise, or auto to use shared only where it works"
            )
        if self._board is None:
            return transport_for(group, device_type)
        self._num_axes += 1
        return Shared(
            self._board,
            dist.get_process_group_ranks(group),
            rank=dist.get_rank(group),
            axis=self._num_axes,
            timeout_s=self._timeout_s,
        )
