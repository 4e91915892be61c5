"""The MLflow UI: the saved view is there, served on this machine alone, and gone afterwards."""

import base64
import json
import time
import urllib.request
import zlib
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rayzero.errors import TrackingError
from rayzero.tracking.mlflow_tracker import MlflowTracker
from rayzero.tracking.store import open_store
from rayzero.tracking.tracker import End
from rayzero.tracking.ui import served
from rayzero.tracking.view import VIEW_KEY, view_state
from tests.report.cells import ok_cell


def test_the_experiment_carries_the_view_and_the_link_names_it(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    run_id = tracker.open_sweep("zero_vs_tp", "Which?", {}, {})
    experiment_id = client.get_run(run_id).info.experiment_id
    tags = client.get_experiment(experiment_id).tags
    view = json.loads(tags[f"mlflow.sharedViewState.{VIEW_KEY}"])
    packed = view["state"].removeprefix("deflate;")
    assert json.loads(zlib.decompress(base64.b64decode(packed))) == view_state()
    link = tracker.view_url("http://127.0.0.1:5003/")
    start = f"http://127.0.0.1:5003/#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW_KEY}"
    assert link == f"{start}&compareRunsMode=CHART"


def test_every_chart_stands_in_a_section_and_shows_what_is_logged(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    tracker.open_sweep("zero_vs_tp", "Which?", {}, {})
    run_id = tracker.open_cell("s2_tp1_dp4_fp32", {})
    tracker.close_cell(ok_cell(2, 1))
    data = client.get_run(run_id).data
    state = view_state()
    sections, charts = state["compareRunSections"], state["compareRunCharts"]
    assert isinstance(sections, list)
    assert isinstance(charts, list)
    names = {section["uuid"] for section in sections}
    for chart in charts:
        assert chart["metricSectionId"] in names
        axes = [chart[axis]["key"] for axis in ("xaxis", "yaxis") if axis in chart]
        metrics = [chart["metricKey"]] if "metricKey" in chart else axes
        assert {*metrics, *chart.get("selectedMetrics", [])} <= data.metrics.keys()
        assert set(chart.get("selectedParams", [])) <= data.params.keys()


def test_a_folder_without_store_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(TrackingError, match=r"run a sweep first"),
        served(tmp_path, host="127.0.0.1", port=5000),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_server_shows_the_local_store_and_ends(
    tracker: MlflowTracker, output: Path, tmp_path: Path
) -> None:
    tracker.open_sweep("zero_vs_tp", "Which?", {}, {})
    tracker.close_cell(ok_cell(2, 1))
    tracker.close_sweep(End.FINISHED, tmp_path)
    with served(output, host="127.0.0.1", port=5000) as server:
        assert server.views == {"zero_vs_tp": tracker.view_url(server.address)}
        page = urllib.request.urlopen(server.address, timeout=20).read()
        assert b"<title>MLflow</title>" in page
    assert server.process.poll() is not None


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_server_takes_a_sweep_and_its_loss_costs_words_not_cells(
    output: Path, client: MlflowClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(output, host="127.0.0.1", port=5000) as server:
        tracker = MlflowTracker(open_store(server.address, tmp_path))
        tracker.open_sweep("remote", "Which?", {"a": 1}, {})
        run_id = tracker.open_cell("s2_tp1_dp4_fp32", {"a": 1})
        tracker.close_cell(ok_cell(2, 1))
        assert tracker.problems == ()
        assert tracker.view_url().startswith(server.address)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["throughput/steps"] == 20
    assert len(client.get_metric_history(run_id, "train/loss")) == 23
    start = time.monotonic()
    assert tracker.open_cell("s3_tp1_dp4_fp32", {}) == ""
    tracker.close_cell(ok_cell(3, 1))
    tracker.close_sweep(End.FINISHED, tmp_path)
    assert time.monotonic() - start < 20
    assert len(tracker.problems) == 3
    assert "s3_tp1_dp4_fp32" in tracker.problems[0]
    assert capfd.readouterr() == ("", "")
