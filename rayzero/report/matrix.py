"""matrix.csv: one row a cell, exact in both directions; an empty cell is 'not measured'."""

import csv
import io
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path

from rayzero.errors import RecordError
from rayzero.records import MATRIX_COLUMNS, CellRow
from rayzero.report.files import replace_file

MATRIX_FILE = "matrix.csv"
_HINTS = typing.get_type_hints(CellRow)


def write_matrix(rows: Iterable[CellRow], path: Path) -> Path:
    """Write the rows, floats in their shortest exact form."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(MATRIX_COLUMNS)
    for row in rows:
        writer.writerow([_text(getattr(row, column)) for column in MATRIX_COLUMNS])
    return replace_file(path, stream.getvalue().encode())


def read_matrix(path: Path) -> list[CellRow]:
    """Read rows equal to those written; raise RecordError that names file, row and column."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            _check_header(path, reader.fieldnames or [])
            return [_row(path, number, cells) for number, cells in enumerate(reader, start=1)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error


def _text(value: object) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def _check_header(path: Path, header: typing.Sequence[str]) -> None:
    missing = [column for column in ("cell", "status") if column not in header]
    unknown = [column for column in header if column not in MATRIX_COLUMNS]
    if missing or unknown:
        raise RecordError(
            f"{path} is not a matrix of this version: missing {missing}, unknown {unknown}; "
            "write it anew from the cells' records with the verb report"
        )


def _row(path: Path, number: int, cells: Mapping[str, str | None]) -> CellRow:
    values: dict[str, object] = {}
    for column, text in cells.items():
        hint = _HINTS.get(column)
        if hint is None or text is None:
            raise RecordError(f"{path}, row {number}: more or fewer cells than columns")
        try:
            values[column] = _value(hint, text)
        except ValueError as error:
            raise RecordError(f"{path}, row {number}, {column}={text!r}: {error}") from error
    return CellRow(**values)  # type: ignore[arg-type]


def _value(hint: object, text: str) -> object:
    if hint is str:
        return text
    if not text:
        return None
    return int(text) if hint == int | None else float(text)
