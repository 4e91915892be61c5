"""Write one run's metrics, params, tags and files through an MLflow client, in few requests."""

import json
from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from rayzero.config.build import to_plain
from rayzero.records import CellRecord
from rayzero.tracking.metrics import Point, nonfinite_steps, series_points, summary_points
from rayzero.tracking.params import MAX_VALUE_CHARS, shortened

METRICS_PER_REQUEST = 800
PARAMS_PER_REQUEST = 100


def write_points(client: MlflowClient, run_id: str, points: Sequence[Point]) -> None:
    """Log points, always with their step."""
    metrics = [Metric(p.key, p.value, p.timestamp_ms, p.step) for p in points]
    for start in range(0, len(metrics), METRICS_PER_REQUEST):
        client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_REQUEST])


def write_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> list[str]:
    """Log params; a refused key never loses the others. Return the refused keys."""
    entries = [Param(key, value) for key, value in params.items()]
    refused = []
    for start in range(0, len(entries), PARAMS_PER_REQUEST):
        part = entries[start : start + PARAMS_PER_REQUEST]
        try:
            client.log_batch(run_id, params=part)
        except MlflowException:
            refused += _write_one_by_one(client, run_id, part)
    return refused


def write_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    """Set tags; long values are shortened with a hash."""
    entries = [RunTag(key, shortened(value, MAX_VALUE_CHARS)) for key, value in tags.items()]
    client.log_batch(run_id, tags=entries)


def write_config(client: MlflowClient, run_id: str, config: Mapping[str, object]) -> None:
    """Keep the resolved config, whole, as config.json."""
    client.log_text(run_id, json.dumps(config, indent=2, default=str), "config.json")


def write_cell(client: MlflowClient, run_id: str, record: CellRecord) -> None:
    """Log summary metrics, series, settings, tags, the whole record and, if it failed, its log."""
    ended_ms = int((record.started_unix_s + (record.row.wall_s or 0.0)) * 1000)
    points = summary_points(record.row, timestamp_ms=ended_ms) + series_points(record)
    write_points(client, run_id, points)
    write_tags(client, run_id, cell_tags(record))
    client.log_text(run_id, json.dumps(to_plain(record)), "record.json")
    if record.log:
        client.log_text(run_id, record.log, "log.txt")


def cell_tags(record: CellRecord) -> dict[str, str]:
    """Return what a list of runs is filtered and grouped by."""
    row = record.row
    replicas, shards = row.replicate, row.shard
    dp = replicas * shards if replicas is not None and shards is not None else None
    tags = {
        "status": row.status,
        "reason": row.reason,
        "engine": row.engine,
        "stage": row.stage,
        "tp": row.tp,
        "dp": dp,
        "precision": row.precision,
        "offload": row.offload,
        "devices": row.devices,
        "nonfinite_loss_at_steps": ", ".join(map(str, nonfinite_steps(record))),
    }
    return {key: str(value) for key, value in tags.items() if value not in (None, "")}


def _write_one_by_one(client: MlflowClient, run_id: str, params: Sequence[Param]) -> list[str]:
    refused = []
    for param in params:
        try:
            client.log_batch(run_id, params=[param])
        except MlflowException:
            refused.append(param.key)
    return refused
