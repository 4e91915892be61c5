"""Two Ray nodes on this machine: where ranks sit, in which order, and what a lost node does."""

import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from rayzero.cluster.gang import Gang, open_gang
from rayzero.cluster.session import Session
from rayzero.errors import GangError
from rayzero.records import Status
from tests.cluster import tasks
from tests.cluster.conftest import emulated_cell, session_that_leaves_nothing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Open two emulated nodes."""
    with session_that_leaves_nothing(emulated_cell(2).cluster) as session:
        yield session


def places(gang: Gang) -> list[tuple[int, str]]:
    return [(seat.rank, seat.node) for seat in gang.seats]


def test_tensor_parallel_groups_stay_inside_nodes_in_every_gang(session: Session) -> None:
    expected = [(0, "node0"), (1, "node0"), (2, "node1"), (3, "node1")]
    for _ in range(2):
        with open_gang(session, emulated_cell(2, tp=2)) as gang:
            assert places(gang) == expected
            assert gang.warning == ""
            nodes = [node for node, _, _ in gang.run(tasks.process_of, timeout_s=30)]
            assert nodes == ["node0", "node0", "node1", "node1"]


def test_a_group_across_nodes_works_with_a_warning(session: Session) -> None:
    with open_gang(session, emulated_cell(2, 1, tp=2)) as gang:
        assert "parallel.tp=2" in gang.warning
        assert gang.run(tasks.add_up, 0.0, timeout_s=30) == [(0, 2, 1.0), (1, 2, 1.0)]
        assert not gang.fits(emulated_cell(2, 1, tp=1))


def kill_ray_of(node: str) -> None:
    """Kill the Ray daemon of a node, as a power cut would."""
    daemons = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
    (lost,) = [p for p in daemons if any(node in word for word in p.cmdline())]
    lost.kill()


def test_a_lost_node_is_noticed_in_seconds(session: Session) -> None:
    # The last test of this file: nothing can be placed on node1 after it.
    with open_gang(session, emulated_cell(2, 1)) as gang:
        threading.Timer(1.0, kill_ray_of, ("node1",)).start()
        start = time.monotonic()
        with pytest.raises(GangError) as caught:
            gang.run(tasks.sleep_on, 0, timeout_s=90)
        assert time.monotonic() - start < 20
        assert (caught.value.status, caught.value.rank) == (Status.WORKER_LOST, 1)
        assert [found.pid for found in gang.whereabouts if psutil.pid_exists(found.pid)] == []
