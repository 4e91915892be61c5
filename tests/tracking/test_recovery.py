"""A killed driver: its runs are ended at the next start, those of living drivers stay."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rayzero.tracking.mlflow_tracker import MlflowTracker
from rayzero.tracking.recovery import recover
from rayzero.tracking.store import open_store

DRIVER = """
import os, signal, sys
from pathlib import Path
from rayzero.tracking.mlflow_tracker import MlflowTracker
from rayzero.tracking.store import open_store
tracker = MlflowTracker(open_store(None, Path(sys.argv[1])))
tracker.open_sweep("killed", "?", {"a": 1}, {})
tracker.open_cell("cell", {"a": 1})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(60)
def test_runs_of_a_killed_driver_are_ended_at_the_next_start(
    output: Path, client: MlflowClient
) -> None:
    command = [sys.executable, "-W", "default", "-c", DRIVER, str(output)]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert driver.returncode == -signal.SIGKILL
    # The same process shows that MLflow stays off the terminal.
    assert driver.stdout + driver.stderr == ""
    experiment = client.get_experiment_by_name("killed").experiment_id
    left = client.search_runs([experiment])
    assert [run.info.status for run in left] == ["RUNNING", "RUNNING"]
    with MlflowTracker(open_store(None, output)) as tracker:
        tracker.open_sweep("another", "?", {}, {})
        ended = [client.get_run(run.info.run_id) for run in left]
        assert [run.info.status for run in ended] == ["KILLED", "KILLED"]
        assert all(run.data.tags["reason"] for run in ended)


def test_runs_of_a_living_driver_stay(tracker: MlflowTracker, output: Path) -> None:
    tracker.open_sweep("alive", "?", {}, {})
    tracker.open_cell("cell", {})
    assert recover(open_store(None, output)) == []
