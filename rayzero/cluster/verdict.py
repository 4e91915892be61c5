"""Say what happened to a gang: who is to blame, with which status, in one line and in full.

A rank that dies takes its neighbours' connections with it, and their errors often arrive first. So
a dead process comes before an exception, and an exception before one that only speaks of others.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import ray.exceptions

from rayzero.cluster.rank import Failure, Whereabouts
from rayzero.errors import GangError
from rayzero.records import Status

LOG_LINES = 40
_SIGNAL = re.compile(r"\*\*\* (SIG[A-Z]+) received")
_EXIT_CODE = re.compile(r"exit code (-?\d+)")
_RAY_OUT_OF_MEMORY = ("running low on memory", "oom killed", "memory monitor")


class Weight(IntEnum):
    """How much a trouble says about its own rank; the lowest is blamed."""

    LOST = 0
    RAISED = 1
    NEIGHBOURS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What one rank's call came to."""

    rank: int
    status: Status
    cause: str
    details: str
    weight: Weight
    unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What can be known about the ranks' processes from outside."""

    whereabouts: Sequence[Whereabouts]
    """By rank; empty while the gang is being started."""
    names: Sequence[str]
    """How each rank is called in messages."""
    log_folder: Path | None
    num_oom_kills: int
    """The kernel's count of processes it killed for lack of memory, before the call."""


def blame(troubles: Sequence[Trouble]) -> GangError:
    """Turn the troubles of one call into the error of the guilty rank."""
    guilty = min(troubles, key=lambda trouble: (trouble.weight, trouble.unix_s, trouble.rank))
    others = [t for t in sorted(troubles, key=lambda t: t.rank) if t.rank != guilty.rank]
    lines = [guilty.details, *(f"also: {trouble.cause}" for trouble in others)]
    return GangError(
        guilty.cause, status=guilty.status, rank=guilty.rank, details="\n".join(lines).strip()
    )


def raised(rank: int, failure: Failure, scene: Scene) -> Trouble:
    """Judge an exception that the rank itself caught."""
    return Trouble(
        rank=rank,
        status=failure.status,
        cause=f"{scene.names[rank]}: {failure.message}",
        details=failure.traceback,
        weight=Weight.NEIGHBOURS if failure.is_neighbours else Weight.RAISED,
        unix_s=failure.unix_s,
    )


def lost(rank: int, error: Exception, scene: Scene, *, unix_s: float) -> Trouble:
    """Judge an error of Ray: the rank's process or node is gone, or a value cannot travel."""
    name = scene.names[rank]
    if isinstance(error, ray.exceptions.RayTaskError):
        lines = [line for line in str(error).splitlines() if line.strip()]
        cause = f"{name}: {lines[-1].strip() if lines else type(error).__name__}"
        status, weight = Status.FAILED, Weight.RAISED
    elif _is_out_of_memory(error):
        cause = f"{name}: Ray ended its process because the node ran low on memory"
        status, weight = Status.OUT_OF_MEMORY, Weight.LOST
    elif scene.log_folder is not None and num_oom_kills() > scene.num_oom_kills:
        cause = f"{name}: the kernel killed a process of this machine for lack of memory"
        status, weight = Status.OUT_OF_MEMORY, Weight.LOST
    else:
        cause = f"{name}: {_end_of_process(rank, error, scene)}"
        status, weight = Status.WORKER_LOST, Weight.LOST
    details = "\n".join(filter(None, (str(error), error_log(rank, scene))))
    return Trouble(
        rank=rank, status=status, cause=cause, details=details, weight=weight, unix_s=unix_s
    )


def num_oom_kills() -> int:
    """Return how many processes the kernel of this machine has killed for lack of memory."""
    path = Path("/proc/vmstat")
    found = (
        re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    )
    return int(found.group(1)) if found else 0


def error_log(rank: int, scene: Scene) -> str:
    """Return the end of what the rank's process wrote to standard error; empty if out of reach."""
    if scene.log_folder is None or not scene.whereabouts:
        return ""
    files = sorted(scene.log_folder.glob(f"worker-*-{scene.whereabouts[rank].pid}.err"))
    lines = files[-1].read_text(errors="replace").splitlines() if files else []
    return "\n".join([line for line in lines if not line.startswith(":")][-LOG_LINES:])


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, ray.exceptions.OutOfMemoryError) or any(
        words in text for words in _RAY_OUT_OF_MEMORY
    )


def _end_of_process(rank: int, error: Exception, scene: Scene) -> str:
    signal = _SIGNAL.search(error_log(rank, scene))
    if signal:
        return f"its process died of signal {signal.group(1)}"
    code = _EXIT_CODE.search(str(error))
    if code:
        return f"its process ended with exit code {code.group(1)}"
    text = str(error).lower()
    if "node" in text and ("node died" in text or "node was" in text or "node has" in text):
        return "its node is gone"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "its node cannot be reached"
    return "its process ended without a word (killed, or os._exit)"
