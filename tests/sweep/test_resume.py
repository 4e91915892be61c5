"""A cell is skipped only if the same question was answered by the same code on such a machine."""

from dataclasses import replace
from typing import Any

import pytest

from rayzero.records import Status
from rayzero.sweep import resume
from rayzero.sweep.resume import fingerprint, is_answered
from tests.sweep.records import cell_record, plain_config

HARDWARE = "2 cores"


@pytest.mark.parametrize(
    "changes",
    [
        {"zero__stage": 1},
        {"parallel__tp": 2},
        {"data__seed": 1},
        {"run__num_steps": 21},
        {"run__memory_fraction": 0.5},
        {"optimizer__lr": 0.1},
        {"cluster__env": {"NCCL_DEBUG": "INFO"}},
    ],
)
def test_another_question_has_another_fingerprint(changes: dict[str, Any]) -> None:
    asked = fingerprint(plain_config(), hardware=HARDWARE)
    assert fingerprint(plain_config(**changes), hardware=HARDWARE) != asked


@pytest.mark.parametrize(
    "changes",
    [
        {"run__output": "/elsewhere"},
        {"run__resume": False},
        {"run__fail_fast": True},
        {"run__cell_timeout_s": 1.0},
        {"tracking__uri": "http://server"},
        {"experiment__question": "Really?"},
    ],
)
def test_where_and_how_it_is_run_does_not_change_the_question(changes: dict[str, Any]) -> None:
    asked = fingerprint(plain_config(), hardware=HARDWARE)
    assert fingerprint(plain_config(**changes), hardware=HARDWARE) == asked


def test_hardware_torch_and_sources_are_part_of_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = fingerprint(plain_config(), hardware=HARDWARE)
    assert fingerprint(plain_config(), hardware="8 x H200") != asked
    with monkeypatch.context() as patch:
        patch.setattr(resume, "version", lambda package: "2.14.0")
        assert fingerprint(plain_config(), hardware=HARDWARE) != asked
    monkeypatch.setattr(resume, "sources_hash", lambda: "edited")
    assert fingerprint(plain_config(), hardware=HARDWARE) != asked


def test_asking_does_not_change_the_config() -> None:
    plain = plain_config()
    fingerprint(plain, hardware=HARDWARE)
    assert plain == plain_config()


@pytest.mark.parametrize("status", list(Status))
def test_only_ok_and_impossible_are_answers(status: Status) -> None:
    record = replace(cell_record(status=status), fingerprint="same")
    assert is_answered(record, "same") == (status in (Status.OK, Status.IMPOSSIBLE))
    assert not is_answered(record, "other")


def test_no_record_is_no_answer() -> None:
    assert not is_answered(None, "")
