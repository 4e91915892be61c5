"""What bench has measured so far, on its way to files, MLflow and the terminal."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rayzero.records import CellRecord, Status
from rayzero.report.bench_chart import write_bench_charts
from rayzero.report.bench_table import (
    BENCH_FILE,
    BOUNDS_FILE,
    PAGE_FILE,
    ROUNDS_FILE,
    BenchRow,
    BoundRow,
    RoundRow,
    write_page,
    write_rows,
)
from rayzero.studies.bench_rows import Measured, rounds_of, rows_of, verdicts
from rayzero.tracking.tracker import Tracker

ANSWERED = (Status.OK.value, Status.IMPOSSIBLE.value)


class Results:
    """All measurements by setting; files are written anew after each round.

    judge: hold ratios against what must be reached, which a tiny model says nothing about.
    """

    def __init__(self, folder: Path, *, head: Sequence[str], judge: bool) -> None:
        self.folder = folder
        self._head = head
        self._judge = judge
        self._measured: dict[str, Sequence[Measured]] = {}

    def keep(self, measured: Sequence[Measured]) -> None:
        """Take over what is known of one setting, and write."""
        self._measured[measured[0].setting.name] = measured
        self.write()

    def write(self) -> None:
        """Write tables, page and pictures."""
        rows, bounds = self.rows, self.bounds
        write_rows(rows, BenchRow, self.folder / BENCH_FILE)
        write_rows(rounds_of(self._all), RoundRow, self.folder / ROUNDS_FILE)
        write_rows(bounds, BoundRow, self.folder / BOUNDS_FILE)
        pictures = write_bench_charts(rows, self.folder, subtitle=self._head[0])
        write_page(rows, bounds, self.folder / PAGE_FILE, head=self._head, pictures=pictures)

    def track(self, tracker: Tracker) -> None:
        """Write a run for each engine and setting of the last one kept."""
        measured = list(self._measured.values())[-1]
        for m, row in zip(measured, rows_of(measured), strict=True):
            tracker.close_cell(_record(m, row))

    def say(self, console: Console) -> None:
        """Print a table for each setting and what was not reached."""
        for setting in dict.fromkeys(row.setting for row in self.rows):
            console.print(_table(setting, [row for row in self.rows if row.setting == setting]))
        for bound in self.bounds:
            if bound.verdict == "missed":
                line = (
                    f"missed: stage {bound.stage} against {bound.against}, {bound.regime}, "
                    f"{bound.precision}, accumulation {bound.accumulation}: "
                    f"{bound.ratio:.2f}, at most {bound.bound:.2f}"
                )
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        for row in self.rows:
            if row.status != Status.OK.value:
                line = f"{row.setting}: {row.engine} {row.stage}: {row.status}  {row.reason}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(f"results: {self.folder}", markup=False, highlight=False, soft_wrap=True)

    @property
    def rows(self) -> list[BenchRow]:
        """The rows of bench.csv."""
        return rows_of(self._all)

    @property
    def bounds(self) -> list[BoundRow]:
        """The verdicts on what must be reached."""
        return verdicts(self.rows) if self._judge else []

    @property
    def is_well(self) -> bool:
        """Whether every engine ran, or cannot by its nature, with equal losses."""
        return all(row.status in ANSWERED for row in self.rows)

    @property
    def _all(self) -> list[Measured]:
        return [m for measured in self._measured.values() for m in measured]


def _record(m: Measured, row: BenchRow) -> CellRecord:
    """Put the medians of all rounds on the last round's record."""
    last = m.failure or m.records[-1]
    return replace(
        last,
        row=replace(
            last.row,
            cell=f"{m.setting.name}_{row.engine}_s{row.stage}",
            engine=row.engine,
            status=row.status,
            reason=row.reason,
            steps=row.steps,
            step_s_median=row.step_s_median,
            step_s_p95=row.step_s_p95,
            tokens_per_s=row.tokens_per_s,
            peak_host_bytes=row.peak_rss_bytes,
        ),
    )


def _table(title: str, rows: Sequence[BenchRow]) -> Table:
    table = Table(title=title, title_justify="left")
    for header in ("engine", "stage", "step s", "p95 s", "RSS MB", "/ peer", "/ DDP", "/ compute"):
        table.add_column(header, justify="left" if header == "engine" else "right")
    for row in rows:
        rss = None if row.peak_rss_bytes is None else row.peak_rss_bytes / 1e6
        table.add_row(
            row.engine,
            str(row.stage),
            _number(row.step_s_median, 3) if row.status == Status.OK.value else row.status,
            _number(row.step_s_p95, 3),
            _number(rss, 0),
            _number(row.ratio_to_best_peer, 2),
            _number(row.ratio_to_ddp, 2),
            _number(row.ratio_to_compute, 2),
        )
    return table


def _number(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:,.{decimals}f}"
