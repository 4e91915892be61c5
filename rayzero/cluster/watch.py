"""Wait for one call on all ranks: results by rank, or in seconds the error of the guilty one."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rayzero.cluster.rank import Failure
from rayzero.cluster.verdict import Scene, Trouble, Weight, blame, lost, raised
from rayzero.errors import GangError
from rayzero.records import Progress, Status

TICK_S = 0.2
SETTLE_S = 0.5
"""After a first error: how long others may bring a better one."""
LONG_SETTLE_S = 4.0
"""The same where all errors so far only say that another rank is gone (a lost node shows late)."""
PROGRESS_S = 0.5
EVIDENCE_S = 2.0
WATCH_GROUP = "watch"
_OWN_FRAMES = "rayzero/cluster/rank.py"
_WAITING_FRAMES = ("torch/distributed/", "rayzero/dist/")


class Watch:
    """The driver's eye on a gang's actors during one call."""

    def __init__(
        self,
        actors: Sequence[Any],
        scene: Scene,
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._actors = actors
        self._scene = scene
        self._on_progress = on_progress
        self._seen = 0
        self._next_look = time.monotonic() + PROGRESS_S

    def results(self, calls: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
        """Return the results by rank; raise GangError. `what` names the call in a timeout."""
        deadline = time.monotonic() + timeout_s
        pending = {call: rank for rank, call in enumerate(calls)}
        results: list[Any] = [None] * len(calls)
        while pending:
            for call in _ready(list(pending), TICK_S):
                rank = pending.pop(call)
                outcome = self._outcome(call, rank)
                if isinstance(outcome, Trouble):
                    raise blame(self._settle(outcome, pending))
                results[rank] = outcome
            if pending and time.monotonic() > deadline:
                raise self._hung(sorted(pending.values()), timeout_s, what)
            self._look_for_progress()
        self._look_for_progress(last=True)
        return results

    def _outcome(self, call: Any, rank: int) -> Any:
        try:
            value = ray.get(call)
        except ray.exceptions.RayError as error:
            return lost(rank, error, self._scene, unix_s=time.time())
        return raised(rank, value, self._scene) if isinstance(value, Failure) else value

    def _settle(self, first: Trouble, pending: dict[Any, int]) -> list[Trouble]:
        """Collect what else goes wrong in the moments after the first trouble."""
        troubles, start = [first], time.monotonic()
        while pending:
            others_only = all(t.weight is Weight.NEIGHBOURS for t in troubles)
            if time.monotonic() - start > (LONG_SETTLE_S if others_only else SETTLE_S):
                break
            for call in _ready(list(pending), 0.05):
                outcome = self._outcome(call, pending.pop(call))
                if isinstance(outcome, Trouble):
                    troubles.append(outcome)
        return troubles

    def _look_for_progress(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._on_progress is None or (now < self._next_look and not last):
            return
        self._next_look = now + PROGRESS_S
        call = self._ask(0, "latest")
        if not ray.wait([call], timeout=TICK_S)[0]:
            return
        try:
            number, progress = ray.get(call)
        except ray.exceptions.RayError:
            return  # The rank is gone; its own call says why.
        if progress is not None and number > self._seen:
            self._seen = number
            self._on_progress(progress)

    def _hung(self, ranks: Sequence[int], timeout_s: float, what: str) -> GangError:
        """Ask the ranks that hang where they are, and blame one that waits for nobody."""
        stacks = self._evidence(ranks, "stack")
        lines = self._evidence(ranks, "waiting")
        busy = [rank for rank in ranks if not _waits_for_others(stacks[rank])]
        guilty = busy[0] if busy else ranks[0]
        names = ", ".join(str(rank) for rank in ranks)
        details = [
            f"{self._scene.names[rank]} waits for: {lines[rank] or 'nothing published'}\n"
            f"{_of_task(stacks[rank]) or '(no answer: its process is stopped or holds the GIL)'}"
            for rank in ranks
        ]
        return GangError(
            f"{self._scene.names[guilty]}: no end of {what} after {timeout_s:g} s "
            f"(ranks still at it: {names})",
            status=Status.TIMEOUT,
            rank=guilty,
            details="\n".join(details),
        )

    def _evidence(self, ranks: Sequence[int], verb: str) -> dict[int, str]:
        calls = {self._ask(rank, verb): rank for rank in ranks}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=EVIDENCE_S)
        answers = dict.fromkeys(ranks, "")
        for call in ready:
            try:
                answers[calls[call]] = ray.get(call)
            except ray.exceptions.RayError as error:
                answers[calls[call]] = f"({type(error).__name__})"
        return answers

    def _ask(self, rank: int, verb: str) -> Any:
        """Call a verb that is answered while the rank works."""
        return getattr(self._actors[rank], verb).options(concurrency_group=WATCH_GROUP).remote()


def _ready(calls: list[Any], timeout_s: float) -> list[Any]:
    """Wait for at least one call, then take all that are done."""
    ready, rest = ray.wait(calls, num_returns=1, timeout=timeout_s)
    if ready and rest:
        ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
    return list(ready)


def _of_task(stack: str) -> str:
    """Cut off the frames above the task: Ray's and our own."""
    frames = stack.split("  File ")
    last = max((i for i, frame in enumerate(frames) if _OWN_FRAMES in frame), default=0)
    return "".join(f"  File {frame}" for frame in frames[last + 1 :])


def _waits_for_others(stack: str) -> bool:
    return any(words in _of_task(stack) for words in _WAITING_FRAMES)
