"""A run that was killed at any moment goes on, and nobody can tell it from one that was not."""

import dataclasses
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayzero.config.cell import CellConfig
from rayzero.engine.state.agreement import CheckpointNotice
from rayzero.engine.state.folders import scan, verify
from rayzero.errors import CheckpointError, ConfigError
from rayzero.records import RankReport
from rayzero.train.rng import reseed, rng_state, set_rng_state
from tests.ranks import Pool, Pools, RankContext, RankError
from tests.state.test_damage import truncate
from tests.train.test_cell import config_of, run

NUM_STEPS = 12


def saving(folder: Path | None, schedule: str = "cosine", **run_keys: Any) -> CellConfig:
    """Return a cell that saves; with a cosine, the first steps depend on how many there will be."""
    return config_of(
        zero={"stage": 2},
        data={"micro_batch": 3},
        optimizer={"schedule": schedule, "lr_warmup_steps": 2},
        run={
            "num_steps": NUM_STEPS,
            "warmup_steps": 0,
            "checkpoint_folder": None if folder is None else str(folder),
            "checkpoint_every_steps": 3,
            "checkpoint_keep": 2,
            **run_keys,
        },
    )


def run_here(ctx: RankContext, config: CellConfig) -> tuple[RankReport, list[int], list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CheckpointNotice)
        report, signs = run(ctx, config)
    texts = [str(w.message) for w in said if w.category is CheckpointNotice]
    return report, [sign.step for sign in signs], texts


def series(report: RankReport) -> list[tuple[int, float, float]]:
    return [(s.step, s.loss, s.grad_norm) for s in report.steps]


def test_a_resumed_run_equals_one_that_was_never_interrupted(ranks: Pools, tmp_path: Path) -> None:
    whole = ranks(2)(run_here, saving(None, "constant"))[0][0]
    ranks(2)(run_here, saving(tmp_path, "constant", num_steps=7, checkpoint_every_steps=5))
    first = {found.path.name for found in scan(tmp_path)}
    assert first == {"step-00000005", "step-00000007"}
    config = saving(tmp_path, "constant", restore=str(tmp_path / "step-00000005"))
    report, steps, said = ranks(2)(run_here, config)[0]
    assert not said
    assert steps == list(range(6, NUM_STEPS + 1))
    assert report.restored_steps == 5
    assert series(report) == series(whole)
    assert report.weights_checksum == whole.weights_checksum


def kill_and_resume(folder: Path, after_s: float) -> tuple[bool, RankReport | None]:
    """Run on two ranks; kill both after some time. Return whether the run had come to its end."""
    pool = Pool(2)
    try:
        pool(_warm)
        timer = threading.Timer(after_s, lambda: [p.kill() for p in pool._processes])
        timer.start()
        try:
            report = pool(run, saving(folder))[0][0]
        except RankError:
            return False, None
        finally:
            timer.cancel()
        return True, report
    finally:
        pool.close()


def _warm(ctx: RankContext) -> None:
    ctx.mesh()


def test_four_kills_at_random_moments_leave_no_trace(ranks: Pools, tmp_path: Path) -> None:
    whole = ranks(2)(run_here, saving(tmp_path / "whole"))[0][0]
    folder = tmp_path / "killed"
    chance = random.Random(4)
    started = time.monotonic()
    ranks(2)(run, saving(tmp_path / "timed"))
    usual_s = time.monotonic() - started
    num_killed = 0
    for _ in range(4):
        ended, _ = kill_and_resume(folder, chance.uniform(0.2, 0.9) * usual_s)
        num_killed += not ended
    assert num_killed > 0, "every run came to its end before its time"
    report = ranks(2)(run_here, saving(folder))[0][0]
    assert series(report) == series(whole)
    assert report.weights_checksum == whole.weights_checksum
    newest = scan(folder)[0].path
    assert newest.name == f"step-{NUM_STEPS:08d}"
    for path in (newest, tmp_path / "whole" / newest.name):
        verify(path)
    twin = tmp_path / "whole" / newest.name
    for path in newest.glob("*.bin"):
        same = path.read_bytes() == (twin / path.name).read_bytes()
        assert same, "weights or moments differ"


def test_old_checkpoints_are_removed_and_damaged_ones_passed_over(
    ranks: Pools, tmp_path: Path
) -> None:
    ranks(2)(run_here, saving(tmp_path))
    assert [found.path.name for found in scan(tmp_path)] == ["step-00000012", "step-00000009"]
    truncate(tmp_path / "step-00000012" / "rank-00001.bin")
    report, steps, said = ranks(2)(run_here, saving(tmp_path))[0]
    assert steps == [10, 11, 12]
    assert "step-00000012" in said[0]
    assert "rank-00001.bin" in said[0]
    assert len(report.steps) == NUM_STEPS
    assert report.transfers


def test_a_finished_run_makes_its_last_steps_again(ranks: Pools, tmp_path: Path) -> None:
    first = ranks(2)(run_here, saving(tmp_path))[0][0]
    again, steps, _ = ranks(2)(run_here, saving(tmp_path))[0]
    assert steps == [10, 11, 12]
    assert series(first) == series(again)
    assert first.weights_checksum == again.weights_checksum


def refusal(ctx: RankContext, config: CellConfig) -> str:
    with pytest.raises((ConfigError, CheckpointError)) as raised:
        run(ctx, config)
    return str(raised.value)


def test_what_cannot_be_gone_on_with_is_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2)(run_here, saving(tmp_path, num_steps=3))
    other = dataclasses.replace(saving(tmp_path), optimizer=saving(None).optimizer)
    other = dataclasses.replace(
        other, optimizer=dataclasses.replace(other.optimizer, lr=other.optimizer.lr * 2)
    )
    text = ranks(2)(refusal, other)[0]
    assert "another training: optimizer=" in text
    assert "run.restore=never" in text
    path = str(tmp_path / "step-00000003")
    text = ranks(2)(refusal, saving(None, num_steps=3, restore=path))[0]
    assert "step 3 of 3; raise run.num_steps" in text
    truncate(tmp_path / "step-00000003" / "rank-00000.bin")
    text = ranks(2)(refusal, saving(tmp_path))[0]
    assert "no whole checkpoint to go on from" in text
    _, steps, _ = ranks(2)(run_here, saving(tmp_path, num_steps=3, restore="never"))[0]
    assert steps == [1, 2, 3]


def test_a_run_goes_on_with_other_ranks(ranks: Pools, tmp_path: Path) -> None:
    ranks(2)(run_here, saving(tmp_path, "constant", num_steps=6))
    parallel = config_of(parallel={"tp": 2}).parallel
    config = dataclasses.replace(saving(tmp_path, "constant"), parallel=parallel)
    report, steps, _ = ranks(4)(run_here, config)[0]
    assert steps == list(range(7, NUM_STEPS + 1))
    whole = ranks(2)(run_here, saving(None, "constant"))[0][0]
    assert series(report)[:6] == series(whole)[:6]
    losses = [[s.loss for s in r.steps] for r in (report, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_generators_go_on_or_are_seeded_apart() -> None:
    device = torch.device("cpu")
    before = rng_state(device)
    try:
        state = rng_state(device)
        first = draw()
        set_rng_state(state, device)
        assert draw() == first
        drawn = []
        for data_rank in (0, 1, 0):
            reseed(3, 100, data_rank=data_rank)
            drawn.append(draw())
        assert drawn[0] == drawn[2] != drawn[1]
    finally:
        set_rng_state(before, device)


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]
