"""A cell before it is run: its name, its fingerprint, and why it cannot run if it cannot."""

from dataclasses import dataclass, replace

from rayzero.config.build import Plain, build, build_groups
from rayzero.config.cell import CellConfig
from rayzero.errors import ClusterError, CombinationError, RayzeroError
from rayzero.records import CellRow, Status
from rayzero.rows import asked_row
from rayzero.run import CellRunner
from rayzero.sweep.names import varied_suffix
from rayzero.sweep.resume import fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """What is asked. config is None where `problem` says why it cannot run."""

    plain: Plain
    row: CellRow
    """The row without an answer; its `cell` is the name."""
    fingerprint: str
    config: CellConfig | None
    problem: RayzeroError | None

    @property
    def name(self) -> str:
        """Name of the cell, of its record and of its MLflow run."""
        return self.row.cell


def plan_cell(plain: Plain, *, shared: Plain, runner: CellRunner) -> PlannedCell:
    """Name a cell and see whether it fits the cluster; raise ConfigError for a bad value."""
    groups = build_groups(plain)
    config: CellConfig | None = None
    problem: RayzeroError | None = None
    dp: int | None = None
    try:
        candidate = build(plain)
        world = runner.world(candidate.cluster)
        dp = candidate.grid(world).dp
        candidate.batching(world)
        config = candidate
    except (CombinationError, ClusterError) as error:
        problem = error
    row = asked_row(groups, status=Status.IMPOSSIBLE, reason=str(problem or ""), dp=dp)
    return PlannedCell(
        plain=plain,
        row=replace(row, cell=row.cell + varied_suffix(plain, shared)),
        fingerprint=fingerprint(plain, hardware=runner.hardware(groups.cluster)),
        config=config,
        problem=problem,
    )
