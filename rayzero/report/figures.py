"""The pictures of a sweep: one set for each group of cells that can be compared."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayzero.records import CellRecord, CellRow, Status
from rayzero.report.bars import MEASURED_COLOUR, Legend, Pair, paired_bars
from rayzero.report.files import replace_file
from rayzero.report.heatmap import Quantity, heat_map
from rayzero.report.reconcile import HELD_COLUMNS, Match, memory_match, traffic_match
from rayzero.report.style import KIND_COLOURS, Caption, Frame
from rayzero.report.summary import difference_text
from rayzero.report.units import common_unit

GROUP_COLUMNS = (
    "engine",
    "model",
    "precision",
    "offload",
    "replicate",
    "global_batch",
    "seq_len",
    "devices",
)
"""Cells that differ in one of these are never laid into one picture."""
MAPS = ("throughput", "peak_memory")
PICTURES = (*MAPS, "memory_by_kind", "bytes_sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cells for one set of pictures. name is empty where there is only one group."""

    name: str
    records: tuple[CellRecord, ...]

    @property
    def rows(self) -> list[CellRow]:
        """The cells' rows."""
        return [record.row for record in self.records]


def write_figures(records: Sequence[CellRecord], folder: Path, *, question: str) -> list[Path]:
    """Write all PNGs and return their paths, group by group."""
    paths = []
    for group in groups_of(records):
        suffix = f"_{group.name}" if group.name else ""
        for name, png in _pictures(group, question).items():
            paths.append(replace_file(folder / f"{name}{suffix}.png", png))
    return paths


def groups_of(records: Sequence[CellRecord]) -> list[Group]:
    """Split records by GROUP_COLUMNS, in order of first sight.

    A cell that never came to know a column (it failed before) joins the group that fits it.
    """
    keys: dict[tuple[object, ...], list[CellRecord]] = {}
    for record in sorted(records, key=lambda r: r.row.status != Status.OK.value):
        key = tuple(getattr(record.row, column) for column in GROUP_COLUMNS)
        home = next((known for known in keys if _fits(key, known)), key)
        keys.setdefault(home, []).append(record)
    order = {record.row.cell: index for index, record in enumerate(records)}
    groups = [sorted(found, key=lambda r: order[r.row.cell]) for found in keys.values()]
    varying = [i for i, _ in enumerate(GROUP_COLUMNS) if len({key[i] for key in keys}) > 1]
    names = [_name(key, varying) for key in keys]
    return [
        Group(name=name if names.count(name) == 1 else f"{name}_{index}".strip("_"), records=(*g,))
        for index, (name, g) in enumerate(zip(names, groups, strict=True))
    ]


def _fits(key: Sequence[object], known: Sequence[object]) -> bool:
    return all(a == b or a in (None, "") for a, b in zip(key, known, strict=True))


def _name(key: Sequence[object], varying: Sequence[int]) -> str:
    words = [
        str(key[i]) if isinstance(key[i], str) else f"{GROUP_COLUMNS[i]}{key[i]}" for i in varying
    ]
    return re.sub(r"[^\w.-]+", "-", "_".join(word for word in words if word), flags=re.ASCII)


def _pictures(group: Group, question: str) -> dict[str, bytes]:
    subtitle = _subtitle(group.rows)

    def caption(chart: str) -> Caption:
        return Caption(title=question, chart=chart, subtitle=subtitle)

    peak_unit = common_unit(row.peak_bytes for row in group.rows)
    throughput = Quantity(
        value=lambda row: row.tokens_per_s,
        text=lambda number: f"{number:,.0f}",
        palette="YlGnBu",
        best=max,
    )
    peak = Quantity(
        value=lambda row: row.peak_bytes,
        text=peak_unit.text,
        palette="OrRd",
        best=min,
    )
    charts = (
        heat_map(group.rows, throughput, caption("Throughput, tokens/s (* fastest)")),
        heat_map(group.rows, peak, caption(f"Peak memory per rank, {peak_unit.name} (* leanest)")),
        _memory_bars(
            group.records, caption("Memory per rank by kind, measured, beside the formula")
        ),
        _traffic_bars(
            group.records, caption("Bytes one rank sends in a step, measured, beside the formula")
        ),
    )
    return {name: chart.png() for name, chart in zip(PICTURES, charts, strict=True)}


def _memory_bars(records: Sequence[CellRecord], caption: Caption) -> Frame:
    pairs = [_memory_pair(record) for record in records]
    legend = Legend(
        colours=KIND_COLOURS,
        formula="formula, states only\n(and their buffers)",
        axis="per rank, the largest over ranks",
    )
    return paired_bars(pairs, legend, caption)


def _memory_pair(record: CellRecord) -> Pair:
    match = memory_match(record)
    columns = {column.removesuffix("_bytes"): column for column in HELD_COLUMNS}
    columns["activations"] = "activations_bytes"
    segments = {
        kind: value
        for kind, column in columns.items()
        if (value := getattr(record.row, column)) is not None
    }
    formula = match.formula_bytes if match else record.row.formula_bytes
    return Pair(
        cell=record.row.cell,
        segments=segments,
        formula_bytes=formula,
        note=_note(record, match) if match or not segments else "no formula",
        is_off=match is not None and not match.is_exact,
    )


def _traffic_bars(records: Sequence[CellRecord], caption: Caption) -> Frame:
    pairs = [_traffic_pair(record) for record in records]
    legend = Legend(
        colours={"sent": MEASURED_COLOUR},
        formula="formula",
        axis="per rank and step, the largest over ranks",
    )
    return paired_bars(pairs, legend, caption)


def _traffic_pair(record: CellRecord) -> Pair:
    match = traffic_match(record)
    return Pair(
        cell=record.row.cell,
        segments={"sent": match.measured_bytes} if match else {},
        formula_bytes=match.formula_bytes if match else record.row.formula_sent_bytes,
        note=_note(record, match),
        is_off=match is not None and not match.is_exact,
    )


def _note(record: CellRecord, match: Match | None) -> str:
    if match is None:
        status = record.row.status
        return "not measured" if status == Status.OK.value else status.replace("_", " ")
    return "exact" if match.is_exact else difference_text(match)


def _subtitle(rows: Sequence[CellRow]) -> str:
    """Name model, ranks, devices and what else the cells share, as far as one of them knows it."""
    known = next((row for row in rows if row.status == Status.OK.value), rows[0] if rows else None)
    if known is None:
        return ""
    degrees = (known.replicate, known.shard, known.tp)
    ranks = math.prod(d for d in degrees if d is not None) if None not in degrees else None
    parts = [
        f"model {known.model}" if known.model else "",
        f"{known.num_params:,} parameters" if known.num_params else "",
        f"{ranks} ranks" if ranks else "",
        known.devices,
        known.precision,
        f"global batch {known.global_batch} x {known.seq_len} tokens" if known.global_batch else "",
        f"offload {known.offload}" if known.offload not in ("", "none") else "",
        known.engine if known.engine != "rayzero" else "",
    ]
    return " | ".join(part for part in parts if part)
