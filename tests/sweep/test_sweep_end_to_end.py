"""The command a newcomer types, in a new process: real training on real Ray, into real MLflow."""

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rayzero.records import Status
from rayzero.report.matrix import MATRIX_FILE, read_matrix
from rayzero.sweep.costs import COSTS_FILE, PARTS, TIMED
from rayzero.tracking.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "rayzero", "sweep", "experiment=smoke"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def ray_processes() -> set[int]:
    """Return the ids of all Ray processes of this machine."""
    return {p.pid for p in psutil.process_iter(["name"]) if is_rays(p.info["name"] or "")}


def is_rays(name: str) -> bool:
    return name.startswith(("ray::", "raylet", "gcs_server"))


def test_smoke_measures_four_cells_that_agree_and_match_the_formulas(tmp_path: Path) -> None:
    done = subprocess.run(
        COMMAND, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "outputs/sweeps/smoke/local"
    rows = read_matrix(folder / MATRIX_FILE)
    assert [row.status for row in rows] == [Status.OK.value] * 4, done.stdout
    assert [(row.stage, row.tp) for row in rows] == [(0, 1), (0, 2), (3, 1), (3, 2)]
    assert {row.parity for row in rows} == {"ok"}
    for row in rows:
        assert row.sent_bytes == row.formula_sent_bytes
        held = (
            row.parameters_bytes,
            row.gradients_bytes,
            row.master_bytes,
            row.moments_bytes,
            row.communication_bytes,
            row.module_buffers_bytes,
        )
        # Counters, a few bytes per tensor, have no column of their own.
        assert 0 <= (row.formula_bytes or 0) - sum(b or 0 for b in held) < 1000
    with (folder / COSTS_FILE).open() as stream:
        spent = {line["part"]: float(line["seconds"]) for line in csv.DictReader(stream)}
    assert set(spent) == {*PARTS, "other"}
    assert all(spent[part] > 0.0 for part in PARTS)
    (total,) = re.findall(r"time: +([\d.]+) s = set-up", done.stdout)
    assert sum(spent.values()) == pytest.approx(float(total), abs=0.5)
    timed = sum((row.step_s_median or 0.0) * (row.steps or 0) for row in rows)
    assert spent[TIMED] == pytest.approx(timed, rel=0.5)
    assert list(folder.glob("*.png"))
    assert [p.name for p in tmp_path.iterdir()] == ["outputs"]

    client = open_store(None, tmp_path / "outputs").client
    experiment = client.get_experiment_by_name("smoke")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 5
    assert {run.info.status for run in runs} == {"FINISHED"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_keeps_what_is_done_and_leaves_nothing_running(
    tmp_path: Path, number: signal.Signals
) -> None:
    before = ray_processes()
    with subprocess.Popen(
        [*COMMAND, "run.num_steps=15", "cluster.ranks_per_node=2", "tracking=none"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("cell 1/4") and "tokens/s" in line and "step" not in line:
                break
        ours = {p.pid for p in psutil.Process(process.pid).children(recursive=True)}
        process.send_signal(number)
        said += process.stdout.read()
        assert process.wait(60) == 130, said
    assert "what was done is kept" in said
    assert "Traceback" not in said
    rows = read_matrix(tmp_path / "outputs/sweeps/smoke/local" / MATRIX_FILE)
    assert [row.status for row in rows] == [Status.OK.value], said
    assert not (ours & ray_processes()) - before
