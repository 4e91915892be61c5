"""Theory beside engine, byte by byte: what each rank held and sent, against the formulas."""

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rayzero.records import CellRecord, CellRow, Holdings, RankReport, Transfer, Where
from rayzero.report.files import replace_file

RECONCILIATION_FILE = "reconciliation.csv"
HELD_COLUMNS = (
    "parameters_bytes",
    "gradients_bytes",
    "master_bytes",
    "moments_bytes",
    "communication_bytes",
    "module_buffers_bytes",
)
_HEADER = (
    "cell",
    "rank",
    "part",
    "item",
    "formula_bytes",
    "measured_bytes",
    "difference",
    "formula_transfers",
    "measured_transfers",
)


class Part(Enum):
    """memory: bytes held, by kind. traffic: bytes sent in one step, by op, axis and phase."""

    MEMORY = "memory"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One amount on one rank. item: a kind, or op/axis/phase. Counts are of transfers."""

    cell: str
    rank: int
    part: Part
    item: str
    formula_bytes: int
    measured_bytes: int
    formula_count: int | None = None
    measured_count: int | None = None

    @property
    def difference(self) -> int:
        """Measured minus formula, bytes."""
        return self.measured_bytes - self.formula_bytes

    @property
    def is_exact(self) -> bool:
        """Whether bytes and, for traffic, the number of transfers agree."""
        return self.difference == 0 and self.formula_count == self.measured_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One cell's measured amount beside its formula; of the rank that holds or sends most."""

    measured_bytes: int
    formula_bytes: int
    differing: tuple[Line, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs, on any rank, in any kind."""
        return not self.differing and self.measured_bytes == self.formula_bytes


def lines_of(record: CellRecord) -> list[Line]:
    """Return every amount of every rank; empty where a cell has no reports."""
    return [line for report in record.reports for line in _rank_lines(record.row.cell, report)]


def memory_match(record: CellRecord) -> Match | None:
    """Compare bytes held; from the reports, else from the row; None where not measured."""
    lines = [line for line in lines_of(record) if line.part is Part.MEMORY]
    if lines:
        return _match(lines)
    held = held_bytes(record.row)
    return _row_match(held, record.row.formula_bytes)


def traffic_match(record: CellRecord) -> Match | None:
    """Compare bytes sent in one step; from the reports, else from the row."""
    if record.reports and record.row.sent_bytes is not None:
        lines = [line for line in lines_of(record) if line.part is Part.TRAFFIC]
        return _match(lines) if lines else Match(measured_bytes=0, formula_bytes=0)
    return _row_match(record.row.sent_bytes, record.row.formula_sent_bytes)


def held_bytes(row: CellRow) -> int | None:
    """Sum the kinds that the row names; None where none is measured."""
    values = [getattr(row, column) for column in HELD_COLUMNS]
    measured = [value for value in values if value is not None]
    return sum(measured) if measured else None


def write_reconciliation(records: Iterable[CellRecord], path: Path) -> Path:
    """Write every line of every cell as CSV."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_HEADER)
    for record in records:
        for line in lines_of(record):
            writer.writerow(_cells(line))
    return replace_file(path, stream.getvalue().encode())


def _cells(line: Line) -> list[object]:
    counts = ["" if count is None else count for count in (line.formula_count, line.measured_count)]
    amounts = [line.formula_bytes, line.measured_bytes, line.difference]
    return [line.cell, line.rank, line.part.value, line.item, *amounts, *counts]


def _rank_lines(cell: str, report: RankReport) -> list[Line]:
    if not report.formula.entries:
        return []  # A peer: there is no formula to hold it against.
    formula, measured = _by_kind(report.formula), _by_kind(report.holdings)
    memory = [
        Line(
            cell=cell,
            rank=report.rank,
            part=Part.MEMORY,
            item=item,
            formula_bytes=formula[item],
            measured_bytes=measured[item],
        )
        for item in dict.fromkeys([*formula, *measured])
    ]
    return memory + _traffic_lines(cell, report)


def _traffic_lines(cell: str, report: RankReport) -> list[Line]:
    formula, measured = _Sent(report.formula_transfers), _Sent(report.transfers)
    return [
        Line(
            cell=cell,
            rank=report.rank,
            part=Part.TRAFFIC,
            item=item,
            formula_bytes=formula.num_bytes[item],
            measured_bytes=measured.num_bytes[item],
            formula_count=formula.count[item],
            measured_count=measured.count[item],
        )
        for item in dict.fromkeys([*formula.count, *measured.count])
    ]


class _Sent:
    """Bytes and number of transfers by op/axis/phase."""

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self.num_bytes: Counter[str] = Counter()
        self.count: Counter[str] = Counter()
        for transfer in transfers:
            item = f"{transfer.op}/{transfer.axis}/{transfer.phase.value}"
            self.num_bytes[item] += transfer.sent_bytes
            self.count[item] += 1


def _by_kind(holdings: Holdings) -> Counter[str]:
    held: Counter[str] = Counter()
    for entry in holdings.entries:
        place = "" if entry.where is Where.DEVICE else f"@{entry.where.value}"
        held[f"{entry.kind.value}{place}"] += entry.num_bytes
    return held


def _match(lines: list[Line]) -> Match:
    measured: Counter[int] = Counter()
    formula: Counter[int] = Counter()
    for line in lines:
        measured[line.rank] += line.measured_bytes
        formula[line.rank] += line.formula_bytes
    most = max(measured, key=lambda rank: measured[rank])
    return Match(
        measured_bytes=measured[most],
        formula_bytes=formula[most],
        differing=tuple(line for line in lines if not line.is_exact),
    )


def _row_match(measured: int | None, formula: int | None) -> Match | None:
    if measured is None or formula is None:
        return None
    return Match(measured_bytes=measured, formula_bytes=formula)
