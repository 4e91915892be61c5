"""A sweep's folder: records survive, damage is not fatal, and two sweeps never share it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayzero.config.build import build
from rayzero.errors import BusyError, ConfigError
from rayzero.sweep.folder import SweepFolder, SweepNote, folder_path
from tests.sweep.records import cell_record, plain_config

HOLD = """
import sys
from pathlib import Path
from rayzero.sweep.folder import SweepFolder
with SweepFolder(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_record_is_found_again_by_its_cell(tmp_path: Path) -> None:
    record = cell_record(stage=2, losses=(5.0, 4.0))
    with SweepFolder(tmp_path) as folder:
        folder.keep(record)
        assert folder.find(record.row.cell) == record
        assert folder.find("another") is None


def test_a_damaged_record_counts_as_not_run(tmp_path: Path) -> None:
    record = cell_record()
    with SweepFolder(tmp_path) as folder:
        folder.keep(record)
        (path,) = (tmp_path / "cells").glob("*.json")
        path.write_text(path.read_text()[:100])
        assert folder.find(record.row.cell) is None


def test_the_latest_sweep_is_its_cells_in_their_order(tmp_path: Path) -> None:
    records = [cell_record(stage=stage) for stage in (3, 0)]
    note = SweepNote(question="Why?", command=["make"], cells=[r.row.cell for r in records])
    with SweepFolder(tmp_path) as folder:
        folder.keep(cell_record(stage=1))
        for record in records:
            folder.keep(record)
        folder.note(note)
        assert folder.latest() == (note, records)


def test_a_folder_without_a_sweep_says_which_keys_to_check(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"check experiment, cluster and run\.output"):
        SweepFolder(tmp_path).latest()


def test_a_second_sweep_is_refused_and_told_the_process_of_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(BusyError, match=f"process {other.pid}"), SweepFolder(tmp_path):
            pass
        other.kill()
    with SweepFolder(tmp_path):
        assert (tmp_path / ".lock.pid").read_text() == str(os.getpid())


def test_a_folder_that_cannot_be_made_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    inside = SweepFolder(tmp_path / "taken" / "inside")
    with pytest.raises(ConfigError, match=r"run\.output"), inside:
        pass


def test_sweeps_and_single_runs_have_their_own_folders() -> None:
    config = build(plain_config(run__output="/results", experiment__name="mine"))
    assert folder_path(config) == Path("/results/sweeps/mine/local")
    assert folder_path(config, many=False) == Path("/results/runs/mine/local")
