"""What lives in a rank's process: its place in the gang, the task at hand, and signs of life.

All work is done in one thread, since the number of OpenMP threads and the current CUDA device
belong to a thread; `latest`, `stack` and `waiting` are answered by another, also while it hangs.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray

from rayzero.cluster.visible import device_index, visible_devices
from rayzero.dist.process import (
    Seat,
    connect_store,
    current_store,
    device_uuid,
    host_store,
    joined,
)
from rayzero.dist.watch import PREFIX
from rayzero.records import Progress, Status

OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
)
NEIGHBOUR_WORDS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "read error",
    "write error",
    "broken pipe",
    "pair closure",
    "gloo",
    "nccl",
)
NEIGHBOUR_ERRORS = ("DistError", "CollectiveError", "ConnectionError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a task is given on each rank."""

    seat: Seat
    store: Any
    """The torch.distributed store: the group's own, or the gang's for tasks without a group."""
    progress: Callable[[Progress], None]
    """Leave a sign of life; only the last one of rank 0 is read. Costs less than a microsecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where a rank's process runs and which device it was given."""

    node_id: str
    address: str
    pid: int
    device: str
    gpu_id: str
    """Ray's id of the GPU; empty for a CPU rank."""
    visible: str
    """CUDA_VISIBLE_DEVICES as the process sees it."""
    uuid: str
    """The GPU's own id; empty for a CPU rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception of a rank, judged where its types are known."""

    status: Status
    message: str
    """Type and text, one line."""
    traceback: str
    is_neighbours: bool
    """The error only says that another rank is gone."""
    unix_s: float


class Rank:
    """The actor. A failed rank is not used again: its gang is ended as a whole."""

    def __init__(self) -> None:
        self._seat: Seat | None = None
        self._store: Any = None
        self._served: Any = None
        self._group_store: Any = None
        self._group = contextlib.ExitStack()
        self._progress: tuple[int, Progress | None] = (0, None)
        # Started in the main thread, which is no daemon: so threads that tasks start are none
        # either, and stop can wait for them.
        self._hand = ThreadPoolExecutor(max_workers=1)
        self._thread = self._hand.submit(threading.get_ident).result()

    def call(self, verb: str, *args: Any) -> Any:
        """Do one of the verbs below; return its result, or the Failure."""
        return self._hand.submit(self._try, verb, args).result()

    def look_around(self, on_gpu: bool) -> Whereabouts:
        """Say where this process is."""
        context = ray.get_runtime_context()
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpu_id = str(context.get_accelerator_ids()["GPU"][0]) if on_gpu else ""
        index = device_index(gpu_id, visible_devices(variable)) if on_gpu else 0
        return Whereabouts(
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            device=f"cuda:{index}" if on_gpu else "cpu",
            gpu_id=gpu_id,
            visible="all" if variable is None else variable,
            uuid=device_uuid(index) if on_gpu else "",
        )

    def open_store(self, timeout_s: float) -> int:
        """Host the gang's rendezvous store (rank 0); return its port."""
        self._served = host_store(timeout_s=timeout_s)
        return int(self._served.port)

    def connect(self, seat: Seat, timeout_s: float) -> None:
        """Take the seat and connect to the store, once in the life of this process."""
        self._seat = seat
        self._store = connect_store(seat, timeout_s=timeout_s)

    def join(self, generation: int, timeout_s: float) -> None:
        """Become a member of a new process group."""
        assert self._seat is not None, "connect comes before join"
        group = joined(self._seat, self._store, generation=generation, timeout_s=timeout_s)
        self._group_store = self._group.enter_context(group)

    def perform(self, task: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a task. After an error the group stays as it is: leaving it may wait for others."""
        assert self._seat is not None, "connect comes before perform"
        self._progress = (0, None)
        store = self._group_store if self._group_store is not None else self._store
        return task(Member(seat=self._seat, store=store, progress=self._note), *args)

    def leave(self) -> None:
        """Destroy the process group, if there is one."""
        self._group_store = None
        self._group.close()

    def stop(self, timeout_s: float) -> None:
        """Leave, and let threads that tasks left behind (writers of files) come to their end."""
        self.leave()
        deadline = time.monotonic() + timeout_s
        ours = (threading.main_thread(), threading.current_thread())
        for thread in threading.enumerate():
            if not thread.daemon and thread not in ours:
                thread.join(max(0.0, deadline - time.monotonic()))

    def latest(self) -> tuple[int, Progress | None]:
        """Return the last sign of life and its number."""
        return self._progress

    def stack(self) -> str:
        """Return the stack of the working thread, innermost call last."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def waiting(self) -> str:
        """Return what this rank published that it waits for; empty if nothing."""
        if self._group_store is None or self._seat is None:
            return ""
        key = f"{PREFIX}/{self._seat.rank}"
        stores = [store for store in (current_store(), self._group_store) if store is not None]
        lines = [store.get(key).decode() for store in stores if store.check([key])]
        return lines[0] if lines else ""

    def _try(self, verb: str, args: tuple[Any, ...]) -> Any:
        try:
            return getattr(self, verb)(*args)
        except BaseException as error:
            return failure_of(error)

    def _note(self, progress: Progress) -> None:
        self._progress = (self._progress[0] + 1, progress)


def failure_of(error: BaseException) -> Failure:
    """Judge an exception: what it is, and whether another rank is its cause."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    has_no_memory = (
        isinstance(error, MemoryError)
        or "OutOfMemoryError" in names
        or (isinstance(error, RuntimeError) and any(word in text for word in OUT_OF_MEMORY_WORDS))
    )
    speaks_of_others = bool(names & set(NEIGHBOUR_ERRORS)) or (
        type(error) is RuntimeError and any(word in text for word in NEIGHBOUR_WORDS)
    )
    first_line = next((line for line in str(error).splitlines() if line.strip()), "")
    return Failure(
        status=Status.OUT_OF_MEMORY if has_no_memory else Status.FAILED,
        message=f"{type(error).__name__}: {first_line.strip()}",
        traceback="".join(traceback.format_exception(error)),
        is_neighbours=speaks_of_others and not has_no_memory,
        unix_s=time.time(),
    )
