"""Bars beside their formula, one pair a cell: memory by kind, and bytes sent in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rayzero.report.style import FORMULA, GRID, QUIET, WRONG, Caption, Frame, frame
from rayzero.report.units import Unit, common_unit

PAIR_IN = 0.46
BAR = 0.44
FORMULA_BAR = 0.2
MEASURED_COLOUR = "#0072b2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One cell: measured bytes in named segments, the formula's bytes, or a word for a hole."""

    cell: str
    segments: Mapping[str, int]
    formula_bytes: int | None
    note: str
    """Stands at the bar's end: 'exact', a difference, or the status of a cell without bytes."""
    is_off: bool
    """Whether measured and formula differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """Colours of the segments in drawing order, and what the formula's bar counts."""

    colours: Mapping[str, str]
    formula: str
    axis: str


def paired_bars(pairs: Sequence[Pair], legend: Legend, caption: Caption) -> Frame:
    """Draw horizontal pairs from top to bottom; the plot grows with the number of cells."""
    ends = [max(sum(p.segments.values()), p.formula_bytes or 0) for p in pairs]
    unit = common_unit(ends)
    longest = max((len(p.cell) for p in pairs), default=8)
    # A picture of one cell is as high as its legend.
    num_places = max(len(pairs), (len(legend.colours) + 2) // 2)
    canvas = frame(
        caption,
        width_in=10.5,
        plot_height_in=PAIR_IN * num_places + 0.15,
        left_in=0.45 + 0.088 * longest,
        right_in=1.85,
    )
    axes = canvas.axes
    limit = unit.of(max(ends, default=0)) * 1.18 or 1.0
    axes.set_xlim(0, limit)
    axes.set_ylim(num_places - 0.4, -0.6)
    axes.set_yticks(range(len(pairs)), [p.cell for p in pairs], parse_math=False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(f"{legend.axis}, {unit.name}", color=QUIET, fontsize=10)
    for y, pair in enumerate(pairs):
        _draw_pair(canvas, y, pair, legend, unit=unit, offset=limit * 0.008)
    _draw_legend(canvas, pairs, legend)
    return canvas


def _draw_pair(
    canvas: Frame, y: int, pair: Pair, legend: Legend, *, unit: Unit, offset: float
) -> None:
    start = 0.0
    for name, colour in legend.colours.items():
        width = unit.of(pair.segments.get(name, 0))
        if width:
            canvas.axes.barh(
                y - 0.12, width, BAR, left=start, color=colour, edgecolor="white", linewidth=0.6
            )
            start += width
    formula = unit.of(pair.formula_bytes or 0)
    if formula:
        canvas.axes.barh(y + 0.23, formula, FORMULA_BAR, color=FORMULA, linewidth=0)
    canvas.axes.text(
        max(start, formula) + offset,
        y,
        pair.note,
        fontsize=9,
        color=WRONG if pair.is_off else QUIET,
        va="center",
        parse_math=False,
    )


def _draw_legend(canvas: Frame, pairs: Sequence[Pair], legend: Legend) -> None:
    used = [name for name in legend.colours if any(pair.segments.get(name) for pair in pairs)]
    handles: list[Patch | Line2D] = [
        Patch(facecolor=legend.colours[name], label=name.replace("_", " ")) for name in used
    ]
    if any(pair.formula_bytes for pair in pairs):
        handles.append(Patch(facecolor=FORMULA, label=legend.formula))
    if handles:
        canvas.legend(handles)
