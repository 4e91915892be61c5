"""Cells as a sweep would record them, with invented numbers: rows, series, bytes, transfers."""

from collections.abc import Sequence
from dataclasses import replace

from rayzero.records import (
    CellRecord,
    CellRow,
    Held,
    Holdings,
    Kind,
    Phase,
    RankReport,
    StepSample,
    Transfer,
    Where,
)

PARAMS = 1_200_000
STARTED = 1_750_000_000.25


def holdings(stage: int, shards: int, tp: int) -> Holdings:
    """Hold fp32 parameters, gradients, two moments and one bucket."""
    whole = 4 * PARAMS // tp
    shard = whole // shards
    entries = [
        Held(kind=Kind.PARAMETERS, num_bytes=shard if stage == 3 else whole, padding_bytes=64),
        Held(kind=Kind.GRADIENTS, num_bytes=shard if stage >= 2 else whole),
        Held(kind=Kind.MOMENTS, num_bytes=2 * (shard if stage >= 1 else whole)),
        Held(kind=Kind.BUCKETS, num_bytes=400_000),
        Held(kind=Kind.STAGING, where=Where.HOST, num_bytes=1_000),
    ]
    return Holdings(entries=tuple(entries))


def transfers(stage: int, shards: int) -> tuple[Transfer, ...]:
    """Send one reduce-scatter and one all-gather of the whole model, two gathers at stage 3."""
    sent = 4 * PARAMS * (shards - 1) // shards
    gathers = 2 if stage == 3 else 1
    one = Transfer(
        op="all_gather",
        axis="shard",
        phase=Phase.FORWARD,
        unit="block0",
        elements=PARAMS,
        dtype="fp32",
        sent_bytes=sent,
    )
    reduce = replace(one, op="reduce_scatter", phase=Phase.BACKWARD)
    return (*[one] * gathers, reduce)


def rank_report(
    rank: int, stage: int, shards: int, tp: int, steps: Sequence[StepSample]
) -> RankReport:
    """Report what the formulas say, exactly."""
    held, sent = holdings(stage, shards, tp), transfers(stage, shards)
    return RankReport(
        rank=rank,
        node="node0",
        device="cpu",
        num_params=PARAMS,
        steps=tuple(steps),
        holdings=held,
        formula=held,
        transfers=sent,
        formula_transfers=sent,
        peak_bytes=held.bytes_of() + 9_000_000 // tp,
        peak_host_bytes=400_000_000,
        validation_loss=None,
        data_fingerprint="abc",
        build_s=0.1,
        weights_checksum="f00d",
    )


def ok_cell(stage: int, tp: int, ranks: int = 4, **changes: object) -> CellRecord:
    """Record a cell that ended ok; `changes` replace columns of its row."""
    shards = ranks // tp
    step_s = 0.09 + 0.012 * stage + 0.02 * tp
    samples = [
        StepSample(
            step=i,
            loss=5.55 - 0.1 * i,
            step_s=step_s + 0.001 * (i % 3),
            grad_norm=1.0,
            timed=i >= 3,
        )
        for i in range(23)
    ]
    reports = [rank_report(rank, stage, shards, tp, samples) for rank in range(ranks)]
    held = reports[0].holdings
    sent = sum(t.sent_bytes for t in reports[0].transfers)
    name = f"s{stage}_tp{tp}_dp{shards}_fp32"
    row = CellRow(
        cell=name,
        status="ok",
        engine="rayzero",
        stage=stage,
        offload="none",
        replicate=1,
        shard=shards,
        tp=tp,
        precision="fp32",
        model="tiny",
        num_params=PARAMS,
        micro_batch=16 // shards,
        accumulation=1,
        global_batch=16,
        seq_len=128,
        steps=20,
        step_s_median=step_s,
        step_s_p95=step_s * 1.1,
        tokens_per_s=16 * 128 / step_s,
        peak_bytes=reports[0].peak_bytes,
        peak_host_bytes=400_000_000,
        parameters_bytes=held.bytes_of(Kind.PARAMETERS),
        gradients_bytes=held.bytes_of(Kind.GRADIENTS),
        master_bytes=0,
        moments_bytes=held.bytes_of(Kind.MOMENTS),
        communication_bytes=held.bytes_of(Kind.BUCKETS, Kind.STAGING),
        module_buffers_bytes=0,
        activations_bytes=9_000_000 // tp,
        formula_bytes=held.bytes_of(),
        sent_bytes=sent,
        formula_sent_bytes=sent,
        loss_first=5.55,
        loss_last=3.35,
        parity="ok",
        parity_error=3e-7 * tp,
        devices="4 x CPU (2 cores)",
        wall_s=4.0,
        overhead_s=0.9,
    )
    return CellRecord(
        row=replace(row, **changes),  # type: ignore[arg-type]
        fingerprint=f"fingerprint-{name}",
        config={"zero": {"stage": stage}, "parallel": {"tp": tp}},
        samples=tuple(samples),
        reports=tuple(reports),
        started_unix_s=STARTED,
    )


def bad_cell(stage: int, tp: int, status: str, reason: str, ranks: int = 4) -> CellRecord:
    """Record a cell that measured nothing."""
    row = CellRow(
        cell=f"s{stage}_tp{tp}_dp{ranks // tp}_fp32",
        status=status,
        reason=reason,
        engine="rayzero",
        stage=stage,
        offload="none",
        replicate=1,
        shard=ranks // tp,
        tp=tp,
        precision="fp32",
        model="tiny",
        global_batch=16,
        seq_len=128,
    )
    return CellRecord(
        row=row,
        fingerprint="f",
        config={"zero": {"stage": stage}},
        started_unix_s=STARTED,
        log="Traceback: <boom> & more\n" if status != "impossible" else "",
    )


def sweep(holes: bool = True) -> list[CellRecord]:
    """Record stages 0-3 x tp 1, 2, 4, with an out-of-memory, a lost and an impossible cell."""
    cells = {(s, t): ok_cell(s, t) for s in range(4) for t in (1, 2, 4)}
    if holes:
        cells[0, 1] = bad_cell(0, 1, "out_of_memory", "rank 2: 12.0 GiB asked, 1.5 GiB free")
        cells[2, 4] = bad_cell(2, 4, "worker_lost", "rank 3 on node0 died (SIGKILL)")
        cells[1, 4] = bad_cell(1, 4, "impossible", "predicted 31.0 GiB, a node has 24.0 GiB")
    return list(cells.values())


def with_extra_bytes(record: CellRecord, num_bytes: int) -> CellRecord:
    """Let rank 1 hold more than the formula says."""
    report = record.reports[1]
    extra = Held(kind=Kind.COUNTERS, num_bytes=num_bytes)
    held = Holdings(entries=(*report.holdings.entries, extra))
    reports = (record.reports[0], replace(report, holdings=held), *record.reports[2:])
    return replace(record, reports=reports)
