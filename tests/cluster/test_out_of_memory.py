"""A rank that Ray ends for want of memory is told apart from one that crashed."""

import psutil
import pytest

from rayzero.cluster.gang import open_gang
from rayzero.errors import GangError
from rayzero.records import Status
from tests.cluster import tasks
from tests.cluster.conftest import local_cell, session_that_leaves_nothing

MARGIN_BYTES = 2 << 30


@pytest.mark.slow
def test_a_rank_killed_by_the_memory_monitor_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + MARGIN_BYTES) / memory.total
    if limit > 0.9:
        pytest.skip(f"only {memory.available >> 20} MiB are free, the margin needs 2 GiB and more")
    monkeypatch.setenv("RAY_memory_usage_threshold", str(limit))
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    cell = local_cell(1)
    with (
        session_that_leaves_nothing(cell.cluster) as session,
        pytest.raises(GangError, match="ran low on memory") as caught,
        open_gang(session, cell) as gang,
    ):
        gang.run(tasks.fill_memory, 2 * MARGIN_BYTES, timeout_s=60, join=False)
    assert (caught.value.status, caught.value.rank) == (Status.OUT_OF_MEMORY, 0)
