"""What a campaign knows so far: records judged for parity, kept on disk, in matrix.csv, in MLflow.

[Note: when a cell is settled]
A cell's parity is judged against the cell with the lowest (stage, tp) that trains the same. While
such a cell is still to come the verdict may change, so the MLflow run of the judged one stays open.
"""

from collections.abc import Iterable

from rayzero.config.build import Plain
from rayzero.records import CellRecord, CellRow
from rayzero.report.matrix import MATRIX_FILE, write_matrix
from rayzero.report.sweep_report import write_report
from rayzero.sweep.folder import SweepFolder
from rayzero.sweep.parity import reference_order, same_training, with_parity
from rayzero.sweep.planned import PlannedCell
from rayzero.tracking.tracker import NullTracker, Tracker


class Results:
    """The records of a campaign, by the names of their cells, in order."""

    def __init__(self, folder: SweepFolder, *, question: str) -> None:
        self._folder = folder
        self._question = question
        self._records: dict[str, CellRecord] = {}
        self._tracker: Tracker = NullTracker()
        self._unsettled: set[str] = set()

    def track(self, tracker: Tracker) -> None:
        """Tell MLflow too, from now on."""
        self._tracker = tracker

    def begin(self, cell: str, config: Plain) -> None:
        """Open a cell's MLflow run."""
        self._tracker.open_cell(cell, config)
        self._unsettled.add(cell)

    def add(self, record: CellRecord, *, pending: Iterable[PlannedCell]) -> CellRow:
        """Keep a record, judge all again, and return the row as it stands now."""
        before, name = dict(self._records), record.row.cell
        before[name] = record
        self._records = {judged.row.cell: judged for judged in with_parity([*before.values()])}
        for cell, judged in self._records.items():
            if cell == name or judged.row != before[cell].row:
                self._folder.keep(judged)
        write_matrix((r.row for r in self.records), self._folder.path / MATRIX_FILE)
        self._settle(list(pending))
        return self._records[name].row

    def settle_all(self) -> None:
        """Close the MLflow runs of all cells that have a record; no more cells will come."""
        self._settle([])

    def report(self) -> None:
        """Write all tables and pictures."""
        if self._records:
            write_report(self.records, self._folder.path, question=self._question)

    @property
    def records(self) -> list[CellRecord]:
        """All records, in the order in which the cells came."""
        return list(self._records.values())

    def _settle(self, pending: list[PlannedCell]) -> None:
        """Close the MLflow runs of cells whose verdict is final. See the note above."""
        for cell in sorted(self._unsettled & self._records.keys()):
            if not any(_may_judge(planned, self._records[cell]) for planned in pending):
                self._tracker.close_cell(self._records[cell])
                self._unsettled.remove(cell)


def _may_judge(planned: PlannedCell, record: CellRecord) -> bool:
    earlier = reference_order(planned.row) < reference_order(record.row)
    return earlier and same_training(planned.plain) == same_training(record.config)
