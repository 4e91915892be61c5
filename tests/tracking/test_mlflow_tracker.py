"""A sweep in MLflow: parent and children by explicit ids, complete, and ended as it ended."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities import Run

from rayzero.config.build import defaults
from rayzero.config.run import TrackingConfig
from rayzero.records import CellRecord
from rayzero.report.sweep_report import write_report
from rayzero.tracking.mlflow_tracker import MlflowTracker, open_tracker
from rayzero.tracking.store import open_store
from rayzero.tracking.tracker import End, NullTracker
from tests.report.cells import bad_cell, ok_cell, sweep

CONFIG = defaults()


def logged(tracker: MlflowTracker, client: MlflowClient, record: CellRecord) -> Run:
    """Write one cell and read its run back."""
    run_id = tracker.open_cell(record.row.cell, CONFIG)
    tracker.close_cell(record)
    return client.get_run(run_id)


def artifacts(client: MlflowClient, run_id: str) -> set[str]:
    """Name a run's files."""
    return {file.path for file in client.list_artifacts(run_id)}


def test_a_cell_is_a_finished_child_with_all_its_numbers(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    parent = tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {"cluster": "local"})
    record = ok_cell(2, 1)
    run = logged(tracker, client, record)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "s2_tp1_dp4_fp32"
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert run.data.tags["dp"] == "4"
    assert run.data.tags["devices"] == "4 x CPU (2 cores)"
    assert run.data.metrics["throughput/tokens_per_s"] == record.row.tokens_per_s
    assert run.data.params["zero.stage"] == "0"
    assert run.data.params["cell.stage"] == "2"
    assert run.data.params["cell.num_params"] == "1200000"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(s.step, s.loss) for s in record.samples]
    assert artifacts(client, run.info.run_id) == {"config.json", "record.json"}
    assert tracker.problems == ()


def test_the_resolved_config_is_kept_whole(tracker: MlflowTracker, client: MlflowClient) -> None:
    tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {})
    run = logged(tracker, client, ok_cell(2, 1))
    uri = f"{run.info.artifact_uri}/config.json"
    assert json.loads(Path(download_artifacts(uri)).read_text()) == CONFIG


@pytest.mark.parametrize(
    ("status", "end"),
    [
        ("impossible", "FINISHED"),
        ("out_of_memory", "FAILED"),
        ("timeout", "FAILED"),
        ("parity_failed", "FAILED"),
    ],
)
def test_a_cell_without_result_ends_as_its_status_says(
    tracker: MlflowTracker, client: MlflowClient, status: str, end: str
) -> None:
    tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {})
    run = logged(tracker, client, bad_cell(2, 4, status, "r" * 700))
    assert run.info.status == end
    assert run.data.tags["status"] == status
    assert len(run.data.tags["reason"]) == 500
    has_log = "log.txt" in artifacts(client, run.info.run_id)
    assert has_log == (status != "impossible")
    assert run.data.metrics == {}


def test_the_parent_carries_question_origin_and_files(
    tracker: MlflowTracker, client: MlflowClient, tmp_path: Path
) -> None:
    run_id = tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {"cluster": "local"})
    for record in sweep():
        tracker.close_cell(record)
    files = write_report(sweep(), tmp_path / "folder", question="Which?")
    tracker.close_sweep(End.FINISHED, tmp_path / "folder")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.note.content"] == "Which?"
    assert run.data.tags["cluster"] == "local"
    assert {"host", "command", "driver_pid"} <= run.data.tags.keys()
    assert artifacts(client, run_id) == {"config.json", *(path.name for path in files)}
    runs = client.search_runs([run.info.experiment_id], max_results=50)
    assert len(runs) == 13
    assert {r.data.tags["kind"] for r in runs} == {"sweep", "cell"}


def test_mlflow_variables_of_the_environment_are_ignored(
    output: Path, client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{elsewhere}/mlflow.db")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///{elsewhere}/mlflow.db")
    monkeypatch.setenv("MLFLOW_RUN_ID", "f" * 32)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "wrong")
    with MlflowTracker(open_store(None, output)) as tracker:
        parent = tracker.open_sweep("right", "Which?", CONFIG, {})
        child = logged(tracker, client, ok_cell(1, 1))
        tracker.close_sweep(End.FINISHED, tmp_path)
    assert client.get_run(parent).info.experiment_id == child.info.experiment_id
    assert client.get_experiment(child.info.experiment_id).name == "right"
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("error", "end"),
    [(KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED"), (RuntimeError, "FAILED")],
)
def test_leaving_by_an_exception_ends_all_open_runs(
    tracker: MlflowTracker, client: MlflowClient, error: type[BaseException], end: str
) -> None:
    ids = [tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {})]
    ids.append(tracker.open_cell("a", CONFIG))
    done = logged(tracker, client, ok_cell(1, 1))
    with pytest.raises(error), tracker:
        raise error
    assert [client.get_run(run_id).info.status for run_id in ids] == [end, end]
    assert client.get_run(done.info.run_id).info.status == "FINISHED"


def test_a_store_that_fails_during_the_sweep_costs_no_cell_and_is_reported_once(
    tracker: MlflowTracker, client: MlflowClient, output: Path
) -> None:
    tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {})
    database = output / "mlflow.db"
    content = database.read_bytes()
    database.write_bytes(b"this is no database " * 100)
    assert tracker.open_cell("s1_tp1_dp4_fp32", CONFIG) == ""
    tracker.close_cell(ok_cell(1, 1))
    database.write_bytes(content)
    run = logged(tracker, client, ok_cell(2, 1))
    assert run.info.status == "FINISHED"
    assert len(tracker.problems) == 1
    assert "cell s1_tp1_dp4_fp32" in tracker.problems[0]


def test_artifacts_that_cannot_be_written_do_not_fail_the_run(
    tracker: MlflowTracker, client: MlflowClient, output: Path
) -> None:
    (output / "mlartifacts").write_text("in the way")
    tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {})
    run = logged(tracker, client, ok_cell(2, 1))
    assert run.info.status == "FINISHED"
    assert "throughput/tokens_per_s" in run.data.metrics
    assert any("config.json" in problem for problem in tracker.problems)


def test_a_second_sweep_of_the_experiment_is_a_new_parent_in_it(
    tracker: MlflowTracker, client: MlflowClient, tmp_path: Path
) -> None:
    first = tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {})
    tracker.close_sweep(End.KILLED, tmp_path)
    second = tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {})
    runs = [client.get_run(run_id).info for run_id in (first, second)]
    assert runs[0].experiment_id == runs[1].experiment_id
    assert [run.status for run in runs] == ["KILLED", "RUNNING"]


def test_a_deleted_experiment_comes_back(
    tracker: MlflowTracker, client: MlflowClient, tmp_path: Path
) -> None:
    run_id = tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {})
    tracker.close_sweep(End.FINISHED, tmp_path)
    client.delete_experiment(client.get_run(run_id).info.experiment_id)
    assert tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {}) != run_id


def test_a_loss_that_is_nan_leaves_a_finished_run_and_its_step(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    record = ok_cell(2, 1, loss_last=float("nan"))
    broken = [replace(s, loss=float("nan")) if s.step == 7 else s for s in record.samples]
    tracker.open_sweep("zero_vs_tp", "Which?", CONFIG, {})
    run = logged(tracker, client, replace(record, samples=tuple(broken)))
    assert run.data.tags["nonfinite_loss_at_steps"] == "7"
    assert "parity/loss_last" not in run.data.metrics
    assert tracker.problems == ()


def test_without_tracking_nothing_is_kept(tmp_path: Path) -> None:
    with open_tracker(TrackingConfig(enabled=False), tmp_path) as tracker:
        assert isinstance(tracker, NullTracker)
        tracker.open_sweep("a", "?", {}, {})
        tracker.open_cell("b", {})
        tracker.close_cell(ok_cell(1, 1))
        tracker.close_sweep(End.FINISHED, tmp_path)
        assert tracker.view_url() == ""
        assert tracker.problems == ()
    assert list(tmp_path.iterdir()) == []
