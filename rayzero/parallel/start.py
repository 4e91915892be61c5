"""Starting values of a parameter as one tp rank holds it, drawn from those of the whole one."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rayzero.layout.boxes import without_padding
from rayzero.layout.spec import ParamSpec, Span, TpShard

Draw = Callable[[str, int, int], Tensor]
"""(name, start, stop) -> elements [start, stop) of the flattened whole parameter, on the CPU."""

ROW_BLOCK_ELEMENTS = 1 << 22
"""How many whole elements exist at a time where a block takes a piece of every row."""


def draw_local(draw: Draw, spec: ParamSpec, span: Span) -> Tensor:
    """Return the span's elements of the flattened block that spec describes.

    partial(draw_local, initializer) is what ZeroEngine takes as `initialize`.
    """
    if spec.tp is None:
        return draw(spec.name, span.start, span.stop)
    if math.prod(spec.shape[: spec.tp.dim]) == 1:
        offset = spec.tp.index * spec.numel
        real = without_padding(spec, span)
        drawn = draw(spec.name, offset + real.start, offset + real.stop)
        return F.pad(drawn, (0, span.elements - real.elements))
    return _draw_columns(draw, spec, spec.tp, span)


def _draw_columns(draw: Draw, spec: ParamSpec, tp: TpShard, span: Span) -> Tensor:
    """Draw whole rows, some at a time, and keep this rank's piece of each.

    whole = | w0 | w1 | .. |     block 1 = | w1 |     width = elements of a piece
            | w0 | w1 | .. |               | w1 |
    """
    width = math.prod(spec.shape[tp.dim :])
    row_elements = width * tp.count
    num_rows = max(1, ROW_BLOCK_ELEMENTS // row_elements)
    pieces = []
    for first in range(span.start // width, -(-span.stop // width), num_rows):
        rows = Span(start=first, stop=min(first + num_rows, -(-span.stop // width)))
        whole = draw(spec.name, rows.start * row_elements, rows.stop * row_elements)
        block = whole.view(-1, tp.count, width)[:, tp.index].flatten()
        here = span.overlap(Span(start=rows.start * width, stop=rows.stop * width))
        pieces.append(block[here.start - rows.start * width : here.stop - rows.start * width])
    return torch.cat(pieces) if pieces else draw(spec.name, 0, 0)
