"""From rounds to rows: medians, ratios, the best peer, parity, and verdicts on what must hold."""

import csv
from pathlib import Path

import pytest

from rayzero.config.bench import REGIMES, Contender
from rayzero.config.engine import EngineName
from rayzero.records import CellRecord, CellRow, Status, StepSample
from rayzero.report.bench_table import BENCH_FILE, PAGE_FILE
from rayzero.studies.bench_plan import Setting
from rayzero.studies.bench_results import Results
from rayzero.studies.bench_rows import Measured, rows_of, verdicts

COMPUTE = Contender(engine=None, stage=0)
DDP = Contender(engine=EngineName.DDP, stage=0)
FSDP2 = Contender(engine=EngineName.FSDP2, stage=2)
DEEPSPEED = Contender(engine=EngineName.DEEPSPEED, stage=2)
OURS = Contender(engine=EngineName.RAYZERO, stage=2)


def setting_of(precision: str = "fp32") -> Setting:
    return Setting(regime=REGIMES["communication_heavy"], precision=precision, accumulation=1)


def record_of(
    times: list[float],
    *,
    loss: float = 5.0,
    rss: int = 100,
    status: str = "ok",
    transport: str = "pairwise",
) -> CellRecord:
    samples = tuple(
        StepSample(step=i, loss=loss, step_s=time, grad_norm=1.0, timed=True)
        for i, time in enumerate(times)
    )
    row = CellRow(
        cell="x", status=status, reason="it broke" if status != "ok" else "", global_batch=2,
        seq_len=64, peak_host_bytes=rss, transport=transport,
    )  # fmt: skip
    return CellRecord(row=row, fingerprint="", config={}, samples=samples if times else ())


def measured(contender: Contender, *records: CellRecord, precision: str = "fp32") -> Measured:
    return Measured(setting=setting_of(precision), contender=contender, records=records)


def test_ratios_are_of_medians_and_their_range_of_single_rounds() -> None:
    rows = rows_of(
        [
            measured(COMPUTE, record_of([0.5, 0.5]), record_of([0.5, 0.5])),
            measured(OURS, record_of([1.0, 1.0], rss=90), record_of([1.0, 3.0], rss=110)),
            measured(DDP, record_of([0.8, 0.8]), record_of([0.8, 0.8])),
            measured(FSDP2, record_of([2.0, 2.0]), record_of([4.0, 4.0])),
            measured(DEEPSPEED, record_of([9.0, 9.0], rss=50), record_of([9.0, 9.0], rss=50)),
        ]
    )
    ours = next(row for row in rows if row.engine == "rayzero")
    assert (ours.step_s_median, ours.step_s_p95, ours.steps, ours.rounds) == (1.0, 3.0, 4, 2)
    assert ours.tokens_per_s == 128.0
    assert ours.peak_rss_bytes == 100
    assert ours.best_peer == "fsdp2"
    assert ours.ratio_to_best_peer == pytest.approx(1.0 / 3.0)
    assert ours.ratio_to_best_peer_lowest == pytest.approx(0.5)
    assert ours.ratio_to_best_peer_highest == pytest.approx(0.5)
    assert ours.ratio_to_ddp == pytest.approx(1.25)
    assert ours.ratio_to_compute == pytest.approx(2.0)
    assert ours.rss_ratio_to_leanest_peer == pytest.approx(2.0)
    found = {bound.against: bound.verdict for bound in verdicts(rows)}
    assert found == {
        "fsdp2": "reached",
        "ddp": "missed",
        "peak RSS of the leanest peer": "missed",
    }


def test_up_to_three_percent_above_a_bound_is_noise() -> None:
    rows = rows_of([measured(OURS, record_of([0.56])), measured(FSDP2, record_of([1.0]))])
    assert [b.verdict for b in verdicts(rows) if b.against == "fsdp2"] == ["within noise"]


def test_shared_memory_has_bounds_of_its_own() -> None:
    for transport, verdict in (("pairwise", "reached"), ("shared", "missed")):
        ours = measured(OURS, record_of([0.5], transport=transport))
        rows = rows_of([ours, measured(FSDP2, record_of([1.0]))])
        assert [b.verdict for b in verdicts(rows) if b.against == "fsdp2"] == [verdict]


def test_an_engine_with_other_losses_fails_and_compute_alone_does_not() -> None:
    rows = rows_of(
        [
            measured(COMPUTE, record_of([1.0], loss=9.0)),
            measured(OURS, record_of([1.0])),
            measured(FSDP2, record_of([1.0], loss=5.001)),
        ]
    )
    assert [row.status for row in rows] == ["ok", "ok", "parity_failed"]
    assert "2.00e-04; allowed 1e-05" in rows[2].reason


def test_peers_without_a_master_are_shown_in_bf16_and_not_judged() -> None:
    rows = rows_of(
        [
            measured(OURS, record_of([1.0]), precision="bf16"),
            measured(DDP, record_of([0.5], loss=5.1), precision="bf16"),
        ]
    )
    assert [row.status for row in rows] == ["ok", "ok"]
    assert rows[0].ratio_to_ddp == 2.0
    (against_ddp,) = [b for b in verdicts(rows) if b.against == "ddp"]
    assert against_ddp.verdict.startswith("not judged")


def test_a_failed_round_fails_the_row_and_the_bench(tmp_path: Path) -> None:
    results = Results(tmp_path, head=["a machine"], judge=True)
    failed = record_of([], status=Status.FAILED.value)
    results.keep([measured(OURS, record_of([1.0])), measured(FSDP2, record_of([1.0]), failed)])
    assert not results.is_well
    with (tmp_path / BENCH_FILE).open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert rows[1]["step_s_median"] == ""
    assert "failed: it broke" in (tmp_path / PAGE_FILE).read_text()
    assert (tmp_path / "bench_fp32.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_impossible_is_an_answer(tmp_path: Path) -> None:
    results = Results(tmp_path, head=["a machine"], judge=True)
    impossible = record_of([], status=Status.IMPOSSIBLE.value)
    results.keep([measured(OURS, record_of([1.0])), measured(FSDP2, impossible)])
    assert results.is_well
