"""Tasks the tests give to a gang; plain functions, as a cell's own."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rayzero.cluster.rank import Member
from rayzero.records import Progress


def nothing(member: Member) -> int:
    return member.seat.rank


def add_up(member: Member, value: float) -> tuple[int, int, float]:
    total = torch.tensor([value + member.seat.rank])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def process_of(member: Member) -> tuple[str, dict[str, str], int]:
    started_with = Path("/proc/self/environ").read_text().split("\0")
    environment = dict(pair.split("=", 1) for pair in started_with if "=" in pair)
    return member.seat.node, environment, torch.get_num_threads()


def niceness(member: Member) -> int:
    return os.nice(0)


def has_group(member: Member) -> bool:
    return dist.is_initialized()


def raise_on(member: Member, rank: int, error: Exception) -> None:
    """One rank raises while the others wait for it."""
    if member.seat.rank == rank:
        raise error
    dist.barrier()


def exit_on(member: Member, rank: int) -> None:
    """One rank ends at its third step of ten."""
    for step in range(10):
        if member.seat.rank == rank and step == 3:
            os._exit(1)
        dist.all_reduce(torch.ones(1000))


def abort_on(member: Member, rank: int) -> None:
    if member.seat.rank == rank:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def sleep_on(member: Member, rank: int) -> None:
    if member.seat.rank == rank:
        time.sleep(300)
    dist.barrier()


def report(member: Member, num_steps: int) -> float:
    """Report progress and return what one call cost, in seconds."""
    start = time.perf_counter()
    for step in range(num_steps):
        member.progress(Progress(step=step, num_steps=num_steps, loss=1.0, tokens_per_s=0.0))
    cost = (time.perf_counter() - start) / num_steps
    time.sleep(0.7)
    return cost


def write_late(member: Member, folder: str) -> None:
    """Leave a writer behind that is not done when the task is, and work for the very end."""
    path = Path(folder) / f"rank{member.seat.rank}"

    def write() -> None:
        with path.open("w") as file:
            for line in range(10):
                file.write(f"{line}\n")
                time.sleep(0.1)

    threading.Thread(target=write).start()


def fill_memory(member: Member, num_bytes: int) -> None:
    held = []
    for _ in range(num_bytes >> 24):
        held.append(torch.ones(1 << 22))
        time.sleep(0.02)
    time.sleep(60)
