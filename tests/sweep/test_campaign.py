"""A campaign with real Ray and real MLflow: rows whatever happens, resume, parity, exit codes."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayzero.cluster.session import Session, open_session
from rayzero.config.build import build
from rayzero.errors import ConfigError
from rayzero.records import Status
from rayzero.report.matrix import MATRIX_FILE, read_matrix
from rayzero.run import CellRunner
from rayzero.sweep.campaign import Campaign
from rayzero.tracking.store import open_store
from tests.sweep.records import plain_config
from tests.tasks import break_at_stage_1, report_at_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

Plain = dict[str, Any]
Sweep = Callable[..., tuple[list[float], Campaign]]


def cell_of(output: Path, **changes: Any) -> Plain:
    """Return a cell of two ranks that keeps its results under output."""
    settings = {"cluster__ranks_per_node": 2, "run__output": str(output), **changes}
    plain: Any = plain_config()
    for path, value in settings.items():
        group, _, key = path.partition("__")
        plain[group][key] = value
    return dict(plain)


class LentRunner(CellRunner):
    """A runner on a session that goes on after it."""

    def __init__(self, session: Session, task: Any) -> None:
        super().__init__(task)
        self._session = session

    def close(self) -> None:
        """End the ranks alone."""
        self.end_ranks()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    """Return what runs cells as Hydra would, and returns their objectives."""
    cluster = build(cell_of(tmp_path_factory.mktemp("unused"))).cluster
    with open_session(cluster) as session:

        def run(cells: Sequence[Plain], task: Any) -> tuple[list[float], Campaign]:
            runner = LentRunner(session, task)
            campaign = Campaign(dict(cells[0]), many=True, command=["test"], runner=runner)
            with campaign:
                campaign.expect(cells)
                return [campaign.run(cell) for cell in cells], campaign

        yield run


def statuses(folder: Path) -> dict[str, str]:
    return {row.cell: row.status for row in read_matrix(folder / MATRIX_FILE)}


def test_every_cell_has_a_row_and_a_run_whatever_happened(sweep: Sweep, tmp_path: Path) -> None:
    cells = [
        cell_of(tmp_path, zero__stage=0),
        cell_of(tmp_path, zero__stage=1),
        cell_of(tmp_path, zero__stage=2, parallel__tp=3),
        cell_of(tmp_path, zero__stage=2),
    ]
    objectives, campaign = sweep(cells, break_at_stage_1)
    assert [math.isinf(value) for value in objectives] == [False, True, True, False]
    assert campaign.exit_code == 1
    folder = tmp_path / "sweeps/custom/local"
    assert statuses(folder) == {
        "s0_tp1_dp2_fp32": Status.OK.value,
        "s1_tp1_dp2_fp32": Status.FAILED.value,
        "s2_tp3_fp32": Status.IMPOSSIBLE.value,
        "s2_tp1_dp2_fp32": Status.OK.value,
    }
    log = json.loads((folder / "cells/s1_tp1_dp2_fp32.json").read_text())["log"]
    assert "a planted fault" in log

    client = open_store(None, tmp_path).client
    experiment = client.get_experiment_by_name("custom")
    runs = {r.info.run_name: r.info.status for r in client.search_runs([experiment.experiment_id])}
    assert runs == {
        "custom": "FAILED",
        "s0_tp1_dp2_fp32": "FINISHED",
        "s1_tp1_dp2_fp32": "FAILED",
        "s2_tp3_fp32": "FINISHED",
        "s2_tp1_dp2_fp32": "FINISHED",
    }


def test_what_was_answered_is_not_run_again_and_what_failed_is(
    sweep: Sweep, tmp_path: Path
) -> None:
    cells = [cell_of(tmp_path, zero__stage=s, tracking__enabled=False) for s in (0, 1)]
    _, first = sweep(cells, break_at_stage_1)
    assert first.exit_code == 1
    records = tmp_path / "sweeps/custom/local/cells"
    before = (records / "s0_tp1_dp2_fp32.json").read_bytes()
    _, second = sweep(cells, report_at_once)
    assert second.exit_code == 0
    assert (records / "s0_tp1_dp2_fp32.json").read_bytes() == before
    assert set(statuses(tmp_path / "sweeps/custom/local").values()) == {Status.OK.value}


def test_fail_fast_stops_after_the_first_failure_and_else_nothing_does(
    sweep: Sweep, tmp_path: Path
) -> None:
    def names(fail_fast: bool) -> list[str]:
        output = tmp_path / str(fail_fast)
        cells = [
            cell_of(output, zero__stage=s, run__fail_fast=fail_fast, tracking__enabled=False)
            for s in (1, 2)
        ]
        _, campaign = sweep(cells, break_at_stage_1)
        assert campaign.exit_code == 1
        return list(statuses(output / "sweeps/custom/local"))

    assert names(True) == ["s1_tp1_dp2_fp32"]
    assert names(False) == ["s1_tp1_dp2_fp32", "s2_tp1_dp2_fp32"]


def test_a_bad_value_ends_the_campaign_before_anything_is_made(
    sweep: Sweep, tmp_path: Path
) -> None:
    cells = [cell_of(tmp_path), cell_of(tmp_path, data__global_batch="many")]
    with pytest.raises(ConfigError, match=r"data\.global_batch='many'"):
        sweep(cells, report_at_once)
    assert not list(tmp_path.iterdir())
