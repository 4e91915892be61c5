"""How pictures look: the frame with its head, and colours that colour-blind readers tell apart."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 130
INK = "#1b1f24"
QUIET = "#57606a"
GRID = "#d8dee4"
HOLE = "#eceff2"
FORMULA = "#1b1f24"
WRONG = "#b3261e"
KIND_COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "master": "#009e73",
    "moments": "#56b4e9",
    "communication": "#cc79a7",
    "module_buffers": "#f0e442",
    "activations": "#b8bec5",
}
"""Okabe and Ito's palette; activations, which no formula of states contains, are grey."""
MARGIN_IN = 0.22
FOOT_IN = 0.68


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """title: the question. chart: what is drawn. subtitle: model, ranks, devices."""

    title: str
    chart: str
    subtitle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A figure with its head written and one empty plot beneath."""

    figure: Figure
    axes: Axes

    def legend(self, handles: Sequence[Any], labels: Sequence[str] | None = None) -> None:
        """Name the colours beside the plot; labels where the handles carry none."""
        named: dict[str, Any] = {} if labels is None else {"labels": labels}
        self.axes.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            frameon=False,
            fontsize=9.5,
            labelcolor=INK,
            borderaxespad=0.0,
            **named,
        )

    def png(self) -> bytes:
        """Draw it."""
        stream = io.BytesIO()
        FigureCanvasAgg(self.figure).print_png(stream)
        return stream.getvalue()


def frame(
    caption: Caption, *, width_in: float, plot_height_in: float, left_in: float, right_in: float
) -> Frame:
    """Open a figure whose plot is exactly so high, whatever the head above it needs."""
    head = _head(caption, width_in - 2 * MARGIN_IN)
    head_in = MARGIN_IN + sum(line.height_in for line in head) + 0.12
    height_in = head_in + plot_height_in + FOOT_IN
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    y_in = height_in - MARGIN_IN
    for line in head:
        line.draw(figure, MARGIN_IN / width_in, y_in / height_in)
        y_in -= line.height_in
    width = (width_in - left_in - right_in) / width_in
    bottom, height = FOOT_IN / height_in, plot_height_in / height_in
    axes = figure.add_axes((left_in / width_in, bottom, width, height))
    axes.tick_params(colors=INK, labelsize=10, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return Frame(figure=figure, axes=axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of the head."""

    text: str
    points: float
    colour: str = INK
    weight: str = "normal"

    @property
    def height_in(self) -> float:
        """Height with the space beneath."""
        return self.points * 1.45 / 72

    def draw(self, figure: Figure, x: float, y: float) -> None:
        """Write it with its top left corner at x, y."""
        figure.text(
            x,
            y,
            self.text,
            fontsize=self.points,
            color=self.colour,
            weight=self.weight,
            va="top",
            parse_math=False,
        )


def _head(caption: Caption, width_in: float) -> list[_Line]:
    title = textwrap.wrap(caption.title, int(width_in * 9.3))
    subtitle = textwrap.wrap(caption.subtitle, int(width_in * 14.0))
    return [
        *(_Line(text=text, points=12.5, weight="bold") for text in title),
        _Line(text=caption.chart, points=11.0),
        *(_Line(text=text, points=9.5, colour=QUIET) for text in subtitle),
    ]
