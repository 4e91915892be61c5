"""A dry run as tables: bytes held and sent, by engine and by formula, and memory over the step."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from rayzero.records import DryRunReport, Holdings, Kind, Transfer
from rayzero.report.files import replace_file
from rayzero.report.units import with_unit

BYTES_HEADER = (
    "part",
    "item",
    "formula_bytes",
    "dryrun_bytes",
    "difference",
    "padding_bytes",
    "formula_transfers",
    "dryrun_transfers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One amount by formula and by dry run. part: when it is held, or "sent"."""

    part: str
    item: str
    formula_bytes: int
    dryrun_bytes: int
    padding_bytes: int | None = None
    formula_transfers: int | None = None
    dryrun_transfers: int | None = None

    @property
    def is_equal(self) -> bool:
        """Whether both agree, in number of transfers too."""
        same_bytes = self.formula_bytes == self.dryrun_bytes
        return same_bytes and self.formula_transfers == self.dryrun_transfers


def compare(report: DryRunReport) -> list[Compared]:
    """List all amounts: held after init, backward and step, and sent in a step."""
    return [
        *_held("after init", report.formula_after_init, report.after_init),
        *_held("after backward", report.formula_after_backward, report.after_backward),
        *_held("after step", report.formula_after_step, report.after_step),
        *_sent(report.formula_transfers, report.transfers),
    ]


def write_bytes(amounts: Iterable[Compared], path: Path) -> Path:
    """Write the amounts as CSV."""
    rows = [
        (
            a.part,
            a.item,
            a.formula_bytes,
            a.dryrun_bytes,
            a.dryrun_bytes - a.formula_bytes,
            a.padding_bytes,
            a.formula_transfers,
            a.dryrun_transfers,
        )
        for a in amounts
    ]
    return _write(path, BYTES_HEADER, rows)


def write_timeline(report: DryRunReport, path: Path) -> Path:
    """Write memory over the step as CSV, a line a visit."""
    kinds = [kind.value for kind in Kind]
    header = ("visit", "phase", "unit", *kinds, "activations", "total_bytes")
    rows = [
        (
            visit,
            point.phase.value,
            point.unit,
            *(point.bytes_by_kind.get(kind, 0) for kind in kinds),
            point.activations_bytes,
            point.total_bytes,
        )
        for visit, point in enumerate(report.timeline)
    ]
    return _write(path, header, rows)


def print_dry_run(report: DryRunReport, amounts: Sequence[Compared], console: Console) -> None:
    """Print held and sent bytes, and the peak."""
    held = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("held", "kind", "formula", "dry run", "of it padding"):
        held.add_column(header, justify="left" if header in ("held", "kind") else "right")
    sent = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("sent in a step", "transfers", "formula", "dry run"):
        sent.add_column(header, justify="left" if header == "sent in a step" else "right")
    for amount in amounts:
        pair = (with_unit(amount.formula_bytes), _marked(amount))
        if amount.padding_bytes is not None:
            held.add_row(amount.part, amount.item, *pair, with_unit(amount.padding_bytes))
        else:
            sent.add_row(amount.item, str(amount.dryrun_transfers), *pair)
    console.print(held)
    console.print(sent)
    if report.peak is not None:
        peak = report.peak
        where = f"{peak.phase.value} of {peak.unit}" if peak.unit else peak.phase.value
        console.print(
            f"peak: {with_unit(peak.total_bytes)} in the {where}; of it activations "
            f"{with_unit(peak.activations_bytes)}"
        )


def _marked(amount: Compared) -> str:
    sign = "=" if amount.is_equal else "[red]differs[/red]"
    return f"{with_unit(amount.dryrun_bytes)} {sign}"


def _held(part: str, formula: Holdings, found: Holdings) -> list[Compared]:
    padding = Counter({(e.kind, e.where): e.padding_bytes for e in found.entries})
    by_formula = {(e.kind, e.where): e.num_bytes for e in formula.entries}
    by_engine = {(e.kind, e.where): e.num_bytes for e in found.entries}
    return [
        Compared(
            part=part,
            item=f"{kind.value} ({where.value})",
            formula_bytes=by_formula.get((kind, where), 0),
            dryrun_bytes=by_engine.get((kind, where), 0),
            padding_bytes=padding[kind, where],
        )
        for kind, where in dict.fromkeys([*by_formula, *by_engine])
    ]


def _sent(formula: Sequence[Transfer], found: Sequence[Transfer]) -> list[Compared]:
    by_formula, by_engine = _by_item(formula), _by_item(found)
    return [
        Compared(
            part="sent",
            item=item,
            formula_bytes=sum(t.sent_bytes for t in by_formula.get(item, ())),
            dryrun_bytes=sum(t.sent_bytes for t in by_engine.get(item, ())),
            formula_transfers=len(by_formula.get(item, ())),
            dryrun_transfers=len(by_engine.get(item, ())),
        )
        for item in sorted({*by_formula, *by_engine})
    ]


def _by_item(transfers: Sequence[Transfer]) -> dict[str, list[Transfer]]:
    items: dict[str, list[Transfer]] = {}
    for t in transfers:
        items.setdefault(f"{t.op} over {t.axis} in {t.phase.value}", []).append(t)
    return items


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return replace_file(path, stream.getvalue().encode())
