"""The gang: one actor per rank, started, used and ended together.

[Note: order of the end]
Leave the process group and let writers finish, then end the processes, then give the room back:
Ray kills whatever still runs in room that is given back. After a failure nothing is waited for,
since a survivor may hang in a collective: all processes are killed, the gang is not used again.
"""

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import psutil
import ray

from rayzero.cluster.placement import place, release, warning_of
from rayzero.cluster.rank import Whereabouts
from rayzero.cluster.roster import (
    check_distinct,
    names_of,
    rank_environment,
    rank_order,
    seats_of,
    start_actors,
)
from rayzero.cluster.session import Session
from rayzero.cluster.verdict import Scene, num_oom_kills
from rayzero.cluster.watch import Watch
from rayzero.config.cell import CellConfig
from rayzero.config.cluster import Device
from rayzero.dist.process import Seat
from rayzero.errors import ClusterError
from rayzero.records import Progress

STOP_S = 10.0
GONE_S = 5.0
ORPHAN_S = 2.0
RAY_PROCESS = "ray::"
GROUP_GRACE_S = 60.0
"""A collective may take longer than the cell, so that the driver's deadline comes first."""
CALL_NAMES = {
    "look_around": "the start of its process",
    "open_store": "opening the store",
    "join": "joining the process group",
    "perform": "its task",
    "leave": "leaving the process group",
}


class Gang:
    """`world` ranks on a cluster. Made by open_gang; a context manager."""

    def __init__(self, session: Session, cell: CellConfig) -> None:
        self.session = session
        self.seating = session.seat(cell.cluster)
        self.environment = rank_environment(cell.cluster, self.seating, session)
        self.warning = warning_of(self.seating, cell)
        self._tp_inside = self.seating.keeps_inside(cell.parallel.tp)
        self._config = cell.cluster
        self._generation = 0
        self._actors: list[Any] = []
        self.whereabouts: tuple[Whereabouts, ...] = ()
        self.seats: tuple[Seat, ...] = ()
        timeout_s = cell.cluster.start_timeout_s
        self._placement = place(self.seating, cell.parallel.tp, timeout_s=timeout_s)
        self.alive = True
        try:
            self._start(timeout_s)
        except BaseException:
            self.kill()
            raise

    @property
    def world(self) -> int:
        """All ranks."""
        return self.seating.world

    def fits(self, cell: CellConfig) -> bool:
        """Tell whether this gang may serve the cell: alive, same ranks, environment and threads.

        Any tp that stays inside a node is served by the same ranks: they are numbered node by node.
        """
        if not self.alive or not self.session.is_open or not self.session.serves(cell.cluster):
            return False
        seating = self.session.seat(cell.cluster)
        return (
            seating.device is self.seating.device
            and seating.nodes == self.seating.nodes
            and seating.ranks_per_node == self.seating.ranks_per_node
            and seating.keeps_inside(cell.parallel.tp) == self._tp_inside
            and rank_environment(cell.cluster, seating, self.session) == self.environment
            and cell.cluster.threads_per_rank == self._config.threads_per_rank
        )

    def run(
        self,
        task: Callable[..., Any],
        *args: Any,
        timeout_s: float,
        on_progress: Callable[[Progress], None] | None = None,
        join: bool = True,
    ) -> list[Any]:
        """Call task(member, *args) on every rank in a new process group; return results by rank.

        Raise GangError as soon as a rank raises, dies or is not done in timeout_s; the gang is then
        killed, as it is after KeyboardInterrupt. join=False runs the task without a process group.
        """
        if not self.alive or not self.session.is_open:
            raise ClusterError("this gang has ended; open a new one with open_gang")
        self._generation += 1
        start_s, group_s = self._config.start_timeout_s, timeout_s + GROUP_GRACE_S
        try:
            if join:
                self._all("join", self._generation, group_s, timeout_s=start_s)
            results = self._all("perform", task, args, timeout_s=timeout_s, on_progress=on_progress)
            if join:
                self._all("leave", timeout_s=start_s)
        except BaseException:
            self.kill()
            raise
        return results

    def close(self) -> None:
        """End all ranks gently. See [Note: order of the end]."""
        if not self.alive:
            return
        self.alive = False
        try:
            if self.session.is_open:
                stopped = [actor.call.remote("stop", STOP_S) for actor in self._actors]
                ray.wait(stopped, num_returns=len(stopped), timeout=STOP_S + 1.0)
        finally:
            self._end()

    def kill(self) -> None:
        """End all ranks at once."""
        self.alive = False
        self._end()

    def __enter__(self) -> "Gang":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()

    def _start(self, timeout_s: float) -> None:
        """Start the actors, number them, seat them around one store."""
        self._actors = start_actors(self._placement, self.seating, self.environment)
        on_gpu = self.seating.device is Device.CUDA
        found: list[Whereabouts] = self._all("look_around", on_gpu, timeout_s=timeout_s)
        order = rank_order(found, self.seating)
        self._actors = [self._actors[index] for index in order]
        self.whereabouts = tuple(found[index] for index in order)
        check_distinct(self.whereabouts)
        port = self._only(0, "open_store", timeout_s, timeout_s=timeout_s)
        self.seats = seats_of(self.whereabouts, self.seating, self._config, port)
        calls = [a.call.remote("connect", s, timeout_s) for a, s in self._pairs()]
        self._watch().results(calls, timeout_s=timeout_s, what="connecting to rank 0's store")

    def _all(
        self,
        verb: str,
        *args: Any,
        timeout_s: float,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Any]:
        calls = [actor.call.remote(verb, *args) for actor in self._actors]
        watch = self._watch(on_progress)
        return watch.results(calls, timeout_s=timeout_s, what=CALL_NAMES[verb])

    def _only(self, rank: int, verb: str, *args: Any, timeout_s: float) -> Any:
        call = self._actors[rank].call.remote(verb, *args)
        return self._watch().results([call], timeout_s=timeout_s, what=CALL_NAMES[verb])[0]

    def _pairs(self) -> list[tuple[Any, Seat]]:
        return list(zip(self._actors, self.seats, strict=True))

    def _watch(self, on_progress: Callable[[Progress], None] | None = None) -> Watch:
        scene = Scene(
            whereabouts=self.whereabouts,
            names=names_of(self.whereabouts, self.seating),
            log_folder=self.session.log_folder,
            num_oom_kills=num_oom_kills(),
        )
        return Watch(self._actors, scene, on_progress=on_progress)

    def _end(self) -> None:
        """Kill the processes, wait until they are gone, give the room back."""
        actors, self._actors = self._actors, []
        if not self.session.is_open:
            return
        for actor in actors:
            ray.kill(actor, no_restart=True)
        answers = [actor.latest.remote() for actor in actors]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=GONE_S)
        if self.session.on_this_machine:
            end_processes([found.pid for found in self.whereabouts])
        release(self._placement)


def open_gang(session: Session, cell: CellConfig) -> Gang:
    """Start the ranks a cell asks for; raise ClusterError where there is no room or one fails."""
    return Gang(session, cell)


def end_processes(pids: Sequence[int]) -> None:
    """Wait until ranks on this machine are gone; end those that a lost node left behind."""
    ranks = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank = psutil.Process(pid)
            ranks += [rank] if rank.name().startswith(RAY_PROCESS) else []
    _, left = psutil.wait_procs(ranks, timeout=ORPHAN_S)
    for rank in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    psutil.wait_procs(left, timeout=GONE_S)
