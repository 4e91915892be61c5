"""ZeRO's figure 1 drawn again: bytes of model states per device, by kind and scheme."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayzero.report.files import replace_file
from rayzero.report.style import INK, KIND_COLOURS, QUIET, Caption, frame

COLOURS = {
    "parameters": KIND_COLOURS["parameters"],
    "gradients": KIND_COLOURS["gradients"],
    "optimizer states": KIND_COLOURS["moments"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeBar:
    """One scheme: GB by kind, what the paper prints, and what the engine held in the dry run."""

    scheme: str
    parts_GB: Mapping[str, float]
    printed: str
    dryrun_GB: float | None


def write_figure_1(bars: Sequence[SchemeBar], path: Path, caption: Caption) -> Path:
    """Draw the bars from top to bottom with both numbers at their ends."""
    canvas = frame(
        caption, width_in=10.5, plot_height_in=0.62 * len(bars), left_in=1.2, right_in=2.1
    )
    axes = canvas.axes
    longest = max(sum(bar.parts_GB.values()) for bar in bars)
    for y, bar in enumerate(bars):
        start = 0.0
        for name, colour in COLOURS.items():
            axes.barh(y, bar.parts_GB[name], 0.6, left=start, color=colour)
            start += bar.parts_GB[name]
        engine = "" if bar.dryrun_GB is None else f", engine {bar.dryrun_GB:.2f} GB"
        axes.text(
            start + longest * 0.01,
            y,
            f"paper {bar.printed} GB{engine}",
            va="center",
            fontsize=9.5,
            color=INK,
        )
    axes.set_yticks(range(len(bars)), [bar.scheme for bar in bars])
    axes.set_ylim(len(bars) - 0.45, -0.55)
    axes.set_xlim(0, longest * 1.5)
    axes.set_xlabel("GB (1e9 bytes) per device", color=QUIET, fontsize=10)
    handles = [axes.barh(0, 0, color=colour, label=name) for name, colour in COLOURS.items()]
    canvas.legend(handles)
    return replace_file(path, canvas.png())
