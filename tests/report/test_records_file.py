"""A cell's record on disk: exact in both directions; damage is named and costs only that cell."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from rayzero.errors import RecordError
from rayzero.records import CellRecord, CellRow, StepSample
from rayzero.report.records_file import read_record, read_records, record_path, write_record
from tests.report.cells import bad_cell, ok_cell, sweep


def test_every_record_comes_back_equal(tmp_path: Path) -> None:
    records = sweep()
    for record in records:
        write_record(record, tmp_path)
    back = read_records(tmp_path)
    assert back.records == {record.row.cell: record for record in records}
    assert back.damaged == ()


def test_loss_that_is_not_a_number_survives(tmp_path: Path) -> None:
    sample = StepSample(step=7, loss=math.nan, step_s=0.1, grad_norm=math.inf, timed=True)
    record = replace(bad_cell(0, 1, "failed", "NaN"), samples=(sample,))
    path = write_record(record, tmp_path)
    (back,) = read_record(path).samples
    assert math.isnan(back.loss)
    assert back.grad_norm == math.inf
    assert "NaN," not in path.read_text()


def test_damaged_files_are_named_and_count_as_absent(tmp_path: Path) -> None:
    write_record(ok_cell(0, 1), tmp_path)
    cut = write_record(ok_cell(1, 1), tmp_path)
    cut.write_bytes(cut.read_bytes()[:500])
    wrong = write_record(ok_cell(2, 1), tmp_path)
    wrong.write_text(wrong.read_text().replace('"stage": 2', '"stage": "two"'))
    unknown = write_record(ok_cell(3, 1), tmp_path)
    unknown.write_text(unknown.read_text().replace('"kind": "moments"', '"kind": "magic"', 1))
    back = read_records(tmp_path)
    assert list(back.records) == ["s0_tp1_dp4_fp32"]
    assert [str(p) in text for p, text in zip((cut, wrong, unknown), back.damaged, strict=True)]
    assert all(path.name in " ".join(back.damaged) for path in (cut, wrong, unknown))


@pytest.mark.parametrize("text", ["", "[]", "null", '{"row": 3}', '{"row": {"cell": "a"}}'])
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"a\.json"):
        read_record(path)


def test_odd_cell_names_stay_in_the_folder_and_apart(tmp_path: Path) -> None:
    names = ["../../etc/x", "a/b", "a_b", ".hidden", "a b", "x" * 300, "x" * 301]
    for name in names:
        row = CellRow(cell=name, status="ok")
        write_record(CellRecord(row=row, fingerprint="f", config={}), tmp_path)
    assert set(read_records(tmp_path).records) == set(names)
    assert {record_path(tmp_path, name).parent for name in names} == {tmp_path / "cells"}


def test_a_folder_without_records_is_empty(tmp_path: Path) -> None:
    assert read_records(tmp_path / "nothing").records == {}
