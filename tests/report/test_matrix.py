"""matrix.csv: exact in both directions, in the columns of the design."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from rayzero.errors import RecordError
from rayzero.records import MATRIX_COLUMNS, CellRow
from rayzero.report.matrix import read_matrix, write_matrix
from tests.report.cells import ok_cell, sweep


def test_rows_come_back_equal(tmp_path: Path) -> None:
    rows = [record.row for record in sweep()]
    rows.append(replace(rows[1], cell="x", tokens_per_s=0.1 + 0.2, parity_error=5e-324))
    assert read_matrix(write_matrix(rows, tmp_path / "m.csv")) == rows


def test_text_with_commas_quotes_and_line_ends_comes_back_equal(tmp_path: Path) -> None:
    rows = [CellRow(cell="a", status="failed", reason='said "no",\nthen\r\nstopped; 1,5')]
    assert read_matrix(write_matrix(rows, tmp_path / "m.csv")) == rows


def test_the_columns_are_those_of_the_records_in_their_order(tmp_path: Path) -> None:
    path = write_matrix([ok_cell(1, 1).row], tmp_path / "m.csv")
    header, row = list(csv.reader(path.read_text().splitlines()))
    assert tuple(header) == MATRIX_COLUMNS
    assert row[header.index("mfu")] == ""
    assert row[header.index("master_bytes")] == "0"


def test_a_matrix_without_cells_is_a_header(tmp_path: Path) -> None:
    assert read_matrix(write_matrix([], tmp_path / "m.csv")) == []


def test_a_damaged_value_is_named_with_row_and_column(tmp_path: Path) -> None:
    path = write_matrix([ok_cell(1, 1).row], tmp_path / "m.csv")
    path.write_text(path.read_text().replace(",tiny,1200000,", ",tiny,12x,"))
    with pytest.raises(RecordError, match=r"m\.csv, row 1, num_params='12x'"):
        read_matrix(path)


def test_a_cut_row_and_a_foreign_table_are_refused(tmp_path: Path) -> None:
    cut = write_matrix([ok_cell(1, 1).row], tmp_path / "cut.csv")
    cut.write_text(cut.read_text()[:-60])
    foreign = tmp_path / "foreign.csv"
    foreign.write_text("name,speed\na,1\n")
    with pytest.raises(RecordError, match="row 1"):
        read_matrix(cut)
    with pytest.raises(RecordError, match="missing"):
        read_matrix(foreign)


def test_a_failed_write_leaves_the_old_matrix(tmp_path: Path) -> None:
    path = write_matrix([ok_cell(1, 1).row], tmp_path / "m.csv")
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        write_matrix([ok_cell(2, 1).row, None], path)  # type: ignore[list-item]
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.csv"]
