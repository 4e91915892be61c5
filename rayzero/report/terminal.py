"""The matrix as a table in the terminal, and why cells failed beneath it."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rayzero.records import CellRecord, CellRow, Status
from rayzero.report.reconcile import Match, memory_match, traffic_match
from rayzero.report.summary import fastest, where_it_differs
from rayzero.report.units import Unit, common_unit

PLAIN_WIDTH = 100
NOT_MEASURED = "-"
_COLOURS = {Status.OK.value: "green", Status.IMPOSSIBLE.value: "yellow"}


def print_matrix(records: Sequence[CellRecord], console: Console | None = None) -> None:
    """Print the table and the reasons; without colour and 100 wide where no terminal listens."""
    console = console or default_console()
    console.print(matrix_table(records, plain=not console.is_terminal))
    console.print(legend(), style="dim", highlight=False)
    for text in (*reasons(records), *differences(records)):
        console.print(text)


def default_console() -> Console:
    """Return a console on standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH, no_color=True)


def matrix_table(records: Sequence[CellRecord], *, plain: bool = False) -> Table:
    """Lay the records out, one row a cell; the best throughput carries a star."""
    held = [memory_match(record) for record in records]
    sent = [traffic_match(record) for record in records]
    peak_unit = common_unit(record.row.peak_bytes for record in records)
    held_unit = common_unit(m.measured_bytes if m else None for m in held)
    sent_unit = common_unit(m.measured_bytes if m else None for m in sent)
    best = fastest(records)
    table = Table(box=box.ASCII2 if plain else box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("cell", overflow="fold")
    table.add_column("status", no_wrap=True)
    for header in (
        "tokens/s",
        "step\nms",
        f"peak\n{peak_unit.name}",
        f"held\n{held_unit.name}",
        f"sent/step\n{sent_unit.name}",
        "parity",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for record, memory, traffic in zip(records, held, sent, strict=True):
        table.add_row(
            *_measured(record.row, peak_unit, is_best=record is best),
            _compared(memory, held_unit),
            _compared(traffic, sent_unit),
            record.row.parity or NOT_MEASURED,
        )
    return table


def legend() -> str:
    """Explain the marks of the table."""
    return "* fastest   = equals the formula to the byte, on every rank   ! differs, see below"


def differences(records: Sequence[CellRecord]) -> list[Text]:
    """Name where theory and engine differ, a line each."""
    pairs = [
        (record, what, match)
        for record in records
        for what, match in (("held", memory_match(record)), ("sent", traffic_match(record)))
    ]
    return [
        Text.assemble((f"{record.row.cell}: {what}", "red"), f"  {where_it_differs(match)}")
        for record, what, match in pairs
        if match is not None and not match.is_exact
    ]


def reasons(records: Sequence[CellRecord]) -> list[Text]:
    """Say why each cell that is not ok ended so."""
    return [
        Text.assemble((f"{r.row.cell}: {r.row.status}", _colour(r.row.status)), f"  {r.row.reason}")
        for r in records
        if r.row.status != Status.OK.value
    ]


def _measured(row: CellRow, peak_unit: Unit, *, is_best: bool) -> list[Text]:
    star = " *" if is_best else ""
    tokens = NOT_MEASURED if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}{star}"
    step = NOT_MEASURED if row.step_s_median is None else f"{row.step_s_median * 1000:.1f}"
    peak = NOT_MEASURED if row.peak_bytes is None else peak_unit.text(row.peak_bytes)
    return [
        Text(row.cell),
        Text(row.status, _colour(row.status)),
        Text(tokens, "bold" if is_best else ""),
        Text(step),
        Text(peak),
    ]


def _compared(match: Match | None, unit: Unit) -> Text:
    if match is None:
        return Text(NOT_MEASURED)
    number = unit.text(match.measured_bytes)
    return Text(f"{number} =") if match.is_exact else Text(f"{number} !", "red")


def _colour(status: str) -> str:
    return _COLOURS.get(status, "red")
