"""Metrics: one per measured column, series by step, and nothing that is not a number."""

import math
from dataclasses import replace
from itertools import pairwise

from rayzero.records import MATRIX_COLUMNS, StepSample
from rayzero.tracking.metrics import (
    GROUPS,
    MAX_SERIES_POINTS,
    SETTINGS,
    nonfinite_steps,
    series_points,
    summary_points,
)
from tests.report.cells import STARTED, bad_cell, ok_cell


def test_every_column_named_here_is_a_column_of_the_matrix() -> None:
    named = [column for columns in (*GROUPS.values(), SETTINGS) for column in columns]
    assert len(named) == len(set(named))
    assert set(named) <= set(MATRIX_COLUMNS)


def test_measured_columns_become_grouped_metrics() -> None:
    row = ok_cell(2, 1).row
    metrics = {p.key: p.value for p in summary_points(row, timestamp_ms=1)}
    assert metrics["throughput/tokens_per_s"] == row.tokens_per_s
    assert metrics["memory/peak_bytes"] == row.peak_bytes
    assert metrics["comm/sent_bytes"] == row.sent_bytes
    assert metrics["parity/parity_error"] == row.parity_error
    assert not [key for key in metrics if key.startswith("other/")]


def test_what_is_none_nan_or_infinite_is_left_out() -> None:
    row = ok_cell(2, 1, mfu=None, loss_last=math.nan, step_s_p95=math.inf).row
    keys = {p.key for p in summary_points(row, timestamp_ms=1)}
    assert not keys & {"throughput/mfu", "parity/loss_last", "throughput/step_s_p95"}
    assert summary_points(bad_cell(0, 1, "failed", "x").row, timestamp_ms=1) == []


def test_series_carry_step_and_rising_time() -> None:
    record = ok_cell(2, 1)
    losses = [p for p in series_points(record) if p.key == "train/loss"]
    assert [(p.step, p.value) for p in losses] == [(s.step, s.loss) for s in record.samples]
    times = [p.timestamp_ms for p in losses]
    assert times == sorted(times)
    assert times[0] > STARTED * 1000
    speeds = [p.value for p in series_points(record) if p.key == "train/tokens_per_s"]
    assert speeds[0] == 16 * 128 / record.samples[0].step_s


def test_a_nan_loss_is_left_out_and_its_step_named() -> None:
    record = ok_cell(2, 1)
    broken = [replace(s, loss=math.nan) if s.step == 7 else s for s in record.samples]
    record = replace(record, samples=tuple(broken))
    losses = [p.step for p in series_points(record) if p.key == "train/loss"]
    assert 7 not in losses
    assert len(losses) == len(record.samples) - 1
    assert nonfinite_steps(record) == [7]


def test_long_runs_are_thinned_evenly() -> None:
    samples = [
        StepSample(step=i, loss=1.0, step_s=0.01, grad_norm=1.0, timed=True) for i in range(10_000)
    ]
    record = replace(ok_cell(2, 1), samples=tuple(samples))
    steps = [p.step for p in series_points(record) if p.key == "train/loss"]
    assert len(steps) <= MAX_SERIES_POINTS
    assert {b - a for a, b in pairwise(steps)} == {10}
