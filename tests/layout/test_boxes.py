"""Any run of a flattened tensor is a few boxes, which together hold just its elements."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayzero.layout.boxes import boxes_of, whole_offsets, whole_shape
from rayzero.layout.spec import ParamSpec, Span, TpShard

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@settings(deadline=None, max_examples=300)
@given(shapes, st.data())
def test_boxes_hold_just_the_run_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    places = torch.arange(numel).view(shape)
    boxes = boxes_of(shape, Span(start=start, stop=stop))
    found: list[int] = []
    for box in boxes:
        part = places
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert part.flatten().tolist() == list(range(box.run.start, box.run.stop))
        found += part.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_tp_block_lies_in_the_whole_parameter() -> None:
    tp = TpShard(dim=1, index=2, count=3)
    spec = ParamSpec(name="w", shape=(4, 5), dtype="fp32", tp=tp)
    assert whole_shape(spec) == (4, 15)
    assert whole_offsets(spec, (3, 1)) == (3, 11)
    alone = ParamSpec(name="w", shape=(4, 5), dtype="fp32")
    assert (whole_shape(alone), whole_offsets(alone, (3, 1))) == ((4, 5), (3, 1))
