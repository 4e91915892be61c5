"""One cell: see that it fits, have the ranks run it, and make their reports one record."""

import time
import warnings
from collections.abc import Callable

from rayzero.cluster.gang import Gang, open_gang
from rayzero.cluster.placement import PlacementNotice, warning_of
from rayzero.cluster.seating import Seating
from rayzero.cluster.session import Session, open_session
from rayzero.cluster.tasks import (
    RankTask,
    compute_cell,
    dry_run,
    observe_cell,
    train_cell,
    with_same_sources,
)
from rayzero.config.build import to_plain
from rayzero.config.cell import CellConfig
from rayzero.config.cluster import ClusterConfig, ClusterKind, Device
from rayzero.config.zero import Place
from rayzero.errors import ConfigError, GangError
from rayzero.records import (
    Alteration,
    CellRecord,
    CellRow,
    DryRunReport,
    Observation,
    Progress,
    RankReport,
    Status,
)
from rayzero.rows import measured_row, planned_row, slowest_steps
from rayzero.sources import sources_hash
from rayzero.theory.memory import cell_state_bytes

GB = 1e9


class CellRunner:
    """Runs cells one after the other. Ray stays up, and the ranks as long as the next cell fits."""

    def __init__(self, task: RankTask = train_cell) -> None:
        self._task = task
        self._session: Session | None = None
        self._gang: Gang | None = None

    def open(self, cluster: ClusterConfig) -> str:
        """Connect to the cluster; return in a sentence what it offers and what was chosen."""
        session = self._connected(cluster)
        return f"{session.note}: {session.seat(cluster).note}"

    def world(self, cluster: ClusterConfig) -> int:
        """Return the number of ranks; raise ClusterError where there are too few devices."""
        return self._connected(cluster).world_size(cluster)

    def hardware(self, cluster: ClusterConfig) -> str:
        """Describe the machines: equal texts where measurements may be compared."""
        return " | ".join(self._connected(cluster).inventory.hardware())

    def run(
        self, config: CellConfig, *, on_progress: Callable[[Progress], None] | None = None
    ) -> CellRecord:
        """Measure one cell; what goes wrong on the ranks becomes the record's status."""
        started_unix_s = time.time()
        session = self._connected(config.cluster)
        seating = session.seat(config.cluster)
        refusal = why_it_cannot_fit(config, seating)
        if refusal:
            row = planned_row(config, seating.world, status=Status.IMPOSSIBLE, reason=refusal)
            return record_of(config, row, started_unix_s=started_unix_s)
        warning = warning_of(seating, config)
        if warning:
            warnings.warn(warning, PlacementNotice, stacklevel=2)
        try:
            gang = self._gang_for(config, session)
            start_s = time.monotonic()
            reports = gang.run(
                with_same_sources,
                self._task,
                sources_hash(),
                config,
                timeout_s=config.run.cell_timeout_s,
                on_progress=on_progress,
            )
            wall_s = time.monotonic() - start_s
        except GangError as error:
            row = planned_row(config, seating.world, status=error.status, reason=error.cause)
            return record_of(config, row, started_unix_s=started_unix_s, log=error.details)
        row = measured_row(config, reports, devices=devices_of(seating), wall_s=wall_s)
        return record_of(config, row, started_unix_s=started_unix_s, reports=tuple(reports))

    def observe(self, config: CellConfig, alteration: Alteration) -> list[Observation]:
        """Train an experiment's cell on the ranks and return what each saw; may raise GangError."""
        gang = self._gang_for(config, self._connected(config.cluster))
        observations: list[Observation] = gang.run(
            with_same_sources,
            observe_cell,
            sources_hash(),
            config,
            alteration,
            timeout_s=config.run.cell_timeout_s,
        )
        return observations

    def end_ranks(self) -> None:
        """End the ranks; the next cell starts in new processes."""
        gang, self._gang = self._gang, None
        if gang is not None:
            gang.close()

    def close(self) -> None:
        """End the ranks and the Ray we started."""
        self.end_ranks()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _connected(self, cluster: ClusterConfig) -> Session:
        if self._session is not None and self._session.serves(cluster):
            return self._session
        if cluster.kind is ClusterKind.PROFILE:
            raise ConfigError(
                f"cluster={cluster.name} is a profile for the planner; to run on such machines "
                "add cluster.kind=local, or cluster.kind=address cluster.address=HOST:PORT"
            )
        self.close()
        self._session = open_session(cluster)
        return self._session

    def _gang_for(self, config: CellConfig, session: Session) -> Gang:
        """Keep the ranks if the cell fits them, else start others."""
        if self._gang is None or not self._gang.fits(config):
            self.end_ranks()
            self._gang = open_gang(session, config)
        return self._gang


def compute_only_runner() -> CellRunner:
    """Return a runner whose cells compute and update their share, and send nothing."""
    return CellRunner(compute_cell)


def rehearse(config: CellConfig) -> DryRunReport:
    """Play the rank that the group dryrun names, without values and without machines."""
    return dry_run(config)


def why_it_cannot_fit(config: CellConfig, seating: Seating) -> str:
    """Hold the predicted model states against the memory there is; empty where they may fit.

    Only what is certain is refused: activations come on top, and what is offloaded or built by a
    user's factory is not predicted here.
    """
    places = (config.offload.optimizer, config.offload.params)
    if config.model.factory is not None or any(place is not Place.NONE for place in places):
        return ""
    rank_bytes = cell_state_bytes(config, seating.world)
    for node in seating.nodes:
        on_gpu = seating.device is Device.CUDA
        memory = node.survey.device_memory_bytes if on_gpu else node.survey.host_memory_bytes
        sharers = 1 if on_gpu else seating.ranks_per_node
        if memory is not None and rank_bytes * sharers > config.run.memory_fraction * memory:
            what = "device memory" if on_gpu else "RAM"
            return (
                f"predicted model states of {sharers} x {gigabytes(rank_bytes)} = "
                f"{gigabytes(rank_bytes * sharers)} on {node.name} exceed "
                f"run.memory_fraction={config.run.memory_fraction:g} of its "
                f"{gigabytes(memory)} of {what} ({gigabytes(config.run.memory_fraction * memory)})"
            )
    return ""


def devices_of(seating: Seating) -> str:
    """Say what the ranks run on, such as 8 x NVIDIA H200 on 1 node."""
    name = seating.nodes[0].survey.device_name
    kind = "" if seating.device is Device.CUDA else "CPU ranks, "
    num_nodes = len(seating.nodes)
    return f"{seating.world} x {kind}{name} on {num_nodes} node{'s' if num_nodes > 1 else ''}"


def record_of(
    config: CellConfig,
    row: CellRow,
    *,
    started_unix_s: float,
    reports: tuple[RankReport, ...] = (),
    log: str = "",
) -> CellRecord:
    """Put a row and what is behind it together; the fingerprint is the sweep's business."""
    plain = to_plain(config)
    assert isinstance(plain, dict)
    return CellRecord(
        row=row,
        fingerprint="",
        config=plain,
        samples=slowest_steps(reports) if reports else (),
        reports=reports,
        started_unix_s=started_unix_s,
        log=log,
    )


def gigabytes(num_bytes: float) -> str:
    """Write bytes in units of 1e9."""
    return f"{num_bytes / GB:.3g} GB"
