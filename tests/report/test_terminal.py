"""The table in the terminal: whole at 100 columns, plain in a file, and honest about holes."""

import io

from rich.console import Console

from rayzero.records import CellRecord
from rayzero.report.terminal import print_matrix
from tests.report.cells import bad_cell, ok_cell, sweep, with_extra_bytes


def printed(records: list[CellRecord], *, terminal: bool = False) -> str:
    """Print to a text, 100 columns wide."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=100,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    print_matrix(records, console)
    return stream.getvalue()


def test_every_cell_number_and_header_is_whole_at_100_columns() -> None:
    text = printed(sweep())
    assert max(map(len, text.splitlines())) <= 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for record in sweep():
        assert record.row.cell in text
    for word in ("tokens/s", "sent/step", "parity", "MiB", "15,754", "130.0"):
        assert word in text


def test_a_file_gets_plain_ascii() -> None:
    text = printed(sweep())
    assert text.isascii()
    assert "\x1b" not in text


def test_a_terminal_gets_colour() -> None:
    assert "\x1b[" in printed(sweep(), terminal=True)


def test_the_fastest_cell_alone_is_marked() -> None:
    lines = [line for line in printed(sweep()).splitlines() if " * " in line and "|" in line]
    assert len(lines) == 1
    assert "s1_tp1_dp4_fp32" in lines[0]


def test_reasons_stand_beneath() -> None:
    text = printed(sweep())
    assert "s0_tp1_dp4_fp32: out_of_memory  rank 2: 12.0 GiB asked, 1.5 GiB free" in text
    assert "s1_tp4_dp1_fp32: impossible" in text


def test_a_difference_from_the_formula_is_marked_and_named() -> None:
    text = printed([ok_cell(1, 1), with_extra_bytes(ok_cell(2, 1), 12)])
    (good,) = [line for line in text.splitlines() if line.startswith("|s1_")]
    (wrong,) = [line for line in text.splitlines() if line.startswith("|s2_")]
    assert "!" not in good
    assert good.count(" = ") == 2
    assert "!" in wrong
    assert "s2_tp1_dp4_fp32: held  rank 1 counters +12 B" in text


def test_markup_in_names_and_reasons_is_only_text() -> None:
    text = printed([bad_cell(0, 1, "failed", "[/red] [bold]x[/bold]"), ok_cell(1, 1, cell="a[0]")])
    assert "[/red] [bold]x[/bold]" in text
    assert "a[0]" in text


def test_a_matrix_where_all_failed_is_printed() -> None:
    text = printed([bad_cell(s, 1, "out_of_memory", "too large") for s in range(4)])
    assert text.count("out_of_memory") == 8
    assert "*" not in text.splitlines()[4]


def test_nan_and_zero_are_printed_as_they_are() -> None:
    text = printed([ok_cell(0, 4, step_s_median=float("nan"))])
    assert "nan" in text
    assert "0 =" in text
