"""The saved comparison view of an experiment: the charts that MLflow's UI opens with.

MLflow keeps a shared view as an experiment tag: JSON around a compressed UI state. The list is
sorted by a metric because only a date-sorted list nests children, and nested ones draw no charts.
"""

import base64
import json
import time
import zlib
from urllib.parse import urlencode

from mlflow import MlflowClient
from mlflow.entities import Experiment

from rayzero.tracking.metrics import metric_key

VIEW_KEY = "rayzero_matrix"
VIEW_NAME = "rayzero: throughput and memory"

_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
_THROUGHPUT = metric_key("tokens_per_s")
_PEAK = metric_key("peak_bytes")
_SENT = metric_key("sent_bytes")


def save_view(client: MlflowClient, experiment_id: str) -> None:
    """Write the view; an older one of the same name is replaced."""
    now_ms = int(time.time() * 1000)
    packed = base64.b64encode(zlib.compress(json.dumps(view_state()).encode())).decode()
    view = {
        "name": VIEW_NAME,
        "createdAt": now_ms,
        "updatedAt": now_ms,
        "state": f"deflate;{packed}",
    }
    client.set_experiment_tag(experiment_id, _TAG, json.dumps(view))


def has_view(experiment: Experiment) -> bool:
    """Tell whether save_view has written to this experiment."""
    return _TAG in experiment.tags


def view_path(experiment_id: str) -> str:
    """Return the view's path below the address of a server."""
    query = urlencode({"viewStateShareKey": VIEW_KEY, "compareRunsMode": "CHART"})
    return f"/#/experiments/{experiment_id}/runs?{query}"


def view_state() -> dict[str, object]:
    """Return the state of MLflow's experiment page: sections, charts, columns, order and filter."""
    sections = ["Memory against throughput", "Fastest and leanest", "Theory", "Training"]
    return {
        "searchFilter": "tags.kind = 'cell'",
        "orderByKey": f"metrics.`{_THROUGHPUT}`",
        "orderByAsc": False,
        "lifecycleFilter": "Active",
        "runsHiddenMode": "SHOW_ALL",
        "selectedColumns": [
            "tags.`status`",
            f"metrics.`{_THROUGHPUT}`",
            f"metrics.`{_PEAK}`",
            f"metrics.`{_SENT}`",
        ],
        "viewMaximized": False,
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "compareRunSections": [_section(name) for name in sections],
        "compareRunCharts": [
            _scatter(sections[0], x=_PEAK, y=_THROUGHPUT),
            _parallel(sections[0]),
            _bar(sections[1], _THROUGHPUT),
            _bar(sections[1], _PEAK),
            _bar(sections[2], _SENT),
            _bar(sections[2], metric_key("formula_sent_bytes")),
            _line(sections[3], "train/loss"),
            _line(sections[3], "train/step_s"),
        ],
    }


def _section(name: str) -> dict[str, object]:
    return {
        "uuid": name,
        "name": name,
        "display": True,
        "isReordered": True,
        "isGenerated": False,
        "columns": 2,
        "cardHeight": 420,
    }


def _chart(section: str, kind: str, name: str, **settings: object) -> dict[str, object]:
    return {
        "uuid": f"{kind}-{name}",
        "type": kind,
        "metricSectionId": section,
        "runsCountToCompare": 100,
        "deleted": False,
        "isGenerated": False,
        **settings,
    }


def _scatter(section: str, *, x: str, y: str) -> dict[str, object]:
    axes = {"xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}
    return _chart(section, "SCATTER", y, **axes)


def _parallel(section: str) -> dict[str, object]:
    return _chart(
        section,
        "PARALLEL",
        "matrix",
        selectedParams=["cell.stage", "cell.tp"],
        selectedMetrics=[_SENT, _PEAK, _THROUGHPUT],
        showAllRuns=True,
    )


def _bar(section: str, metric: str) -> dict[str, object]:
    return _chart(section, "BAR", metric, metricKey=metric)


def _line(section: str, metric: str) -> dict[str, object]:
    return _chart(
        section,
        "LINE",
        metric,
        metricKey=metric,
        selectedMetricKeys=[metric],
        xAxisKey="step",
        scaleType="linear",
        lineSmoothness=0,
    )
