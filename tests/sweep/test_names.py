"""Names of cells: short where nothing is special, and different for siblings."""

from typing import Any

import pytest

from rayzero.config.build import build_groups
from rayzero.rows import cell_name
from rayzero.sweep.names import varied_suffix
from tests.sweep.records import plain_config


def name_of(*, dp: int | None = 4, **changes: Any) -> str:
    return cell_name(build_groups(plain_config(**changes)), dp=dp)


def test_an_ordinary_cell_has_the_documented_name() -> None:
    assert name_of(zero__stage=2, precision__name="bf16") == "s2_tp1_dp4_bf16"


def test_dp_is_left_out_where_the_ranks_cannot_be_laid_out() -> None:
    assert name_of(dp=None, parallel__tp=2) == "s0_tp2_fp32"


@pytest.mark.parametrize(
    ("changes", "suffix"),
    [
        ({"engine__name": "ddp"}, "_ddp"),
        ({"model__name": "124M"}, "_124M"),
        ({"offload__optimizer": "host"}, "_optimizer_host"),
        ({"parallel__replicate": 2}, "_replicate2"),
    ],
)
def test_what_is_not_usual_stands_at_the_end(changes: dict[str, Any], suffix: str) -> None:
    assert name_of(**changes) == f"s0_tp1_dp4_fp32{suffix}"


@pytest.mark.parametrize(
    ("changes", "suffix"),
    [
        ({}, ""),
        ({"zero__stage": 3, "parallel__tp": 2}, ""),
        ({"optimizer__lr": 0.001}, "_lr0.001"),
        ({"zero__bucket_elements": 1000}, "_bucket_elements1000"),
        ({"model__name": "30M", "model__hidden": 128}, ""),
        ({"model__hidden": 128}, "_hidden128"),
        ({"data__path": "/texts/*.txt"}, "_path-texts-.txt"),
        ({"run__output": "/elsewhere", "tracking__uri": "http://server"}, ""),
    ],
)
def test_siblings_are_told_apart_by_what_varies(changes: dict[str, Any], suffix: str) -> None:
    assert varied_suffix(plain_config(**changes), plain_config()) == suffix
