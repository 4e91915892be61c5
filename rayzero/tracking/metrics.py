"""From a cell's record to MLflow metrics: a number per matrix column, and series of its steps."""

import math
from dataclasses import dataclass

from rayzero.records import MATRIX_COLUMNS, CellRecord, CellRow, StepSample

GROUPS = {
    "throughput": (
        "steps",
        "step_s_median",
        "step_s_p95",
        "tokens_per_s",
        "tflops_per_rank",
        "mfu",
        "wall_s",
        "overhead_s",
    ),
    "memory": (
        "peak_bytes",
        "peak_host_bytes",
        "parameters_bytes",
        "gradients_bytes",
        "master_bytes",
        "moments_bytes",
        "communication_bytes",
        "module_buffers_bytes",
        "activations_bytes",
        "formula_bytes",
    ),
    "comm": ("sent_bytes", "formula_sent_bytes"),
    "parity": ("loss_first", "loss_last", "parity_error", "validation_loss"),
    "prediction": ("predicted_step_s", "predicted_peak_bytes"),
}
SETTINGS = (
    "engine",
    "stage",
    "offload",
    "replicate",
    "shard",
    "tp",
    "precision",
    "model",
    "num_params",
    "micro_batch",
    "accumulation",
    "global_batch",
    "seq_len",
    "data_fingerprint",
    "devices",
    "cluster_env",
)
"""Columns that say what was run, not what was measured; they become parameters `cell.NAME`."""
MAX_SERIES_POINTS = 1000

_GROUP_OF = {column: group for group, columns in GROUPS.items() for column in columns}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a metric."""

    key: str
    value: float
    step: int
    timestamp_ms: int


def metric_key(column: str) -> str:
    """Name the metric of a matrix column: `tokens_per_s` is `throughput/tokens_per_s`."""
    return f"{_GROUP_OF.get(column, 'other')}/{column}"


def summary_points(row: CellRow, *, timestamp_ms: int) -> list[Point]:
    """Return the measured numbers of a row; what is None, NaN or infinite is left out."""
    points = []
    for column in MATRIX_COLUMNS:
        value = getattr(row, column)
        if column not in SETTINGS and _is_finite(value):
            key = metric_key(column)
            points.append(Point(key=key, value=float(value), step=0, timestamp_ms=timestamp_ms))
    return points


def series_points(record: CellRecord) -> list[Point]:
    """Return loss, step time and tokens/s of every step, of every k-th where a run is long."""
    tokens = (record.row.global_batch or 0) * (record.row.seq_len or 0)
    every = -(-len(record.samples) // MAX_SERIES_POINTS) or 1
    points = []
    now_s = record.started_unix_s
    for index, sample in enumerate(record.samples):
        now_s += sample.step_s if math.isfinite(sample.step_s) else 0.0
        if index % every == 0:
            points += _points_of(sample, tokens=tokens, timestamp_ms=int(now_s * 1000))
    return points


def nonfinite_steps(record: CellRecord) -> list[int]:
    """Return the steps whose loss is NaN or infinite: no chart can show them."""
    return [s.step for s in record.samples if not math.isfinite(s.loss)]


def _points_of(sample: StepSample, *, tokens: int, timestamp_ms: int) -> list[Point]:
    values = {"train/loss": sample.loss, "train/step_s": sample.step_s}
    if tokens and sample.step_s > 0:
        values["train/tokens_per_s"] = tokens / sample.step_s
    return [
        Point(key=key, value=value, step=sample.step, timestamp_ms=timestamp_ms)
        for key, value in values.items()
        if math.isfinite(value)
    ]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
