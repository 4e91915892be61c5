"""Where ZeRO-3 and tensor parallelism send the same, in words computed from a matrix's bytes.

ZeRO's bytes of a step do not depend on the tokens, tensor parallelism's are proportional to them.
So one cell of each, on the same ranks, gives the tokens per rank T* at which they meet:

    bytes of stage 3 = bytes of ZeRO beside tp + T*/T x bytes of tp     (T tokens per rank here)

The formulas are those of one transformer layer (theory/paper.py), without embedding and loss.
"""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

from rayzero.records import CellRecord, CellRow, Phase, Status
from rayzero.theory.paper import (
    break_even_many_ranks,
    break_even_same_ranks,
    dense_layer_params,
)

PRINTED = {"full": 6}
"""All-reduces of a layer as published, by model.checkpointing; else 4."""


def break_even_sentence(records: Sequence[CellRecord]) -> str:
    """Compare each tp degree with stage 3 alone; empty where the matrix has not both."""
    alike: dict[tuple[object, ...], list[CellRecord]] = defaultdict(list)
    for record in records:
        row = record.row
        if row.status == Status.OK.value and row.engine == "rayzero" and record.reports:
            key = (row.model, row.precision, row.offload, row.global_batch, row.seq_len)
            alike[*key, len(record.reports)].append(record)
    return " ".join(filter(None, (_of_alike(cells) for cells in alike.values())))


def _of_alike(records: Sequence[CellRecord]) -> str:
    """Write what cells of one model and batch on the same number of ranks say."""
    stage_3 = next((r for r in records if (r.row.stage, r.row.tp) == (3, 1)), None)
    if stage_3 is None:
        return ""
    world, tokens = len(stage_3.reports), _tokens_per_rank(stage_3)
    chosen = {r.row.tp: r for r in records if r.row.stage == 1 and _sent(r, tp_axis=True)}
    parts = [_part(stage_3, chosen[tp]) for tp in sorted(t for t in chosen if t is not None)]
    if not parts:
        return ""
    return (
        f"On {world} ranks with {tokens:,.0f} tokens each, stage 3 alone sends "
        f"{_sent(stage_3, tp_axis=False):,} B per rank and step; {'; '.join(parts)}."
    )


def _part(stage_3: CellRecord, cell: CellRecord) -> str:
    """Compare one cell with stage 3."""
    tokens = _tokens_per_rank(cell)
    zero_3, zero_1 = _sent(stage_3, tp_axis=False), _sent(cell, tp_axis=False)
    by_tp = _sent(cell, tp_axis=True)
    meet = tokens * (zero_3 - zero_1) / by_tp
    times = (by_tp + zero_1) / zero_3
    formula = _formula(cell)
    beside = "" if formula is None else f" (by the formula of a layer {float(formula):,.0f})"
    return (
        f"{cell.row.cell} sends {times:.2f} times as much, and would send as much at "
        f"{max(0.0, meet):,.0f} tokens per rank{beside}"
    )


def _formula(cell: CellRecord) -> Fraction | None:
    """Return the tokens per rank at which one layer's bytes meet; None for a foreign model."""
    model, row = cell.config.get("model"), cell.row
    if not isinstance(model, dict) or model["factory"] is not None:
        return None
    assert row.tp is not None
    hidden, all_reduces = int(model["hidden"]), PRINTED.get(str(model["checkpointing"]), 4)
    rule = break_even_same_ranks if row.tp == len(cell.reports) else break_even_many_ranks
    layer = Fraction(dense_layer_params(hidden))
    return rule(layer, all_reduces=all_reduces, hidden=hidden, tp=row.tp)


def _sent(record: CellRecord, *, tp_axis: bool) -> int:
    """Return the bytes of a step on the axis tp or on the others, of the rank that sends most."""
    return max(
        sum(
            t.sent_bytes
            for t in report.transfers
            if t.phase is not Phase.CONTROL and (t.axis == "tp") == tp_axis
        )
        for report in record.reports
    )


def _tokens_per_rank(record: CellRecord) -> float:
    row: CellRow = record.row
    assert row.global_batch is not None
    assert row.seq_len is not None
    return row.global_batch * row.seq_len / len(record.reports)
