"""A run of a flattened tensor as boxes of the tensor itself; so checkpoints name elements.

elements 3 <= i < 10 of a (3, 4) tensor        . . . a        a: offsets (0, 3) sizes (1, 1)
are three boxes, each of which is              b b b b        b: offsets (1, 0) sizes (1, 4)
one run of the flattened tensor:               c c . .        c: offsets (2, 0) sizes (1, 2)
"""

import math
from dataclasses import dataclass

from rayzero.layout.spec import ParamSpec, Span

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Elements offsets <= place < offsets + sizes; run: the same ones in the flattened tensor."""

    offsets: Sizes
    sizes: Sizes
    run: Span


def boxes_of(shape: Sizes, span: Span) -> list[Box]:
    """Cut a run of a flattened tensor into boxes, in order; at most 2 x dims - 1 of them."""
    if not span.elements:
        return []
    if not shape:
        return [Box(offsets=(), sizes=(), run=span)]
    row = math.prod(shape[1:])
    first, last = span.start // row, (span.stop - 1) // row
    if first == last:
        return _in_row(shape, first, span)
    head = [] if span.start == first * row else [first]
    tail = [] if span.stop == (last + 1) * row else [last]
    boxes = []
    for index in head:
        boxes += _in_row(shape, index, Span(start=span.start, stop=(index + 1) * row))
    start, stop = first + len(head), last + 1 - len(tail)
    if stop > start:
        boxes.append(
            Box(
                offsets=(start,) + (0,) * (len(shape) - 1),
                sizes=(stop - start, *shape[1:]),
                run=Span(start=start * row, stop=stop * row),
            )
        )
    for index in tail:
        boxes += _in_row(shape, index, Span(start=index * row, stop=span.stop))
    return boxes


def whole_shape(spec: ParamSpec) -> Sizes:
    """Return the shape of the parameter before tensor parallelism cut it."""
    if spec.tp is None:
        return spec.shape
    shape = list(spec.shape)
    shape[spec.tp.dim] *= spec.tp.count
    if spec.tp.whole is not None:
        shape[spec.tp.dim] = spec.tp.whole
    return tuple(shape)


def without_padding(spec: ParamSpec, span: Span) -> Span:
    """Return the part of a span of a flattened block that belongs to the whole parameter."""
    if spec.tp is None or spec.tp.whole is None:
        return span
    assert spec.tp.dim == 0, f"{spec.name} has padding along dim {spec.tp.dim}, not 0"
    num_rows = min(max(spec.tp.whole - spec.tp.index * spec.shape[0], 0), spec.shape[0])
    return span.overlap(Span(start=0, stop=num_rows * math.prod(spec.shape[1:])))


def whole_offsets(spec: ParamSpec, offsets: Sizes) -> Sizes:
    """Return where a place of this tp rank's block lies in the whole parameter."""
    if spec.tp is None:
        return offsets
    moved = list(offsets)
    moved[spec.tp.dim] += spec.tp.index * spec.shape[spec.tp.dim]
    return tuple(moved)


def _in_row(shape: Sizes, index: int, span: Span) -> list[Box]:
    """Cut a run that stays inside one row of dim 0."""
    start = index * math.prod(shape[1:])
    inner = boxes_of(shape[1:], Span(start=span.start - start, stop=span.stop - start))
    return [
        Box(
            offsets=(index, *box.offsets),
            sizes=(1, *box.sizes),
            run=Span(start=box.run.start + start, stop=box.run.stop + start),
        )
        for box in inner
    ]
