"""Step times as bars, one picture for each precision: settings one below the other."""

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rayzero.report.bench_table import BenchRow
from rayzero.report.files import replace_file
from rayzero.report.style import GRID, INK, QUIET, WRONG, Caption, Frame, frame

BAR_IN = 0.24
GAP = 1.4
"""Rows of space between two settings; the upper one holds their name."""
COLOURS = {
    "rayzero": "#0072b2",
    "compute_only": "#b8bec5",
    "ddp": "#e69f00",
    "zero_redundancy": "#56b4e9",
    "fsdp2": "#009e73",
    "deepspeed": "#cc79a7",
}
"""Okabe and Ito's palette; what is no engine is grey."""
STAGED = ("rayzero", "fsdp2", "deepspeed")
"""Engines whose name does not say their stage."""


def write_bench_charts(rows: Sequence[BenchRow], folder: Path, *, subtitle: str) -> list[Path]:
    """Draw all pictures and return their paths."""
    paths = []
    for precision in dict.fromkeys(row.precision for row in rows):
        chosen = [row for row in rows if row.precision == precision]
        caption = Caption(
            title="How long does one step take on each engine?",
            chart=f"Median step time in {precision}, as a multiple of compute alone"
            if _has_limit(chosen)
            else f"Median step time in {precision}, as a multiple of the fastest",
            subtitle=subtitle,
        )
        name = re.sub(r"\W+", "_", precision, flags=re.ASCII)
        paths.append(replace_file(folder / f"bench_{name}.png", _chart(chosen, caption).png()))
    return paths


def _chart(rows: Sequence[BenchRow], caption: Caption) -> Frame:
    settings = [(name, list(group)) for name, group in groupby(rows, key=lambda row: row.setting)]
    num_places = len(rows) + GAP * len(settings)
    canvas = frame(
        caption, width_in=10.5, plot_height_in=BAR_IN * num_places, left_in=1.75, right_in=0.3
    )
    y, labels, longest = 0.0, [], 1.0
    for name, group in settings:
        canvas.axes.text(
            0, y + 0.35, name.replace("_", " "), color=INK, fontsize=10, weight="bold", va="center"
        )
        y += GAP
        unit_s = _unit_s(group)
        for row in group:
            _draw(canvas, y, row, unit_s)
            longest = max(longest, (row.step_s_median or 0.0) / unit_s)
            labels.append((y, _label(row)))
            y += 1
    _dress(canvas, labels, bottom=y, longest=longest)
    return canvas


def _draw(canvas: Frame, y: float, row: BenchRow, unit_s: float) -> None:
    if row.step_s_median is None:
        canvas.axes.text(0.02, y, row.status, color=WRONG, fontsize=9, va="center")
        return
    width = row.step_s_median / unit_s
    canvas.axes.barh(y, width, 0.78, color=COLOURS[row.engine], linewidth=0)
    text = f" {row.step_s_median:.3g} s   {width:.2f}x"
    canvas.axes.text(width, y, text, color=QUIET, fontsize=9, va="center")


def _label(row: BenchRow) -> str:
    name = row.engine.replace("_", " ")
    return f"{name}, stage {row.stage}" if row.engine in STAGED else name


def _dress(
    canvas: Frame, labels: Sequence[tuple[float, str]], *, bottom: float, longest: float
) -> None:
    axes = canvas.axes
    axes.set_ylim(bottom - 0.4, -0.2)
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels], parse_math=False)
    axes.set_xlim(0, longest * 1.2)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)


def _unit_s(rows: Sequence[BenchRow]) -> float:
    """Return the time that counts as 1: compute alone, else the fastest."""
    known = {row.engine: row.step_s_median for row in rows if row.step_s_median is not None}
    fastest = min((row.step_s_median for row in rows if row.step_s_median is not None), default=1.0)
    return known.get("compute_only", fastest)


def _has_limit(rows: Sequence[BenchRow]) -> bool:
    return any(row.engine == "compute_only" and row.step_s_median is not None for row in rows)
