"""What ranks must do alike: succeed or fail together, so that none waits for another for ever."""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from rayzero.dist.comm import Communicator
from rayzero.errors import CheckpointError, DamagedCheckpointError

Result = TypeVar("Result")

AXES = ("replicate", "shard", "tp")
TEXT_BYTES = 512


class CheckpointNotice(UserWarning):
    """Something about a checkpoint that is allowed and worth knowing."""


def rank_of(comm: Communicator) -> int:
    """Return this rank's place in the mesh, which numbers the files of a checkpoint."""
    place = 0
    for axis in AXES:
        place = place * comm.size(axis) + comm.rank(axis)
    return place


def world_of(comm: Communicator) -> int:
    """Return the number of ranks in the mesh."""
    return comm.size("replicate") * comm.size("shard") * comm.size("tp")


def told(comm: Communicator, *numbers: float) -> list[list[float]]:
    """Return what every rank tells, by its place in the mesh."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    rows: list[list[float]] = comm.gather_rows(mine, axes=AXES).tolist()
    return rows


def said(comm: Communicator, text: str) -> list[str]:
    """Return what every rank says, by its place in the mesh; a few lines at most."""
    codes = text.encode("ascii", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES)
    return ["".join(chr(int(code)) for code in row).strip() for row in told(comm, *codes)]


def together(comm: Communicator, call: Callable[[], Result]) -> Result:
    """Return call(); where it raises on some rank, raise on all ranks an error of one kind."""
    results: list[Result] = []
    error: Exception | None = None
    try:
        results.append(call())
    except Exception as raised:
        error = raised
    flags = told(comm, error is not None, isinstance(error, DamagedCheckpointError))
    failed = [rank for rank, (flag, _) in enumerate(flags) if flag]
    if failed:
        texts = said(comm, str(error or ""))
        is_damage = any(damage for _, damage in flags)
        kind = DamagedCheckpointError if is_damage else CheckpointError
        if isinstance(error, kind):
            raise error
        raise kind(f"rank {failed[0]}: {texts[failed[0]]}") from error
    return results[0]


def notify(comm: Communicator, text: str) -> None:
    """Say something once, on the first rank."""
    if comm.is_first:
        warnings.warn(text, CheckpointNotice, stacklevel=2)
