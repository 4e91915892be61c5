"""What bench measured as CSV and as a page: a row per engine, stage and setting."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rayzero.records import Status
from rayzero.report.files import replace_file
from rayzero.report.units import common_unit

BENCH_FILE, ROUNDS_FILE, BOUNDS_FILE, PAGE_FILE = (
    "bench.csv",
    "bench_rounds.csv",
    "bench_bounds.csv",
    "bench.md",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One row of bench.csv. Ratios are of medians over all rounds; below 1 is faster, or leaner.

    The best peer is the fastest sharded one of the same stage that keeps the same dtypes; the
    lowest and highest ratio are of single rounds.
    """

    engine: str
    stage: int
    precision: str
    regime: str
    accumulation: int
    step_s_median: float | None = None
    step_s_p95: float | None = None
    tokens_per_s: float | None = None
    peak_rss_bytes: int | None = None
    ratio_to_best_peer: float | None = None
    ratio_to_compute: float | None = None
    best_peer: str = ""
    ratio_to_best_peer_lowest: float | None = None
    ratio_to_best_peer_highest: float | None = None
    ratio_to_ddp: float | None = None
    rss_ratio_to_leanest_peer: float | None = None
    steps: int = 0
    rounds: int = 0
    loss_difference: float | None = None
    transport: str = ""
    status: str = Status.OK.value
    reason: str = ""

    @property
    def setting(self) -> str:
        """Name what was asked of all engines alike."""
        return f"{self.regime}, {self.precision}, accumulation {self.accumulation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One engine in one round."""

    round: int
    engine: str
    stage: int
    precision: str
    regime: str
    accumulation: int
    step_s_median: float | None
    peak_rss_bytes: int | None
    status: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRow:
    """A ratio that must be reached. verdict: reached, within noise, missed, or not judged."""

    precision: str
    regime: str
    accumulation: int
    stage: int
    against: str
    ratio: float
    bound: float
    verdict: str


def write_rows(rows: Iterable[object], kind: type, path: Path) -> Path:
    """Write records of one dataclass as CSV; None is an empty cell."""
    names = [field.name for field in fields(kind)]
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = [getattr(row, name) for name in names]
        writer.writerow(["" if value is None else value for value in values])
    return replace_file(path, stream.getvalue().encode())


def write_page(
    rows: Sequence[BenchRow],
    bounds: Sequence[BoundRow],
    path: Path,
    *,
    head: Sequence[str],
    pictures: Sequence[Path],
) -> Path:
    """Write all tables as Markdown beneath what is said of the machine and the method."""
    parts = ["# Engines side by side", *head]
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    for setting in dict.fromkeys(row.setting for row in rows):
        parts += [f"## {setting}", _table([row for row in rows if row.setting == setting])]
    if bounds:
        parts += ["## What must be reached", _bounds_table(bounds)]
    return replace_file(path, ("\n\n".join(parts) + "\n").encode())


def _table(rows: Sequence[BenchRow]) -> str:
    unit = common_unit(row.peak_rss_bytes for row in rows)
    lines = [
        "| engine | stage | step, s | p95, s | tokens/s | peak RSS, "
        f"{unit.name} | / best peer (rounds) | / DDP | / compute only |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if row.status != Status.OK.value:
            lines.append(
                f"| {row.engine} | {row.stage} | {row.status}: {_cell(row.reason)} |||||||"
            )
            continue
        rss = "" if row.peak_rss_bytes is None else unit.text(row.peak_rss_bytes)
        cells = (
            row.engine,
            str(row.stage),
            _number(row.step_s_median, 3),
            _number(row.step_s_p95, 3),
            _number(row.tokens_per_s, 0),
            rss,
            _with_range(row),
            _number(row.ratio_to_ddp, 2),
            _number(row.ratio_to_compute, 2),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _bounds_table(bounds: Sequence[BoundRow]) -> str:
    lines = [
        "| regime | precision | accumulation | stage | against | ratio | at most | |",
        "|---|---|---:|---:|---|---:|---:|---|",
    ]
    lines += [
        f"| {b.regime} | {b.precision} | {b.accumulation} | {b.stage} | {b.against} "
        f"| {b.ratio:.3f} | {b.bound:.2f} | {b.verdict} |"
        for b in bounds
    ]
    return "\n".join(lines)


def _with_range(row: BenchRow) -> str:
    if row.ratio_to_best_peer is None:
        return ""
    low, high = row.ratio_to_best_peer_lowest, row.ratio_to_best_peer_highest
    return f"{row.ratio_to_best_peer:.2f} ({_number(low, 2)}-{_number(high, 2)})"


def _number(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:,.{decimals}f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")
