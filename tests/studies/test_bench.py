"""The bench as it is typed: every peer of torch beside ours, in one minute on real ranks."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayzero.config.bench import COMPUTE_ONLY, BenchConfig
from rayzero.config.build import build
from rayzero.config.engine import EngineName
from rayzero.errors import ConfigError
from rayzero.studies.bench_plan import cell_of, in_turn, settings_of
from rayzero.tracking.store import open_store

ROOT = Path(__file__).parent.parent.parent
ENGINES = "[compute_only:0,rayzero:2,ddp:0,zero_redundancy:1,fsdp2:2,fsdp2:3,ddp:1]"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_bench_runs_every_engine_and_writes_its_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rayzero", "bench", "bench.quick=true", f"bench.engines={ENGINES}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "outputs/bench"
    with (folder / "bench.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    asked = [row["engine"] + ":" + row["stage"] for row in rows]
    assert asked == ENGINES.strip("[]").split(",")
    assert [row["status"] for row in rows] == ["ok"] * 6 + ["impossible"]
    assert "engine=ddp is ZeRO stage 0" in rows[-1]["reason"]
    for row in rows[:-1]:
        assert float(row["step_s_median"]) > 0
        assert float(row["ratio_to_compute"]) > 0
        if row["engine"] != COMPUTE_ONLY:
            assert float(row["loss_difference"]) < 1e-5
    assert float(rows[1]["ratio_to_best_peer"]) > 0
    assert (folder / "bench_fp32.png").is_file()
    client = open_store(None, tmp_path / "outputs").client
    experiment = client.get_experiment_by_name("bench_peers")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1 + len(rows)


def test_all_engines_of_a_setting_get_the_same_batches_and_precision() -> None:
    base = build({"run": {"num_steps": 4, "warmup_steps": 2}})
    bench = BenchConfig()
    settings = settings_of(bench)
    assert len(settings) == 8
    for setting in settings:
        cells = [cell_of(base, setting, c, world=2) for c in bench.contenders]
        assert len({(c.data.micro_batch, c.data.global_batch, c.data.seq_len) for c in cells}) == 1
        assert len({c.precision.name for c in cells}) == 1
        assert {c.run.num_steps for c in cells} == {4 // setting.accumulation}
        assert {c.batching(2).accumulation for c in cells} == {setting.accumulation}
    assert {c.engine for c in bench.contenders} == {None, *EngineName}


def test_every_other_round_goes_backwards() -> None:
    contenders = BenchConfig().contenders
    assert in_turn(contenders, 0) == contenders
    assert in_turn(contenders, 1) == contenders[::-1]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"engines": ["fsdp3:2"]}, "'fsdp3:2'; allowed: ENGINE:STAGE"),
        ({"engines": ["fsdp2"]}, "'fsdp2'; allowed: ENGINE:STAGE"),
        ({"regimes": ["heavy"]}, "allowed: communication_heavy, compute_heavy"),
        ({"precisions": ["fp8"]}, "allowed: fp32, bf16"),
        ({"accumulations": []}, "bench.accumulations is empty"),
        ({"rounds": 0}, "bench.rounds=0"),
    ],
)
def test_a_wrong_programme_names_its_key(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build({"bench": keys})
