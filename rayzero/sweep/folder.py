"""A sweep's folder: a record per cell, the sweep's own note, and a lock against a second one.

outputs/sweeps/EXPERIMENT/CLUSTER/   cells/NAME.json   sweep.json   matrix.csv   pictures
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from rayzero.config.cell import CellGroups
from rayzero.errors import BusyError, ConfigError, RecordError
from rayzero.records import CellRecord
from rayzero.report.records_file import CELLS_FOLDER, read_record, record_path, write_record

NOTE = "sweep.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepNote:
    """What was asked, and which cells belong to the latest sweep, in their order."""

    question: str
    command: Sequence[str]
    cells: Sequence[str]


class SweepFolder:
    """Where one experiment on one cluster keeps its results, from run to run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / ".lock")
        self._holder = path / ".lock.pid"

    def __enter__(self) -> Self:
        """Lock it; raise BusyError that names the other process, ConfigError if unwritable."""
        try:
            (self.path / CELLS_FOLDER).mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self._holder.write_text(str(os.getpid()))
        except Timeout as error:
            raise BusyError(
                f"{self.path} is in use by process {self._other()}; wait for it, or name another "
                "experiment.name or run.output"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"run.output: {self.path} cannot be written ({error.strerror}); "
                "name another folder: run.output=PATH"
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unlock the folder."""
        self._holder.unlink(missing_ok=True)
        self._lock.release()

    def find(self, cell: str) -> CellRecord | None:
        """Return an earlier record of a cell; one that cannot be read does not count."""
        try:
            return read_record(record_path(self.path, cell))
        except RecordError:
            return None

    def keep(self, record: CellRecord) -> None:
        """Write a cell's record."""
        write_record(record, self.path)

    def note(self, note: SweepNote) -> None:
        """Write down what the latest sweep is."""
        (self.path / NOTE).write_text(json.dumps(asdict(note), indent=2) + "\n")

    def latest(self) -> tuple[SweepNote, list[CellRecord]]:
        """Return the latest sweep's note and the records of its cells, in order."""
        try:
            note = SweepNote(**json.loads((self.path / NOTE).read_text()))
        except FileNotFoundError as error:
            raise ConfigError(
                f"no sweep was run in {self.path}; check experiment, cluster and run.output"
            ) from error
        return note, [record for cell in note.cells if (record := self.find(cell)) is not None]

    def _other(self) -> str:
        try:
            return self._holder.read_text().strip() or "unknown"
        except OSError:
            return "unknown"


def folder_path(groups: CellGroups, *, many: bool = True) -> Path:
    """Return where an experiment on a cluster keeps its sweep, or its single runs."""
    kept = Path(groups.run.output) / ("sweeps" if many else "runs")
    return kept / groups.experiment.name / groups.cluster.name
