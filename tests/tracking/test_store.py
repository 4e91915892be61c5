"""The store: safe on first concurrent use, absolute, movable, and honest when out of reach."""

import multiprocessing
import shutil
import socket
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient, environment_variables

from rayzero.errors import TrackingError
from rayzero.tracking.metrics import Point
from rayzero.tracking.mlflow_tracker import MlflowTracker
from rayzero.tracking.run_writer import write_points
from rayzero.tracking.store import bounded_requests, open_store
from rayzero.tracking.tracker import End
from tests.report.cells import ok_cell

NUM_WRITERS, NUM_POINTS = 8, 200


def write_as_first(output: Path, number: int) -> None:
    """Open the store as if nobody else did, and write a run."""
    store = open_store(None, output)
    experiment = store.experiment_id("shared")
    with store.writing() as client:
        run_id = client.create_run(experiment).info.run_id
    points = [
        Point(key=f"m{i % 4}", value=float(number), step=i, timestamp_ms=1)
        for i in range(NUM_POINTS)
    ]
    with store.writing() as client:
        write_points(client, run_id, points)


@pytest.mark.timeout(120)
def test_eight_processes_that_use_an_empty_folder_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rayzero.tracking.store", "tests.tracking.test_store"])
    writers = [
        context.Process(target=write_as_first, args=(tmp_path, i)) for i in range(NUM_WRITERS)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(100)
    assert [writer.exitcode for writer in writers] == [0] * NUM_WRITERS
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("shared").experiment_id
    runs = [run.info.run_id for run in client.search_runs([experiment])]
    points = [p for r in runs for i in range(4) for p in client.get_metric_history(r, f"m{i}")]
    assert len(runs) == NUM_WRITERS
    assert len(points) == NUM_WRITERS * NUM_POINTS


def test_paths_are_absolute_wherever_the_process_stands(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(output.parent)
    store = open_store(None, Path(output.name))
    assert store.uri == f"sqlite:///{output}/mlflow.db"
    experiment = store.client.get_experiment(store.experiment_id("a/b c"))
    assert experiment.artifact_location == (output / "mlartifacts" / "a_b_c").as_uri()


def test_a_store_finds_its_files_after_the_folder_has_moved(
    tracker: MlflowTracker, output: Path, tmp_path: Path
) -> None:
    tracker.open_sweep("moving", "?", {"a": 1}, {})
    run_id = tracker.open_cell("s1_tp1_dp4_fp32", {"a": 1})
    tracker.close_cell(ok_cell(1, 1))
    tracker.close_sweep(End.FINISHED, tmp_path)
    moved = tmp_path / "elsewhere"
    shutil.move(output, moved)
    client = open_store(None, moved).client
    names = [file.path for file in client.list_artifacts(run_id)]
    assert names == ["config.json", "record.json"]
    assert client.get_run(run_id).info.artifact_uri.startswith(moved.as_uri())


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:9", "https://nohost.invalid", "postgresql://me:secret@127.0.0.1:9/db"]
)
def test_a_server_that_is_not_there_is_reported_at_once(uri: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TrackingError) as caught:
        open_store(uri, tmp_path)
    assert time.monotonic() - start < 15
    assert "tracking.uri=" in str(caught.value)
    assert "tracking.enabled=false" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.timeout(40)
def test_a_server_that_never_answers_is_reported_within_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        with pytest.raises(TrackingError, match=r"tracking\.uri=http"):
            open_store(f"http://127.0.0.1:{mute.getsockname()[1]}", tmp_path)
    assert time.monotonic() - start < 25


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "foo://x/y", "http://a:port"])
def test_a_uri_that_is_no_store_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"tracking\.uri="):
        open_store(uri, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(TrackingError, match=r"run\.output=FOLDER"):
        open_store(None, blocked / "out")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"no database at all, " * 100)
    with pytest.raises(TrackingError, match=r"mlflow\.db"):
        open_store(None, tmp_path)


def test_limits_of_requests_end_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    retries = environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES
    timeout = environment_variables.MLFLOW_HTTP_REQUEST_TIMEOUT
    monkeypatch.setenv(retries.name, "4")
    monkeypatch.delenv(timeout.name, raising=False)
    with bounded_requests(num_retries=1):
        assert retries.get() == 1
    assert retries.get() == 4
    assert timeout.get_raw() is None
