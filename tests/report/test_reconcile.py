"""Theory beside engine: exact is exact on all ranks, and every difference is named."""

import csv
from dataclasses import replace
from pathlib import Path

from rayzero.records import CellRow
from rayzero.report.reconcile import (
    Part,
    lines_of,
    memory_match,
    traffic_match,
    write_reconciliation,
)
from rayzero.report.summary import where_it_differs
from tests.report.cells import bad_cell, ok_cell, with_extra_bytes


def test_equal_bytes_are_exact() -> None:
    record = ok_cell(2, 1)
    memory, traffic = memory_match(record), traffic_match(record)
    assert memory is not None
    assert traffic is not None
    assert memory.is_exact
    assert traffic.is_exact
    assert memory.measured_bytes == record.row.formula_bytes
    assert traffic.measured_bytes == record.row.sent_bytes


def test_one_byte_more_on_one_rank_is_found_and_named() -> None:
    match = memory_match(with_extra_bytes(ok_cell(2, 1), 1))
    assert match is not None
    assert not match.is_exact
    assert where_it_differs(match) == "rank 1 counters +1 B"


def test_bytes_that_only_change_their_kind_are_a_difference() -> None:
    record = ok_cell(2, 1)
    report = record.reports[0]
    swapped = tuple(
        replace(entry, kind=other.kind)
        for entry, other in zip(
            report.holdings.entries, reversed(report.holdings.entries), strict=True
        )
    )
    held = replace(report.holdings, entries=swapped)
    match = memory_match(replace(record, reports=(replace(report, holdings=held),)))
    assert match is not None
    assert match.measured_bytes == match.formula_bytes
    assert not match.is_exact


def test_same_bytes_in_another_number_of_transfers_are_a_difference() -> None:
    record = ok_cell(2, 1)
    report = record.reports[0]
    first, *rest = report.transfers
    halves = [replace(first, sent_bytes=first.sent_bytes // 2)] * 2
    split = replace(report, transfers=(*halves, *rest))
    match = traffic_match(replace(record, reports=(split, *record.reports[1:])))
    assert match is not None
    assert match.measured_bytes == match.formula_bytes
    assert not match.is_exact


def test_a_row_alone_is_compared_by_its_columns() -> None:
    row = replace(ok_cell(1, 1).row, formula_bytes=10)
    record = replace(ok_cell(1, 1), row=row, reports=())
    match = memory_match(record)
    assert match is not None
    assert match.formula_bytes == 10
    assert not match.is_exact


def test_what_was_not_measured_has_no_match() -> None:
    assert memory_match(bad_cell(0, 1, "timeout", "late")) is None
    assert traffic_match(bad_cell(0, 1, "timeout", "late")) is None


def test_every_rank_kind_and_transfer_has_a_line_in_the_file(tmp_path: Path) -> None:
    record = with_extra_bytes(ok_cell(3, 2), 5)
    path = write_reconciliation([record], tmp_path / "r.csv")
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(lines_of(record))
    assert {row["rank"] for row in rows} == {"0", "1", "2", "3"}
    assert sum(int(row["difference"]) for row in rows) == 5
    gathers = [r for r in rows if r["item"] == "all_gather/shard/forward" and r["rank"] == "0"]
    assert [(r["part"], r["measured_transfers"]) for r in gathers] == [(Part.TRAFFIC.value, "2")]
    assert any(row["item"] == "staging@host" for row in rows)


def test_a_cell_without_reports_adds_no_line(tmp_path: Path) -> None:
    record = replace(ok_cell(0, 1), reports=(), row=CellRow(cell="a", status="ok"))
    path = write_reconciliation([record], tmp_path / "r.csv")
    assert len(path.read_text().splitlines()) == 1
