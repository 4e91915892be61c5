"""What a matrix says, in words computed from its numbers."""

from collections import Counter
from collections.abc import Sequence

from rayzero.records import CellRecord, Status
from rayzero.report.break_even import break_even_sentence
from rayzero.report.reconcile import Match, memory_match, traffic_match
from rayzero.report.units import both, with_unit

NAMED_DIFFERENCES = 5


def fastest(records: Sequence[CellRecord]) -> CellRecord | None:
    """Return the ok cell with the most tokens/s."""
    timed = [r for r in records if r.row.status == Status.OK.value and r.row.tokens_per_s]
    return max(timed, key=lambda r: r.row.tokens_per_s or 0.0, default=None)


def leanest(records: Sequence[CellRecord]) -> CellRecord | None:
    """Return the ok cell with the lowest peak."""
    known = [r for r in records if r.row.status == Status.OK.value and r.row.peak_bytes]
    return min(known, key=lambda r: r.row.peak_bytes or 0, default=None)


def difference_text(match: Match) -> str:
    """Write measured minus formula in bytes; 'by kind' where only the parts differ."""
    difference = match.measured_bytes - match.formula_bytes
    return f"{difference:+,} B" if difference else "by kind"


def where_it_differs(match: Match) -> str:
    """Name rank, kind or transfer, and bytes of the largest difference."""
    if not match.differing:
        return difference_text(match)
    worst = max(match.differing, key=lambda line: abs(line.difference))
    more = len(match.differing) - 1
    rest = f" and {more} more" if more else ""
    return f"rank {worst.rank} {worst.item} {worst.difference:+,} B{rest}"


def sentences(records: Sequence[CellRecord]) -> list[str]:
    """Return the findings: outcome, fastest, leanest, break-even, parity and theory."""
    said = [
        _outcome(records),
        _fastest_sentence(records),
        _leanest_sentence(records),
        break_even_sentence(records),
        _parity_sentence(records),
        _theory_sentence(records),
    ]
    return [sentence for sentence in said if sentence]


def _outcome(records: Sequence[CellRecord]) -> str:
    counts = Counter(record.row.status for record in records)
    order = [status.value for status in Status if counts[status.value]]
    parts = ", ".join(f"{counts[status]} {status.replace('_', ' ')}" for status in order)
    return f"{_cells(len(records))}: {parts}." if records else "No cell has run."


def _fastest_sentence(records: Sequence[CellRecord]) -> str:
    best = fastest(records)
    if best is None:
        return "No cell was timed, so there is no fastest one."
    row = best.row
    step = f" ({row.step_s_median * 1000:.1f} ms a step)" if row.step_s_median else ""
    peak = f", with a peak of {with_unit(row.peak_bytes)} per rank" if row.peak_bytes else ""
    return f"Fastest: {row.cell} with {row.tokens_per_s:,.0f} tokens/s{step}{peak}."


def _leanest_sentence(records: Sequence[CellRecord]) -> str:
    best = leanest(records)
    if best is None or not best.row.peak_bytes:
        return ""
    row = best.row
    peaks = [r.row.peak_bytes for r in records if r.row.peak_bytes]
    times = max(peaks) / best.row.peak_bytes
    amount = both(best.row.peak_bytes) if best.row.peak_bytes >= 2**30 else ""
    tokens = f" at {row.tokens_per_s:,.0f} tokens/s" if row.tokens_per_s else ""
    return (
        f"Leanest: {row.cell} with a peak of {amount or with_unit(best.row.peak_bytes)} per rank"
        f"{tokens}; the largest peak is {times:.2f} times that."
    )


def _parity_sentence(records: Sequence[CellRecord]) -> str:
    compared = [r.row for r in records if r.row.parity]
    if not compared:
        return "Losses were not compared between cells."
    wrong = [row.cell for row in compared if row.parity != "ok"]
    errors = [row.parity_error for row in compared if row.parity_error is not None]
    largest = f"; the largest relative error is {max(errors):.1e}" if errors else ""
    if wrong:
        return f"The losses of {_listed(wrong)} do not agree with the reference cell{largest}."
    return f"The losses of all {_cells(len(compared))} compared agree{largest}."


def _theory_sentence(records: Sequence[CellRecord]) -> str:
    parts = [
        _agreement("bytes held", [(r, memory_match(r)) for r in records]),
        _agreement("bytes sent in a step", [(r, traffic_match(r)) for r in records]),
    ]
    return "Theory against engine: " + "; ".join(parts) + "."


def _agreement(what: str, matches: Sequence[tuple[CellRecord, Match | None]]) -> str:
    measured = [(record, match) for record, match in matches if match is not None]
    if not measured:
        return f"{what} were not measured"
    exact = sum(match.is_exact for _, match in measured)
    text = f"{what} equal the formula exactly in {exact} of {_cells(len(measured))}"
    differing = [
        f"{record.row.cell} ({where_it_differs(match)})"
        for record, match in measured
        if not match.is_exact
    ]
    return f"{text}, not in {_listed(differing)}" if differing else text


def _cells(number: int) -> str:
    return "1 cell" if number == 1 else f"{number} cells"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED_DIFFERENCES])
    more = len(names) - NAMED_DIFFERENCES
    return f"{shown} and {more} more" if more > 0 else shown
