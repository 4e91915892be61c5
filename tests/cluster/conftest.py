"""Cells and open sessions for the cluster's tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from rayzero.cluster.session import Session, open_session
from rayzero.config.cell import CellConfig
from rayzero.config.cluster import ClusterConfig, ClusterKind, Device
from rayzero.config.parallel import ParallelConfig

START_S = 100.0
"""Generous, since tests may share their cores with others."""
DEAD_ADDRESS = "127.0.0.1:1"


def local_cell(ranks: int | None = None, *, tp: int = 1, **env: str) -> CellConfig:
    """Ask for CPU ranks on this machine."""
    return CellConfig(
        cluster=ClusterConfig(
            ranks_per_node=ranks, device=Device.CPU, env=env, start_timeout_s=START_S
        ),
        parallel=ParallelConfig(tp=tp),
    )


def emulated_cell(num_nodes: int, ranks: int | None = None, *, tp: int = 1) -> CellConfig:
    """Ask for CPU ranks on several Ray nodes of this machine."""
    return CellConfig(
        cluster=ClusterConfig(
            name="emulated",
            kind=ClusterKind.EMULATED,
            num_nodes=num_nodes,
            ranks_per_node=ranks,
            start_timeout_s=START_S,
        ),
        parallel=ParallelConfig(tp=tp),
    )


@contextmanager
def session_that_leaves_nothing(config: ClusterConfig) -> Iterator[Session]:
    """Open a session; after it, no process of Ray and none of its ranks may be left."""
    before = set(psutil.Process().children(recursive=True))
    with open_session(config) as session:
        yield session
        started = set(psutil.Process().children(recursive=True)) - before
    assert started, "the session had no processes: this check would see nothing"
    assert [process for process in started if process.is_running()] == []
