"""One cell through real Ray: its record, its failure, and what is refused before ranks start."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from rayzero import run
from rayzero.config.build import build
from rayzero.config.cell import CellConfig
from rayzero.errors import ClusterError, ConfigError
from rayzero.records import Status
from rayzero.run import CellRunner
from tests.sweep.records import plain_config
from tests.tasks import break_at_stage_1, report_at_once

BIG = {"model__num_layers": 40, "model__hidden": 5120, "model__num_heads": 40}


def cell(**changes: Any) -> CellConfig:
    """Return a cell of two ranks."""
    return build(plain_config(cluster__ranks_per_node=2, **changes))


@pytest.fixture(scope="module")
def runner() -> Iterator[CellRunner]:
    """A runner whose ranks break at stage 1 only."""
    runner = CellRunner(break_at_stage_1)
    yield runner
    runner.close()


@pytest.mark.slow
def test_a_rank_that_raises_fails_its_cell_and_not_the_next(runner: CellRunner) -> None:
    first = runner.run(cell(zero__stage=0))
    assert first.row.status == Status.OK.value
    assert first.row.cell == "s0_tp1_dp2_fp32"
    assert len(first.reports) == 2
    assert first.row.devices.startswith("2 x CPU ranks")

    broken = runner.run(cell(zero__stage=1))
    assert broken.row.status == Status.FAILED.value
    assert "rank 1" in broken.row.reason
    assert "a planted fault" in broken.row.reason
    assert "Traceback" in broken.log
    assert broken.row.shard == 2
    assert broken.row.tokens_per_s is None

    assert runner.run(cell(zero__stage=2)).row.status == Status.OK.value


@pytest.mark.slow
def test_what_cannot_run_is_refused_before_any_rank_starts(runner: CellRunner) -> None:
    row = runner.run(cell(**BIG)).row
    assert row.status == Status.IMPOSSIBLE.value
    numbers = re.findall(r"[\d.e+]+ GB", row.reason)
    assert len(numbers) >= 3, f"predicted and available bytes: {row.reason}"
    assert "run.memory_fraction=0.8" in row.reason
    many = build(plain_config(cluster__ranks_per_node=100_000))
    with pytest.raises(ClusterError, match=r"asked for 100000 .*available \d+"):
        runner.world(many.cluster)


def test_a_profile_for_the_planner_says_how_to_run_on_it(runner: CellRunner) -> None:
    profile = build(plain_config(cluster__kind="profile", cluster__name="dgx_h100"))
    with pytest.raises(ConfigError, match=r"cluster=dgx_h100 .* cluster\.kind=local"):
        runner.open(profile.cluster)


@pytest.mark.slow
def test_ranks_with_other_code_than_the_driver_are_refused(
    runner: CellRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "sources_hash", lambda: "another version")
    row = runner.run(cell()).row
    assert row.status == Status.FAILED.value
    assert "node0 has other sources of rayzero than the driver" in row.reason


@pytest.mark.slow
def test_ranks_are_kept_from_cell_to_cell_and_signs_of_life_arrive() -> None:
    runner = CellRunner(report_at_once)
    try:
        seen: list[int] = []
        for stage in range(3):
            record = runner.run(cell(zero__stage=stage), on_progress=lambda p: seen.append(p.step))
            assert record.row.status == Status.OK.value
        assert seen
        wall_s = record.row.wall_s
        assert wall_s is not None
        assert wall_s < 2.0, "a kept gang needs no new processes"
    finally:
        runner.close()
