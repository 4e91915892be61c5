"""Memory over one step as a picture: stacked by kind, phases marked, the peak named."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rayzero.records import Kind, MemoryPoint
from rayzero.report.files import replace_file
from rayzero.report.style import INK, KIND_COLOURS, QUIET, Caption, Frame, frame
from rayzero.report.units import Unit, common_unit, with_unit

SHOWN = {
    "parameters": (Kind.PARAMETERS,),
    "master": (Kind.MASTER,),
    "moments": (Kind.MOMENTS,),
    "gradients": (Kind.GRADIENTS,),
    "communication": (Kind.BUCKETS, Kind.GATHERED, Kind.STAGING),
    "module_buffers": (Kind.MODULE_BUFFERS, Kind.COUNTERS),
}
"""Layers from the bottom up, each a colour; activations lie on top."""
NARROW = 0.05
"""A phase shorter than this share of the step is not named."""


def write_memory_picture(timeline: Sequence[MemoryPoint], path: Path, caption: Caption) -> Path:
    """Draw the timeline, which must not be empty."""
    unit = common_unit(point.total_bytes for point in timeline)
    canvas = frame(caption, width_in=10.5, plot_height_in=3.6, left_in=0.8, right_in=1.85)
    _stack(canvas, timeline, unit)
    _mark_phases(canvas, timeline)
    _mark_peak(canvas, timeline, unit)
    axes = canvas.axes
    axes.set_xlim(0, len(timeline))
    axes.set_ylim(0, unit.of(max(p.total_bytes for p in timeline)) * 1.22)
    axes.set_xticks([])
    axes.set_xlabel("visits of units, in order of time", color=QUIET, fontsize=10)
    axes.set_ylabel(unit.name, color=QUIET, fontsize=10)
    canvas.legend(*(list(reversed(part)) for part in axes.get_legend_handles_labels()))
    return replace_file(path, canvas.png())


def _stack(canvas: Frame, timeline: Sequence[MemoryPoint], unit: Unit) -> None:
    places = range(len(timeline) + 1)
    layers = {
        name: [unit.of(sum(p.bytes_by_kind.get(kind.value, 0) for kind in kinds)) for p in timeline]
        for name, kinds in SHOWN.items()
    }
    layers["activations"] = [unit.of(point.activations_bytes) for point in timeline]
    layers = {name: values for name, values in layers.items() if any(values)}
    canvas.axes.stackplot(
        places,
        *([*values, values[-1]] for values in layers.values()),
        labels=[name.replace("_", " ") for name in layers],
        colors=[KIND_COLOURS[name] for name in layers],
        step="post",
        linewidth=0,
    )


def _mark_phases(canvas: Frame, timeline: Sequence[MemoryPoint]) -> None:
    axes, start = canvas.axes, 0
    for phase, visits in groupby(timeline, key=lambda point: point.phase):
        stop = start + len(list(visits))
        axes.axvline(start, color=INK, linewidth=0.7, alpha=0.5)
        if stop - start >= NARROW * len(timeline):
            axes.text(
                (start + stop) / 2,
                0.985,
                phase.value,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=9.5,
                color=QUIET,
            )
        start = stop


def _mark_peak(canvas: Frame, timeline: Sequence[MemoryPoint], unit: Unit) -> None:
    place = max(range(len(timeline)), key=lambda i: timeline[i].total_bytes)
    peak = timeline[place]
    where = f" in {peak.unit}" if peak.unit else ""
    canvas.axes.annotate(
        f"{with_unit(peak.total_bytes)}{where}",
        (place + 0.5, unit.of(peak.total_bytes)),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right" if place > len(timeline) / 2 else "left",
        fontsize=9.5,
        color=INK,
        parse_math=False,
    )
