"""A campaign: the cells of a sweep, or one alone, on their way into matrix, report and MLflow."""

import math
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rayzero.config.build import Plain, build, build_groups
from rayzero.config.cell import CellConfig
from rayzero.errors import CombinationError, RayzeroError
from rayzero.records import CellRecord, CellRow, Status
from rayzero.report.terminal import default_console, print_matrix
from rayzero.run import CellRunner
from rayzero.sweep.costs import AROUND, REPORT, SET_UP, TRACKING, Costs
from rayzero.sweep.folder import SweepFolder, SweepNote, folder_path
from rayzero.sweep.planned import PlannedCell, plan_cell
from rayzero.sweep.progress import Display
from rayzero.sweep.results import Results
from rayzero.sweep.resume import ANSWERED, is_answered
from rayzero.tracking.mlflow_tracker import open_tracker
from rayzero.tracking.tracker import End, NullTracker, Tracker


class Campaign:
    """Runs cells in the order in which they come; a context manager that ends all it started.

    many is False for a single cell: then what cannot run raises, and nothing is skipped.
    """

    def __init__(
        self,
        shared: Plain,
        *,
        many: bool,
        command: Sequence[str],
        runner: CellRunner | None = None,
    ) -> None:
        self._shared = shared
        self._groups = build_groups(shared)
        self._many = many
        self._command = tuple(command)
        self._console = default_console()
        self._stack = ExitStack()
        self._folder = SweepFolder(folder_path(self._groups, many=many))
        self._results = Results(self._folder, question=self._groups.experiment.question)
        self._runner = runner or CellRunner()
        self._display = Display(self._console)
        self._tracker: Tracker = NullTracker()
        self._is_started = self._is_tracked = self._is_stopped = False
        self._planned: dict[str, PlannedCell] = {}
        self._costs = Costs()

    def expect(self, cells: Sequence[Plain]) -> None:
        """Check the next cells and make ready for them; raise before any of them has run."""
        for cell in cells:
            self._refuse_bad_values(cell)
        with self._costs.on(SET_UP):
            self._start()
        cells_planned = [self._plan(cell) for cell in cells]
        for planned in cells_planned:
            if planned.problem is not None and not self._many:
                raise planned.problem
            self._planned[planned.name] = planned
        self._display.expect(len(cells_planned))
        self._folder.note(self._note())
        if any(self._answer_before(planned) is None for planned in cells_planned):
            with self._costs.on(SET_UP):
                self._start_tracking()

    def run(self, cell: Plain) -> float:
        """Answer one cell; return its objective, to be minimised."""
        if self._is_stopped:
            return math.inf
        planned = self._plan(cell)
        before = self._answer_before(planned)
        record = before or self._measure(planned)
        with self._costs.on(TRACKING):
            row = self._results.add(record, pending=self._pending(without=planned.name))
        self._display.end(row, measured=before is None)
        self._is_stopped = self._groups.run.fail_fast and row.status not in ANSWERED
        return objective(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End ranks and Ray, write the report unless cut short, end MLflow's runs, unlock."""
        self._stack.__exit__(kind, error, trace)

    @property
    def exit_code(self) -> int:
        """0 if every cell that was asked ended ok or impossible."""
        answered = [r for r in self._results.records if r.row.status in ANSWERED]
        return 0 if len(answered) == len(self._planned) else 1

    def _refuse_bad_values(self, cell: Plain) -> None:
        """Raise ConfigError; but values that only do not fit together are a sweep's finding."""
        try:
            build(cell)
        except CombinationError:
            if not self._many:
                raise

    def _start(self) -> None:
        """Take the folder, MLflow and the cluster, in the order of what is refused fastest."""
        if self._is_started:
            return
        self._is_started = True
        enter = self._stack.enter_context
        enter(self._folder)
        self._tracker = enter(open_tracker(self._groups.tracking, Path(self._groups.run.output)))
        self._results.track(self._tracker)
        self._display = enter(Display(self._console))
        self._stack.push(self._leave)
        self._stack.callback(self._runner.close)
        self._display.say(self._runner.open(self._groups.cluster))
        # A kill ends like Ctrl-C. Only now: Ray sets its own handler, which aborts, as it starts.
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _start_tracking(self) -> None:
        """Open the sweep's run; a sweep that was answered before needs none."""
        if self._is_tracked:
            return
        self._is_tracked = True
        about = self._groups.experiment
        tags = {"cluster": self._groups.cluster.name, "folder": str(self._folder.path)}
        self._tracker.open_sweep(about.name, about.question, self._shared, tags)

    def _plan(self, cell: Plain) -> PlannedCell:
        return plan_cell(cell, shared=self._shared, runner=self._runner)

    def _pending(self, *, without: str) -> list[PlannedCell]:
        done = {record.row.cell for record in self._results.records} | {without}
        return [planned for name, planned in self._planned.items() if name not in done]

    def _answer_before(self, planned: PlannedCell) -> CellRecord | None:
        """Return the record of an earlier run that answers the same question."""
        if not (self._many and self._groups.run.resume):
            return None
        record = self._folder.find(planned.name)
        return record if is_answered(record, planned.fingerprint) else None

    def _measure(self, planned: PlannedCell) -> CellRecord:
        """Run a cell; whatever happens to it becomes its record."""
        self._display.begin(planned.name)
        with self._costs.on(TRACKING):
            self._results.begin(planned.name, planned.plain)
        if planned.config is None:
            return self._record(planned, CellRecord(row=planned.row, fingerprint="", config={}))
        try:
            config = self._placed(planned.config, planned.name)
            with self._costs.on(AROUND):
                record = self._runner.run(config, on_progress=self._display.step)
            self._costs.cell(record)
            return self._record(planned, record)
        except Exception as error:
            if isinstance(error, RayzeroError) and not self._many:
                raise
            row = replace(planned.row, status=Status.FAILED.value, reason=_first_line(error))
            log = traceback.format_exc()
            return self._record(planned, CellRecord(row=row, fingerprint="", config={}, log=log))

    def _placed(self, config: CellConfig, name: str) -> CellConfig:
        """Give each cell of a sweep a folder of its own for checkpoints."""
        folder = config.run.checkpoint_folder
        if not self._many or folder is None:
            return config
        return replace(config, run=replace(config.run, checkpoint_folder=str(Path(folder) / name)))

    def _record(self, planned: PlannedCell, record: CellRecord) -> CellRecord:
        """Put the question's name, fingerprint and config on an answer."""
        return replace(
            record,
            row=replace(record.row, cell=planned.name),
            fingerprint=planned.fingerprint,
            config=planned.plain,
            started_unix_s=record.started_unix_s or time.time(),
        )

    def _note(self) -> SweepNote:
        return SweepNote(
            question=self._groups.experiment.question,
            command=self._command,
            cells=tuple(self._planned),
        )

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close what is settled; at a normal end write the report and say where things are."""
        self._results.settle_all()
        if kind is not None:
            return
        with self._costs.on(REPORT):
            self._results.report()
        print_matrix(self._results.records, self._console)
        self._costs.write(self._folder.path)
        if self._is_tracked:
            end = End.FINISHED if self.exit_code == 0 else End.FAILED
            self._tracker.close_sweep(end, self._folder.path)
        self._say_where()

    def _say_where(self) -> None:
        self._display.say(self._costs.sentence())
        self._display.say(f"results: {self._folder.path}")
        if self._is_tracked and (url := self._tracker.view_url()):
            hint = "" if self._groups.tracking.uri else "  (answers while `make ui` runs)"
            self._display.say(f"MLflow:  {url}{hint}")
        for problem in self._tracker.problems:
            self._display.say(f"problem: {problem}")


def objective(row: CellRow) -> float:
    """Return what a sweeper minimises: the median step time, inf for a cell that is not ok."""
    if row.status != Status.OK.value or row.step_s_median is None:
        return math.inf
    return row.step_s_median


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0]}"
