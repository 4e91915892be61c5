"""Join and leave a process group from explicit values; the only place that knows the backend."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

M_MMAP_THRESHOLD = -3
"""glibc's name for the size above which a buffer has pages of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one rank sits. device is a torch device string as this process sees it."""

    rank: int
    world: int
    node: str
    device: str
    store_host: str
    store_port: int
    threads: int = 1


def host_store(*, timeout_s: float) -> TCPStore:
    """Open the rendezvous store on a free port of this machine; rank 0's process keeps it alive."""
    return TCPStore(
        "0.0.0.0",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def connect_store(seat: Seat, *, timeout_s: float) -> TCPStore:
    """Connect to the rendezvous store once per process; groups of one gang share it."""
    return TCPStore(
        seat.store_host,
        seat.store_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def backend_of(device: str) -> str:
    """Name the backend: NCCL beside gloo for control on CUDA, gloo alone on CPU."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


@contextlib.contextmanager
def joined(seat: Seat, store: Store, *, generation: int, timeout_s: float) -> Iterator[Store]:
    """Be a member of the default process group inside the block; yields the generation's own store.

    Each group of a gang has its own generation, so its keys never meet those of an earlier one.
    """
    torch.set_num_threads(seat.threads)
    if seat.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(seat.device))
    own = PrefixStore(f"generation{generation}", store)
    dist.init_process_group(
        backend_of(seat.device),
        store=own,
        rank=seat.rank,
        world_size=seat.world,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield own
    finally:
        dist.destroy_process_group()


def current_store() -> Store | None:
    """Return the default group's store, where torch tells it; only used for better messages."""
    getter = getattr(dist.distributed_c10d, "_get_default_store", None)
    return getter() if getter is not None else None


@contextlib.contextmanager
def launcher_variables(device: torch.device) -> Iterator[None]:
    """Set, inside the block, what a launcher would: libraries of others read it."""
    variables = {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(device.index or 0),
        "DS_ACCELERATOR": device.type,
        # Programs that came with packages (ninja) stand beside an interpreter not on PATH.
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def device_uuid(index: int) -> str:
    """Return the id of a CUDA device, the same in every process that sees it."""
    return str(torch.cuda.get_device_properties(index).uuid)


def return_freed_pages(*, above_bytes: int) -> None:
    """Make the C library give freed buffers above this size back at once, where it is glibc.

    Ranks normally keep them, since fresh pages cost more than copies; states on disk need the room.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, above_bytes)
