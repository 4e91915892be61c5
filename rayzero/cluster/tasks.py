"""What ranks can be asked to do: functions of a member, importable on every node."""

from collections.abc import Callable
from typing import Any

from rayzero.cluster.rank import Member
from rayzero.config.cell import CellConfig
from rayzero.errors import ClusterError
from rayzero.records import Alteration, DryRunReport, Observation, RankReport
from rayzero.sources import sources_hash
from rayzero.train import dryrun
from rayzero.train.cell import run_rank
from rayzero.train.engines import build_compute_only
from rayzero.train.observe import observe_rank

RankTask = Callable[[Member, CellConfig], RankReport]


def train_cell(member: Member, config: CellConfig) -> RankReport:
    """Build, train and measure one cell on one rank."""
    return run_rank(member, config)


def compute_cell(member: Member, config: CellConfig) -> RankReport:
    """Run the cell's compute and its share of the update alone: nothing is sent."""
    return run_rank(member, config, build=build_compute_only)


def dry_run(config: CellConfig) -> DryRunReport:
    """Play one rank of a cell in this process: it needs no gang and no memory."""
    return dryrun.dry_run(config)


def observe_cell(member: Member, config: CellConfig, alteration: Alteration) -> Observation:
    """Train a few steps of a cell under an altered door, and watch the last."""
    return observe_rank(member, config, alteration)


def with_same_sources(member: Member, task: Callable[..., Any], sources: str, *args: Any) -> Any:
    """Run a task; raise ClusterError where this rank has other code than the driver."""
    if sources_hash() != sources:
        raise ClusterError(
            f"{member.seat.node} has other sources of rayzero than the driver; install the same "
            "version on all nodes, or start again if files were edited meanwhile"
        )
    return task(member, *args)
