"""A paper's table beside formula, dry run and measurement, as CSV and as Markdown."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rayzero.report.files import replace_file

Number = Fraction | int | float
RESULTS = (
    "formula",
    "formula_exact",
    "dryrun",
    "dryrun_padding",
    "measured",
    "difference",
    "reason",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """One printed figure. All numbers are in the printed column's unit; None is 'there is none'.

    formula: at the printed number of parameters. formula_exact: at the module's own number; dryrun
    minus it is padding.
    """

    facts: Mapping[str, str]
    printed: Number | None = None
    formula: Number | None = None
    formula_exact: Number | None = None
    dryrun: Number | None = None
    dryrun_padding: Number | None = None
    measured: Number | None = None
    reason: str = ""

    @property
    def difference(self) -> Number | None:
        """Printed minus formula."""
        if self.printed is None or self.formula is None:
            return None
        return self.printed - self.formula


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTable:
    """name: also the file's. rule: how the paper rounds."""

    name: str
    title: str
    unit: str
    printed_column: str
    rule: str
    rows: Sequence[PaperRow]


def number_text(value: Number | None) -> str:
    """Write a number without the digits that a float only pretends to have."""
    return "" if value is None else f"{float(value):.10g}"


def write_csv(table: PaperTable, folder: Path) -> Path:
    """Write NAME.csv: the facts' columns, then RESULTS."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*table.rows[0].facts, *RESULTS])
    for row in table.rows:
        writer.writerow([*row.facts.values(), *result_texts(row)])
    return replace_file(folder / f"{table.name}.csv", stream.getvalue().encode())


def write_page(tables: Sequence[PaperTable], folder: Path, *, head: Sequence[str]) -> Path:
    """Write tables.md: all tables with their keys, printed figures and results."""
    parts = ["# The ZeRO papers' tables, three times", *head]
    for table in tables:
        parts += [f"## {table.title}", f"Unit: {table.unit}. {table.rule}", _markdown(table)]
    return replace_file(folder / "tables.md", ("\n\n".join(parts) + "\n").encode())


def result_texts(row: PaperRow) -> list[str]:
    """Return the texts of the RESULTS columns."""
    numbers = (
        row.formula,
        row.formula_exact,
        row.dryrun,
        row.dryrun_padding,
        row.measured,
        row.difference,
    )
    return [*map(number_text, numbers), row.reason]


def _markdown(table: PaperTable) -> str:
    shown = [c for c in table.rows[0].facts if c not in ("verified", "source", "note")]
    lines = [_line([*shown, *RESULTS]), _line(["---"] * (len(shown) + len(RESULTS)))]
    for row in table.rows:
        lines.append(_line([*(row.facts[c] for c in shown), *result_texts(row)]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
