"""Made-up records for tests of what a sweep does with them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rayzero.config.build import build, defaults
from rayzero.records import (
    CellRecord,
    CellRow,
    Held,
    Holdings,
    Kind,
    Phase,
    RankReport,
    Status,
    StepSample,
    Transfer,
)

STEP_S = (9.0, 0.1, 0.3, 0.2)
"""The first one is warm-up."""


def plain_config(**changes: Any) -> dict[str, Any]:
    """Return plain defaults with some keys changed: group__key=value."""
    plain: Any = defaults()
    for path, value in changes.items():
        group, _, key = path.partition("__")
        plain[group][key] = value
    build(plain)
    return dict(plain)


def cell_record(
    *,
    stage: int = 0,
    tp: int = 1,
    losses: Sequence[float] = (),
    status: Status = Status.OK,
    num_warmup: int = 1,
    **changes: Any,
) -> CellRecord:
    """Return the record of a cell that saw these losses."""
    config = plain_config(zero__stage=stage, parallel__tp=tp, **changes)
    engine, precision = config["engine"]["name"], config["precision"]["name"]
    return CellRecord(
        row=CellRow(
            cell=f"s{stage}_tp{tp}_{precision}_{engine}",
            status=status.value,
            engine=engine,
            stage=stage,
            tp=tp,
            precision=precision,
        ),
        fingerprint="",
        config=config,
        samples=tuple(
            StepSample(step=i, loss=loss, step_s=0.1, grad_norm=1.0, timed=i >= num_warmup)
            for i, loss in enumerate(losses)
        ),
    )


def holdings(parameters: int, **others: int) -> Holdings:
    entries = [Held(kind=Kind.PARAMETERS, num_bytes=parameters)]
    entries += [Held(kind=Kind(name), num_bytes=number) for name, number in others.items()]
    return Holdings(entries=tuple(entries))


def transfer(sent_bytes: int) -> Transfer:
    return Transfer(
        op="all_gather",
        axis="shard",
        phase=Phase.STEP,
        unit="",
        elements=1,
        dtype="fp32",
        sent_bytes=sent_bytes,
    )


def rank_report(rank: int, **changes: Any) -> RankReport:
    """Return what a rank says; later ranks hold, send and take a little more."""
    usual = RankReport(
        rank=rank,
        node="node0",
        device="cpu",
        num_params=1000,
        steps=tuple(
            StepSample(step=i, loss=5.0 - i, step_s=s + rank / 100, grad_norm=1.0, timed=i > 0)
            for i, s in enumerate(STEP_S)
        ),
        holdings=holdings(100 + rank, gradients=50, buckets=7, staging=3),
        formula=holdings(100 + rank, gradients=50, buckets=7, staging=3),
        transfers=(transfer(10), transfer(rank)),
        formula_transfers=(transfer(10), transfer(rank)),
        peak_bytes=200 + rank,
        peak_host_bytes=None,
        validation_loss=2.5,
        data_fingerprint="abc",
        build_s=0.5,
        weights_checksum="",
    )
    return replace(usual, **changes)
