"""Who is blamed when several ranks fail at once."""

import pytest
import torch
import torch.distributed as dist

from rayzero.cluster.rank import failure_of
from rayzero.cluster.verdict import Trouble, Weight, blame
from rayzero.errors import CollectiveError
from rayzero.records import Status

CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:45952"


def trouble(rank: int, weight: Weight, unix_s: float) -> Trouble:
    return Trouble(
        rank=rank,
        status=Status.FAILED,
        cause=f"rank {rank}",
        details=f"details of {rank}",
        weight=weight,
        unix_s=unix_s,
    )


def test_the_dead_rank_is_blamed_though_its_neighbours_spoke_first() -> None:
    error = blame(
        [
            trouble(0, Weight.NEIGHBOURS, 1.0),
            trouble(1, Weight.LOST, 2.0),
            trouble(2, Weight.RAISED, 1.5),
        ]
    )
    assert error.rank == 1
    assert "also: rank 0" in error.details


def test_the_first_of_equal_errors_is_blamed() -> None:
    assert blame([trouble(0, Weight.RAISED, 2.0), trouble(3, Weight.RAISED, 1.0)]).rank == 3


@pytest.mark.parametrize(
    "error",
    [RuntimeError(CLOSED), dist.DistBackendError("NCCL error"), CollectiveError("a peer is gone")],
)
def test_errors_of_a_closed_connection_speak_of_others(error: Exception) -> None:
    assert failure_of(error).is_neighbours


@pytest.mark.parametrize(
    "error",
    [ValueError("connection closed by peer"), RuntimeError("shape mismatch"), SystemExit(3)],
)
def test_other_errors_speak_of_their_own_rank(error: BaseException) -> None:
    failure = failure_of(error)
    assert not failure.is_neighbours
    assert failure.status is Status.FAILED
    assert failure.message.startswith(type(error).__name__)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        dist.DistBackendError("NCCL error: ncclUnhandledCudaError: out of memory"),
    ],
)
def test_want_of_memory_is_told_from_other_errors(error: Exception) -> None:
    failure = failure_of(error)
    assert failure.status is Status.OUT_OF_MEMORY
    assert not failure.is_neighbours
