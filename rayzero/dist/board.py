"""A board among the ranks of one host: notices on sockets, and reads of each other's memory.

[Note: reading a neighbour]
Linux lets a process of the same user read another's memory (process_vm_readv), so what a rank has
to send needs no copy, no segment with a name and no buffer of a special kind: its notice says where
the bytes lie. Notices go over sockets without a name in any folder; they wake the reader, and the
kernel orders them after the bytes they speak of.

[Note: no wait blocks another]
Ranks may start their transfers in different orders, over several axes. Whoever waits for one also
serves the others that it has started; so the owner of a buffer never waits for a reader that waits
for the owner.
"""

import contextlib
import ctypes
import os
import select
import socket
import struct
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NOTICE = struct.Struct("<QQQ")
"""Tag, address, bytes; DONE for an address answers that the bytes have been read."""
DONE = (1 << 64) - 1
PR_SET_PTRACER = 0x59616D61
"""prctl's request of the security module Yama: who may read this process' memory."""
ANY_PROCESS, ONE = ctypes.c_ulong(-1), ctypes.c_ulong(1)

_C = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Where bytes of another process lie."""

    address: int
    num_bytes: int


class _Span(ctypes.Structure):
    """The C library's struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(slots=True, kw_only=True)
class Deal:
    """One exchange: bytes shown to peers, bytes awaited from peers, and what to do with them.

    It is complete when `take` has run and every peer that was shown something has read it.
    """

    tag: int
    shown: Mapping[int, torch.Tensor]
    awaited: Sequence[int]
    take: Callable[[Mapping[int, Lines]], None]
    then: Callable[[], None] = lambda: None
    """What to do when it is complete."""
    is_taken: bool = field(default=False, init=False)
    readers: set[int] = field(init=False)
    """Peers that have yet to read what they were shown."""

    def __post_init__(self) -> None:
        self.readers = set(self.shown)

    @property
    def is_complete(self) -> bool:
        """Whether nothing of it is open."""
        return self.is_taken and not self.readers


class Board:
    """One process' connections to the other ranks of its host. Ranks are those of the world."""

    def __init__(self, pids: Mapping[int, int], sockets: Mapping[int, socket.socket]) -> None:
        self._pids = pids
        self._sockets = sockets
        self._poll = select.poll()
        self._ranks = {s.fileno(): rank for rank, s in sockets.items()}
        for number in self._ranks:
            self._poll.register(number, select.POLLIN)
        self._unread: dict[int, bytes] = dict.fromkeys(pids, b"")
        self._notices: dict[tuple[int, int], Lines] = {}
        self._done: set[tuple[int, int]] = set()
        self._deals: list[Deal] = []
        self._gone: set[int] = set()

    def open(self, deal: Deal) -> None:
        """Show what is to be read, and begin to serve the deal."""
        assert self._sockets, "the communicator is closed"
        for rank, tensor in deal.shown.items():
            self._tell(rank, deal.tag, tensor.data_ptr(), tensor.numel() * tensor.itemsize)
        self._deals.append(deal)

    def wait(self, is_over: Callable[[], bool], *, timeout_s: float) -> None:
        """Serve all open deals until `is_over`; raise RuntimeError if a peer is gone or silent."""
        deadline = time.monotonic() + timeout_s
        self.serve()
        while not is_over():
            left = deadline - time.monotonic()
            missing = self._missing()
            if missing & self._gone or left <= 0:
                why = "is gone" if missing & self._gone else f"said nothing for {timeout_s:.0f} s"
                raise RuntimeError(f"rank {sorted(missing & self._gone or missing)} {why}")
            self._poll.poll(1000.0 * min(left, 1.0))
            self.serve()

    def serve(self) -> None:
        """Do what can be done without waiting."""
        self._listen()
        moved = True
        while moved:
            moved = False
            for deal in list(self._deals):
                moved = self._advance(deal) or moved

    def read(self, rank: int, lines: Lines, into: torch.Tensor, *, skip_bytes: int = 0) -> None:
        """Copy a rank's bytes, from skip_bytes on, into a contiguous tensor."""
        wanted = into.numel() * into.itemsize
        assert skip_bytes + wanted <= lines.num_bytes, (
            f"rank {rank} shows {lines.num_bytes} bytes, {skip_bytes + wanted} are read"
        )
        read_memory(self._pids[rank], lines.address + skip_bytes, into.data_ptr(), wanted)

    def close(self) -> None:
        """Hang up."""
        for connection in self._sockets.values():
            connection.close()
        self._sockets, self._deals, self._poll = {}, [], select.poll()

    def _advance(self, deal: Deal) -> bool:
        moved = False
        if not deal.is_taken and all((deal.tag, r) in self._notices for r in deal.awaited):
            lines = {r: self._notices.pop((deal.tag, r)) for r in deal.awaited}
            deal.take(lines)
            deal.is_taken = moved = True
            for rank in deal.awaited:
                self._tell(rank, deal.tag, DONE, 0)
        for rank in list(deal.readers):
            if (deal.tag, rank) in self._done:
                self._done.remove((deal.tag, rank))
                deal.readers.remove(rank)
                moved = True
        if deal.is_complete:
            self._deals.remove(deal)
            deal.then()
        return moved

    def _tell(self, rank: int, *notice: int) -> None:
        try:
            self._sockets[rank].sendall(NOTICE.pack(*notice))
        except OSError:
            self._gone.add(rank)

    def _listen(self) -> None:
        for number, _ in self._poll.poll(0):
            rank = self._ranks[number]
            heard = b""
            with contextlib.suppress(OSError):
                heard = self._sockets[rank].recv(1 << 14)
            if not heard:
                self._gone.add(rank)
                self._poll.unregister(number)
                continue
            text = self._unread[rank] + heard
            whole = len(text) - len(text) % NOTICE.size
            for tag, address, num_bytes in NOTICE.iter_unpack(text[:whole]):
                if address == DONE:
                    self._done.add((tag, rank))
                else:
                    self._notices[tag, rank] = Lines(address=address, num_bytes=num_bytes)
            self._unread[rank] = text[whole:]

    def _missing(self) -> set[int]:
        missing: set[int] = set()
        for deal in self._deals:
            if not deal.is_taken:
                missing |= {r for r in deal.awaited if (deal.tag, r) not in self._notices}
            missing |= deal.readers
        return missing


def read_memory(pid: int, address: int, into: int, num_bytes: int) -> None:
    """Copy bytes of another process to an address of this one; raise RuntimeError if refused."""
    done = 0
    while done < num_bytes:
        ours = _Span(into + done, num_bytes - done)
        theirs = _Span(address + done, num_bytes - done)
        copied = _C.process_vm_readv(
            pid, ctypes.byref(ours), ONE, ctypes.byref(theirs), ONE, ctypes.c_ulong(0)
        )
        if copied <= 0:
            raise RuntimeError(
                f"reading memory of process {pid} failed: {os.strerror(ctypes.get_errno())}"
            )
        done += copied


def meet() -> Board | None:
    """Connect all ranks of the default group; None on all of them where they cannot.

    Ranks must be on one host, in one process and network namespace, and may read each other.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    let_others_read()
    name = f"\0rayzero-{uuid.uuid4().hex}"
    secret = torch.tensor([uuid.uuid4().int & 0x7FFFFFFF], dtype=torch.int64)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(name)
        door.listen(world)
        mine = (_host(), os.getpid(), name, secret.data_ptr(), int(secret))
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        may_read = all(_can_read(mine[0], other) for other in everyone)
        agreed: list[Any] = [None] * world
        dist.all_gather_object(agreed, may_read)
        if not all(agreed):
            return None
        sockets = _connect(door, rank, [other[2] for other in everyone])
    return Board({r: other[1] for r, other in enumerate(everyone)}, sockets)


def let_others_read() -> None:
    """Allow processes of the same user to read this one's memory, where Yama forbids it."""
    with contextlib.suppress(AttributeError):
        _C.prctl(PR_SET_PTRACER, ANY_PROCESS, 0, 0, 0)


def _host() -> str:
    """Name this host's boot and the namespaces in which processes and sockets are found."""
    places = [Path("/proc/self/ns/pid"), Path("/proc/self/ns/net")]
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return " ".join([boot.strip(), *(str(place.readlink()) for place in places)])
    except OSError:
        return f"no Linux {uuid.uuid4().hex}"


def _can_read(host: str, other: tuple[str, int, str, int, int]) -> bool:
    there, pid, _, address, value = other
    if there != host or not hasattr(_C, "process_vm_readv"):
        return False
    found = torch.zeros(1, dtype=torch.int64)
    with contextlib.suppress(RuntimeError):
        read_memory(pid, address, found.data_ptr(), 8)
    return int(found) == value


def _connect(door: socket.socket, rank: int, names: Sequence[str]) -> dict[int, socket.socket]:
    sockets = {}
    for peer in range(rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(names[peer])
        connection.sendall(rank.to_bytes(4, "little"))
        sockets[peer] = connection
    for _ in range(rank + 1, len(names)):
        connection, _ = door.accept()
        sockets[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = connection
    return sockets
