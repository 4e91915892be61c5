"""A gang on local Ray: what tasks are given, and how failures of a rank end."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rayzero.cluster.gang import Gang, open_gang
from rayzero.cluster.session import Session
from rayzero.errors import ClusterError, GangError
from rayzero.records import Progress, Status
from tests.cluster import tasks
from tests.cluster.conftest import DEAD_ADDRESS, local_cell, session_that_leaves_nothing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Open local Ray, with an environment that names a dead cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", DEAD_ADDRESS)
        with session_that_leaves_nothing(local_cell().cluster) as session:
            yield session


@pytest.fixture(scope="module")
def gang(session: Session) -> Iterator[Gang]:
    """Open three ranks that no test may break."""
    with open_gang(session, local_cell(3, MARK="set by cluster.env")) as gang:
        yield gang


@pytest.fixture
def fragile(session: Session) -> Iterator[Gang]:
    """Open three ranks to break; afterwards no process of theirs may be left."""
    with open_gang(session, local_cell(3)) as gang:
        yield gang
    assert [found.pid for found in gang.whereabouts if psutil.pid_exists(found.pid)] == []


def test_each_run_has_a_working_process_group_of_its_own(gang: Gang) -> None:
    for value, total in ((1.0, 6.0), (2.0, 9.0)):
        results = gang.run(tasks.add_up, value, timeout_s=30)
        assert results == [(rank, 3, total) for rank in range(3)]


def test_a_task_without_group_has_none(gang: Gang) -> None:
    assert gang.run(tasks.has_group, timeout_s=30, join=False) == [False] * 3
    assert gang.run(tasks.has_group, timeout_s=30) == [True] * 3


def test_a_run_costs_little(gang: Gang) -> None:
    start = time.monotonic()
    assert gang.run(tasks.nothing, timeout_s=30) == [0, 1, 2]
    assert time.monotonic() - start < 5.0


def test_the_environment_is_there_before_the_process_starts(gang: Gang) -> None:
    for node, environment, num_threads in gang.run(tasks.process_of, timeout_s=30):
        assert node == "node0"
        assert environment["MARK"] == "set by cluster.env"
        assert environment["MALLOC_MMAP_THRESHOLD_"] == "1073741824"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert num_threads == 1


def test_ranks_compete_for_cores_as_the_driver_does(gang: Gang) -> None:
    assert gang.run(tasks.niceness, timeout_s=30) == [os.nice(0)] * 3


def test_the_last_progress_of_rank_0_arrives_and_costs_the_rank_nothing(gang: Gang) -> None:
    seen: list[Progress] = []
    costs = gang.run(tasks.report, 1000, timeout_s=30, on_progress=seen.append)
    assert [progress.step for progress in seen] == [999]
    assert max(costs) < 1e-3


def test_a_gang_serves_cells_with_the_same_ranks_only(gang: Gang) -> None:
    same = local_cell(3, MARK="set by cluster.env")
    assert gang.fits(same)
    assert gang.fits(local_cell(3, tp=1, MARK="set by cluster.env"))
    assert not gang.fits(local_cell(2, MARK="set by cluster.env"))
    assert not gang.fits(local_cell(3, MARK="another"))


def test_a_rank_that_raises_is_named_with_its_error(fragile: Gang) -> None:
    start = time.monotonic()
    with pytest.raises(GangError) as caught:
        fragile.run(tasks.raise_on, 1, ValueError("the planted fault"), timeout_s=60)
    assert time.monotonic() - start < 10
    error = caught.value
    assert (error.status, error.rank) == (Status.FAILED, 1)
    assert "ValueError: the planted fault" in error.cause
    assert "tasks.py" in error.details
    assert not fragile.alive
    assert not fragile.fits(local_cell(3))
    with pytest.raises(ClusterError, match="open_gang"):
        fragile.run(tasks.nothing, timeout_s=10)


def test_a_rank_that_dies_is_blamed_and_not_its_neighbours(fragile: Gang) -> None:
    start = time.monotonic()
    with pytest.raises(GangError) as caught:
        fragile.run(tasks.exit_on, 1, timeout_s=60)
    assert time.monotonic() - start < 10
    assert (caught.value.status, caught.value.rank) == (Status.WORKER_LOST, 1)
    assert str(fragile.whereabouts[1].pid) in caught.value.cause


def test_a_signal_is_named_and_its_log_kept(fragile: Gang) -> None:
    with pytest.raises(GangError) as caught:
        fragile.run(tasks.abort_on, 2, timeout_s=60)
    assert (caught.value.status, caught.value.rank) == (Status.WORKER_LOST, 2)
    assert "SIGABRT" in caught.value.cause
    assert "Fatal Python error: Aborted" in caught.value.details


def test_a_rank_that_hangs_is_found_by_its_stack(fragile: Gang) -> None:
    with pytest.raises(GangError) as caught:
        fragile.run(tasks.sleep_on, 2, timeout_s=1.5)
    assert (caught.value.status, caught.value.rank) == (Status.TIMEOUT, 2)
    assert "1.5 s" in caught.value.cause
    assert "time.sleep(300)" in caught.value.details
    assert "dist.barrier()" in caught.value.details


def test_closing_lets_writers_finish(session: Session, tmp_path: Path) -> None:
    with open_gang(session, local_cell(1)) as gang:
        gang.run(tasks.write_late, str(tmp_path), timeout_s=30)
    assert len((tmp_path / "rank0").read_text().splitlines()) == 10


def test_too_many_ranks_are_refused_at_once(session: Session) -> None:
    start = time.monotonic()
    with pytest.raises(ClusterError, match=r"asked for 10000 CPU ranks.*available \d+"):
        open_gang(session, local_cell(10_000))
    assert time.monotonic() - start < 10


def test_cuda_visible_devices_is_left_to_ray(session: Session) -> None:
    with pytest.raises(ClusterError, match=r"cluster\.env\.CUDA_VISIBLE_DEVICES=0"):
        open_gang(session, local_cell(1, CUDA_VISIBLE_DEVICES="0"))
