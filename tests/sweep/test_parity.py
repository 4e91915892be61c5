"""Cells that train the same must see the same losses; a planted fault must show."""

import math
from dataclasses import replace
from typing import Any

import pytest

from rayzero.records import CellRecord, Status
from rayzero.sweep.parity import same_training, with_parity
from tests.sweep.records import cell_record, rank_report

LOSSES = (5.5, 5.0, 4.5, 4.0)


def shifted(by: float, *, at: int) -> tuple[float, ...]:
    """Return the losses with one of them off by a relative error."""
    return tuple(loss * (1 + by) if i == at else loss for i, loss in enumerate(LOSSES))


def test_equal_losses_are_ok_and_differ_by_nothing() -> None:
    rows = [r.row for r in with_parity([cell_record(stage=s, losses=LOSSES) for s in range(4)])]
    assert [row.parity for row in rows] == ["ok"] * 4
    assert [row.parity_error for row in rows] == [0.0] * 4
    assert all(row.status == Status.OK.value for row in rows)


def test_a_planted_fault_becomes_the_status_and_names_the_reference() -> None:
    faulty = cell_record(stage=3, losses=shifted(1e-3, at=2))
    _, row = (r.row for r in with_parity([cell_record(losses=LOSSES), faulty]))
    assert row.status == Status.PARITY_FAILED.value
    assert row.parity == "failed"
    assert row.parity_error == pytest.approx(1e-3)
    assert "s0_tp1_fp32_rayzero" in row.reason


def test_the_largest_error_over_the_timed_steps_counts_and_warm_up_does_not() -> None:
    losses = tuple(
        loss * (1 + error) for loss, error in zip(LOSSES, (0.5, 2e-6, -7e-6, 3e-6), strict=True)
    )
    _, row = (
        r.row
        for r in with_parity([cell_record(losses=LOSSES), cell_record(stage=1, losses=losses)])
    )
    assert row.parity_error == pytest.approx(7e-6, rel=1e-3)
    assert row.parity == "ok"


@pytest.mark.parametrize(
    ("params", "within", "beyond"),
    [("fp32", 0.9e-5, 1.1e-5), ("bf16", 1.9e-3, 2.1e-3), ("fp16", 4.9e-3, 5.1e-3)],
)
def test_the_bound_is_that_of_the_precision(params: str, within: float, beyond: float) -> None:
    def parity_of(error: float) -> str:
        cells = [
            cell_record(losses=LOSSES, precision__params=params),
            cell_record(stage=2, losses=shifted(error, at=3), precision__params=params),
        ]
        return with_parity(cells)[1].row.parity

    assert parity_of(within) == "ok"
    assert parity_of(beyond) == "failed"


def test_the_reference_is_the_lowest_stage_then_the_lowest_tp_whatever_the_order() -> None:
    cells = [
        cell_record(stage=1, tp=1, losses=shifted(1e-3, at=1)),
        cell_record(stage=0, tp=2, losses=shifted(1e-3, at=1)),
        cell_record(stage=0, tp=1, losses=LOSSES),
    ]
    assert [r.row.parity for r in with_parity(cells)] == ["failed", "failed", "ok"]


def test_a_reference_that_did_not_end_ok_is_none() -> None:
    lost = cell_record(stage=0, losses=(), status=Status.WORKER_LOST)
    found = with_parity([lost, cell_record(stage=1, losses=LOSSES)])
    assert found[0] == lost
    assert found[1].row.parity == "ok"


def test_cells_of_another_precision_or_data_are_not_compared() -> None:
    cells = [
        cell_record(losses=LOSSES),
        cell_record(stage=1, losses=shifted(0.1, at=1), precision__name="bf16"),
        cell_record(stage=2, losses=shifted(0.1, at=1), data__seed=7),
    ]
    assert [r.row.parity for r in with_parity(cells)] == ["ok", "ok", "ok"]


def test_micro_batches_do_not_change_what_is_trained() -> None:
    one, other = cell_record(), cell_record(data__micro_batch=2)
    assert same_training(one.config) == same_training(other.config)


def test_with_dropout_only_cells_whose_ranks_draw_the_same_masks_are_compared() -> None:
    def key(**changes: Any) -> str:
        return same_training(cell_record(model__dropout=0.1, **changes).config)

    assert key() == key(stage=3)
    assert len({key(), key(tp=2), key(data__micro_batch=2)}) == 3


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_loss_that_is_no_number_agrees_with_nothing(broken: float) -> None:
    losses = (*LOSSES[:-1], broken)
    _, row = (
        r.row
        for r in with_parity([cell_record(losses=LOSSES), cell_record(stage=1, losses=losses)])
    )
    assert row.parity_error == math.inf
    assert row.status == Status.PARITY_FAILED.value


def test_a_verdict_is_taken_back_when_the_true_reference_arrives() -> None:
    right, wrong = (
        cell_record(stage=2, losses=LOSSES),
        cell_record(stage=1, losses=shifted(1, at=1)),
    )
    judged = with_parity([wrong, right])
    assert [r.row.parity for r in judged] == ["ok", "failed"]
    again = with_parity([*judged, cell_record(stage=0, losses=LOSSES)])
    assert [r.row.parity for r in again] == ["failed", "ok", "ok"]
    assert again[1].row.status == Status.OK.value
    assert again[1].row.reason == ""


def test_ranks_that_end_with_different_weights_are_a_fault_even_where_losses_agree() -> None:
    def record_with(*checksums: str) -> CellRecord:
        reports = tuple(rank_report(i, weights_checksum=c) for i, c in enumerate(checksums))
        return replace(cell_record(tp=2, losses=LOSSES), reports=reports)

    (sound,) = with_parity([record_with("a", "b", "a", "b")])
    assert sound.row.status == Status.OK.value
    (broken,) = with_parity([record_with("a", "b", "a", "c")])
    assert broken.row.status == Status.PARITY_FAILED.value
    assert "ranks 1 and 3" in broken.row.reason
    (unknown,) = with_parity([record_with("", "", "", "")])
    assert unknown.row.status == Status.OK.value
