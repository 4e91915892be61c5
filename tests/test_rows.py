"""Rows are made of what ranks report: medians, maxima over ranks, and nothing invented."""

from typing import Any

import pytest

from rayzero.config.build import build
from rayzero.errors import DataError
from rayzero.records import (
    Held,
    Holdings,
    Kind,
    RankReport,
    Status,
    Where,
)
from rayzero.rows import asked_row, measured_row, percentile, planned_row, slowest_steps
from rayzero.theory.counts import training_flops
from tests.sweep.records import STEP_S, plain_config, rank_report


def config_of(**changes: Any) -> Any:
    return build(plain_config(**changes))


def row_of(*reports: RankReport, **changes: Any) -> Any:
    return measured_row(config_of(**changes), reports, devices="2 x CPU", wall_s=11.0)


def test_times_are_those_of_the_slowest_rank_over_timed_steps() -> None:
    row = row_of(rank_report(0), rank_report(1))
    assert row.steps == 3
    assert row.step_s_median == pytest.approx(0.21)
    assert row.step_s_p95 == pytest.approx(0.31)
    assert row.tokens_per_s == pytest.approx(16 * 128 / 0.21)
    assert (row.loss_first, row.loss_last) == (5.0, 2.0)


def test_what_is_neither_build_nor_step_is_overhead() -> None:
    steps_s = sum(STEP_S) + 4 * 0.01
    assert row_of(rank_report(0), rank_report(1)).overhead_s == pytest.approx(11.0 - 0.5 - steps_s)


def test_bytes_are_the_maximum_over_ranks() -> None:
    row = row_of(rank_report(0), rank_report(1))
    assert (row.parameters_bytes, row.gradients_bytes, row.master_bytes) == (101, 50, 0)
    assert row.communication_bytes == 10
    assert row.formula_bytes == 161
    assert (row.sent_bytes, row.formula_sent_bytes) == (11, 11)


def test_activations_are_the_peak_above_what_the_device_holds() -> None:
    held = Holdings(
        entries=(
            Held(kind=Kind.PARAMETERS, num_bytes=100),
            Held(kind=Kind.MOMENTS, num_bytes=80, where=Where.HOST),
        )
    )
    row = row_of(
        rank_report(0, holdings=held, peak_bytes=250), rank_report(1, holdings=held, peak_bytes=240)
    )
    assert row.activations_bytes == 150
    assert row.moments_bytes == 80


def test_what_one_rank_did_not_measure_is_empty() -> None:
    row = row_of(rank_report(0), rank_report(1, peak_bytes=None))
    assert row.peak_bytes is None
    assert row.activations_bytes is None
    assert row.peak_host_bytes is None
    assert row.predicted_step_s is None


def test_operations_per_second_are_counted_by_theory_and_mfu_needs_a_known_peak() -> None:
    config = config_of()
    flops = training_flops(config.model, seq_len=128, num_tokens=16 * 128).model
    row = row_of(rank_report(0), rank_report(1))
    assert row.tflops_per_rank == pytest.approx(flops / 0.21 / 2 / 1e12)
    assert row.mfu is None
    plain = plain_config()
    plain["cluster"]["hardware"]["device_tflops"] = 0.5
    known = measured_row(build(plain), [rank_report(0), rank_report(1)], devices="", wall_s=1.0)
    assert known.mfu == pytest.approx(row.tflops_per_rank / 0.5)


def test_the_operations_of_a_users_own_model_are_not_invented() -> None:
    row = row_of(rank_report(0), rank_report(1), model__factory="package.module:function")
    assert row.tflops_per_rank is None
    assert row.tokens_per_s is not None


def test_ranks_that_saw_other_data_are_an_error_that_names_them() -> None:
    with pytest.raises(DataError, match=r"rank 1 on node0: xyz"):
        row_of(rank_report(0), rank_report(1, data_fingerprint="xyz"))


def test_a_cell_that_did_not_run_still_says_what_it_asked() -> None:
    config = config_of(zero__stage=2, parallel__tp=2, data__micro_batch=2)
    row = planned_row(config, 8, status=Status.TIMEOUT, reason="too slow")
    assert (row.stage, row.tp, row.shard, row.replicate) == (2, 2, 4, 1)
    assert (row.global_batch, row.micro_batch, row.accumulation) == (16, 2, 2)
    assert (row.status, row.reason) == ("timeout", "too slow")
    assert row.tokens_per_s is None


def test_the_environment_of_the_ranks_stands_in_the_row() -> None:
    config = config_of(cluster__env={"NCCL_DEBUG": "INFO", "A": "1"})
    assert asked_row(config, status=Status.OK, dp=1).cluster_env == "NCCL_DEBUG=INFO A=1"


def test_a_series_takes_each_step_from_its_slowest_rank() -> None:
    assert [s.step_s for s in slowest_steps([rank_report(0), rank_report(1)])] == [
        pytest.approx(s + 0.01) for s in STEP_S
    ]


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (19, 19), (20, 19), (21, 20), (100, 95)])
def test_95_of_100_values_do_not_exceed_the_percentile(number: int, expected: int) -> None:
    assert percentile(list(range(1, number + 1)), 0.95) == expected
