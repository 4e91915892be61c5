"""Do all cells that train the same model on the same batches see the same losses?

The reference is the cell with the lowest (stage, tp). Another order of sums moves a loss a little;
the bounds say how much is no fault.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rayzero.config.build import Plain
from rayzero.config.engine import EngineName
from rayzero.records import CellRecord, CellRow, RankReport, Status

TOLERANCES = {"fp64": 1e-5, "fp32": 1e-5, "bf16": 2e-3, "fp16": 5e-3}
"""Largest relative difference of a loss, by the dtype of the parameters."""

COMPARABLE = (Status.OK.value, Status.PARITY_FAILED.value)


def with_parity(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Fill parity and parity_error of all records; a broken parity becomes the status."""
    references: dict[str, CellRecord] = {}
    for record in sorted(records, key=lambda record: reference_order(record.row)):
        if record.row.status in COMPARABLE:
            references.setdefault(same_training(record.config), record)
    return [_compared(record, references.get(same_training(record.config))) for record in records]


def same_training(config: Mapping[str, object]) -> str:
    """Return a key that is equal for cells whose losses must agree.

    Dropout's masks depend on who computes what, so with it only stages are compared.
    """
    model, data, run = (_group(config, name) for name in ("model", "data", "run"))
    draws = bool(model.get("dropout"))
    asked = {
        "model": model,
        "data": {key: value for key, value in data.items() if draws or key != "micro_batch"},
        "masks": config["parallel"] if draws else None,
        "optimizer": config["optimizer"],
        "precision": config["precision"],
        "seed": run["seed"],
    }
    return json.dumps(asked, sort_keys=True)


def reference_order(row: CellRow) -> tuple[int, int, bool, str]:
    """Sort the reference first: lowest stage, lowest tp, our engine, then by name."""
    ours = row.engine == EngineName.RAYZERO.value
    return (row.stage or 0, row.tp or 1, not ours, row.cell)


def parity_error(record: CellRecord, reference: CellRecord) -> float | None:
    """Return the largest |loss - ref| / |ref| over common timed steps, None if there are none."""
    expected = {sample.step: sample.loss for sample in reference.samples if sample.timed}
    errors = [
        _relative(sample.loss, expected[sample.step])
        for sample in record.samples
        if sample.timed and sample.step in expected
    ]
    return max(errors, default=None)


def tolerance_of(config: Mapping[str, object]) -> float:
    """Return the bound for a cell's precision."""
    return TOLERANCES[str(_group(config, "precision")["params"])]


def weights_fault(record: CellRecord) -> str:
    """Name two ranks that should hold the same whole weights and do not; empty if none."""
    seen: dict[int, RankReport] = {}
    for report in record.reports:
        if not report.weights_checksum:
            continue
        # Ranks of one tensor-parallel group are neighbours and hold different parts.
        other = seen.setdefault(report.rank % (record.row.tp or 1), report)
        if other.weights_checksum != report.weights_checksum:
            return f"ranks {other.rank} and {report.rank} hold different weights at the end"
    return ""


def _compared(record: CellRecord, reference: CellRecord | None) -> CellRecord:
    if reference is None or record.row.status not in COMPARABLE:
        return record
    error = parity_error(record, reference)
    if error is None:
        return record
    allowed = tolerance_of(record.config)
    reason = weights_fault(record)
    if error > allowed:
        reason = (
            f"losses differ from {reference.row.cell} by {error:.2e}; allowed {allowed:.0e}"
            + (f"; {reason}" if reason else "")
        )
    return replace(record, row=_judged(record.row, error=error, reason=reason))


def _judged(row: CellRow, *, error: float, reason: str) -> CellRow:
    return replace(
        row,
        status=(Status.PARITY_FAILED if reason else Status.OK).value,
        reason=reason,
        parity="failed" if reason else "ok",
        parity_error=error,
    )


def _relative(loss: float, expected: float) -> float:
    """Compare two losses; NaN and infinity agree with nothing."""
    if not (math.isfinite(loss) and math.isfinite(expected)):
        return math.inf
    return abs(loss - expected) / max(abs(expected), 1e-30)


def _group(config: Mapping[str, object], name: str) -> Plain:
    group = config[name]
    assert isinstance(group, dict), f"config group {name} is {type(group).__name__}"
    return group
