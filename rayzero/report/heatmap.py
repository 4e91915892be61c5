"""Heat map over stage and tp: a number in each square, or a status where there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import colormaps
from matplotlib.colors import Colormap, Normalize
from matplotlib.patches import Rectangle

from rayzero.records import CellRow, Status
from rayzero.report.style import HOLE, INK, QUIET, Caption, Frame, frame

SQUARE_IN = (1.55, 0.95)
GAP = 0.03
DARK = 0.45

Value = Callable[[CellRow], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What the squares show: how to read it from a row, to write it, and which end is the best."""

    value: Value
    text: Callable[[float], str]
    palette: str
    best: Callable[[Sequence[float]], float]


def heat_map(rows: Sequence[CellRow], quantity: Quantity, caption: Caption) -> Frame:
    """Draw the map; several rows of one square (other bucket sizes, say) show the best of them."""
    stages = sorted({row.stage for row in rows if row.stage is not None})
    degrees = sorted({row.tp for row in rows if row.tp is not None})
    canvas = frame(
        caption,
        width_in=max(7.0, 1.3 + SQUARE_IN[0] * len(degrees)),
        plot_height_in=SQUARE_IN[1] * max(len(stages), 1),
        left_in=1.0,
        right_in=0.3,
    )
    axes = canvas.axes
    axes.set_xlim(0, max(len(degrees), 1))
    axes.set_ylim(max(len(stages), 1), 0)
    axes.set_xticks([i + 0.5 for i in range(len(degrees))], [f"tp {d}" for d in degrees])
    axes.set_yticks([i + 0.5 for i in range(len(stages))], [f"stage {s}" for s in stages])
    axes.set_xlabel("tensor-parallel degree", color=QUIET, fontsize=10)
    numbers = [n for row in rows if (n := _known(row, quantity)) is not None]
    scale = _Scale(numbers, quantity)
    for y, stage in enumerate(stages):
        for x, tp in enumerate(degrees):
            here = [row for row in rows if (row.stage, row.tp) == (stage, tp)]
            _draw_square(canvas, x, y, here, scale)
    return canvas


class _Scale:
    """Numbers to colours; knows the best number of the map."""

    def __init__(self, numbers: Sequence[float], quantity: Quantity) -> None:
        self.quantity = quantity
        self.best = quantity.best(numbers) if numbers else None
        low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
        span = high - low or 1.0
        self._norm = Normalize(low - 0.12 * span, high + 0.25 * span)
        self._colours: Colormap = colormaps[quantity.palette]

    def colour(self, number: float) -> tuple[float, float, float, float]:
        """Return the colour of a square."""
        return self._colours(float(self._norm(number)))

    def ink(self, number: float) -> str:
        """Return black or white, whichever reads better on that colour."""
        red, green, blue, _ = self.colour(number)
        return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < DARK else INK


def _known(row: CellRow, quantity: Quantity) -> float | None:
    return quantity.value(row) if row.status == Status.OK.value else None


def _draw_square(canvas: Frame, x: int, y: int, rows: Sequence[CellRow], scale: _Scale) -> None:
    numbers = [n for row in rows if (n := _known(row, scale.quantity)) is not None]
    if numbers:
        number = scale.quantity.best(numbers)
        _patch(canvas, x, y, facecolor=scale.colour(number))
        text = scale.quantity.text(number)
        is_best = number == scale.best and scale.best is not None
        weight = "bold" if is_best else "normal"
        _write(canvas, x, y, text + (" *" if is_best else ""), scale.ink(number), weight)
        if len(rows) > 1:
            _write(canvas, x, y + 0.27, f"best of {len(rows)}", scale.ink(number), size=8.5)
        return
    _patch(canvas, x, y, facecolor=HOLE, hatch="////", edgecolor="white", linewidth=0.0)
    word = rows[0].status if rows else "not run"
    if word == Status.OK.value:
        word = "not measured"
    _write(canvas, x, y, word.replace("_", " "), QUIET, size=10.0)


def _patch(canvas: Frame, x: int, y: int, **look: Any) -> None:
    size = 1 - 2 * GAP
    canvas.axes.add_patch(Rectangle((x + GAP, y + GAP), size, size, **look))


def _write(
    canvas: Frame,
    x: int,
    y: float,
    text: str,
    colour: str,
    weight: str = "normal",
    size: float = 12.0,
) -> None:
    canvas.axes.text(
        x + 0.5,
        y + 0.5,
        text,
        color=colour,
        weight=weight,
        fontsize=size,
        ha="center",
        va="center",
        parse_math=False,
    )
