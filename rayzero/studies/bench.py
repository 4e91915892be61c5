"""The verb bench: our engine and its peers side by side, in turn, each time in new processes.

[Note: what is fair]
All engines train the same weights on the same batches with the same optimizer, on the same kind of
ranks. A round measures each engine once: fresh rank processes, build, warm-up (left out), timed
steps; nothing of another engine is in memory or running then. Rounds follow one another, every
other one in reverse, so a drift of the machine hits all alike, and ratios are taken inside rounds.
The high-water mark of resident memory is that of a process in which no other engine has run.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from rayzero.config.bench import Contender
from rayzero.config.build import to_plain
from rayzero.config.cell import CellConfig
from rayzero.errors import CombinationError, RayzeroError
from rayzero.records import CellRecord, Status
from rayzero.report.terminal import default_console
from rayzero.rows import asked_row
from rayzero.run import CellRunner, compute_only_runner
from rayzero.studies.bench_machine import describe_machine
from rayzero.studies.bench_plan import Setting, cell_of, in_turn, quick, settings_of
from rayzero.studies.bench_results import Results
from rayzero.studies.bench_rows import Measured
from rayzero.tracking.mlflow_tracker import open_tracker
from rayzero.tracking.tracker import End


def main(config: CellConfig) -> int:
    """Measure, write and print; return 0 if every engine that can run did, with equal losses."""
    if config.bench.quick:
        config = quick(config)
    console, output = default_console(), Path(config.run.output)
    plain = to_plain(config)
    assert isinstance(plain, dict)
    with open_tracker(config.tracking, output) as tracker, Race(config, console) as race:
        about = config.experiment
        tracker.open_sweep(about.name, about.question, plain, {"kind": "bench"})
        results = Results(output / "bench", head=race.head, judge=not config.bench.quick)
        for setting in settings_of(config.bench):
            for measured in race.rounds(setting):
                results.keep(measured)
            results.track(tracker)
        tracker.close_sweep(End.FINISHED if results.is_well else End.FAILED, results.folder)
    results.say(console)
    for problem in tracker.problems:
        console.print(problem, markup=False, highlight=False)
    return 0 if results.is_well else 1


class Race:
    """Measures engines in turn on one connection to the cluster. See [Note: what is fair]."""

    def __init__(self, config: CellConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._runner = CellRunner()
        self._reference = compute_only_runner()
        self._is_fresh = config.bench.fresh
        self._world = 0
        self.head: list[str] = []

    def rounds(self, setting: Setting) -> Iterator[list[Measured]]:
        """Measure all engines, round by round; yield after each round what there is so far."""
        bench = self._config.bench
        records: dict[Contender, list[CellRecord]] = {c: [] for c in bench.contenders}
        for number in range(bench.rounds):
            for contender in in_turn(bench.contenders, number):
                if all(r.row.status == Status.OK.value for r in records[contender]):
                    record = self._measure(setting, contender)
                    records[contender].append(record)
                    self._say(
                        f"{setting.name} round {number + 1}/{bench.rounds}", contender, record
                    )
            yield [
                Measured(setting=setting, contender=contender, records=tuple(found))
                for contender, found in records.items()
            ]

    def __enter__(self) -> Self:
        """Connect to the cluster; raise ClusterError where it cannot be reached."""
        cluster = self._config.cluster
        self._console.print(self._runner.open(cluster), markup=False, highlight=False)
        self._world = self._runner.world(cluster)
        self.head = describe_machine(self._config, self._runner.hardware(cluster), self._world)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reference.close()
        self._runner.close()

    def _measure(self, setting: Setting, contender: Contender) -> CellRecord:
        """Run one engine's cell in new processes; what goes wrong becomes the record's status."""
        runner = self._reference if contender.engine is None else self._runner
        try:
            config = cell_of(self._config, setting, contender, world=self._world)
            record = runner.run(config)
            # What other engines left in a process is not this one's memory.
            row = record.row if self._is_fresh else replace(record.row, peak_host_bytes=None)
            return replace(record, row=row)
        except CombinationError as error:
            return self._unanswered(Status.IMPOSSIBLE, error)
        except RayzeroError as error:
            return self._unanswered(Status.FAILED, error)
        finally:
            if self._is_fresh:
                runner.end_ranks()

    def _unanswered(self, status: Status, error: RayzeroError) -> CellRecord:
        row = asked_row(self._config, status=status, reason=str(error), dp=None)
        return CellRecord(row=row, fingerprint="", config={})

    def _say(self, where: str, contender: Contender, record: CellRecord) -> None:
        row = record.row
        outcome = f"{row.status}: {row.reason}"
        if row.step_s_median is not None:
            rss = f", {row.peak_host_bytes / 1e6:.0f} MB" if row.peak_host_bytes else ""
            outcome = f"{row.step_s_median:.3f} s{rss}"
        line = f"{where}: {contender.name} {contender.stage}: {outcome}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
