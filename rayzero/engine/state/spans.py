"""What one rank holds of a named tensor, as torch.distributed.checkpoint asks for it.

A flat shard cuts a parameter at any element, so a part is a run of it: a few boxes, each of which
is contiguous in the shard. DCP finds out by methods of torch's `_Checkpointable` where they lie
in the whole tensor, which exists on no rank.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from rayzero.engine.flats import Flat
from rayzero.layout.boxes import Sizes, boxes_of, whole_offsets, whole_shape, without_padding
from rayzero.layout.spec import Piece, Span


class Spans(torch.Tensor):
    """A tensor by shape and dtype; of its elements only some boxes, each a view of a shard."""

    _boxes: dict[Sizes, torch.Tensor]

    @staticmethod
    def __new__(cls: type[Self], shape: Sizes, dtype: torch.dtype, device: torch.device) -> "Spans":
        made: Spans = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._boxes = {}
        return made

    def __init__(self, shape: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing is held yet; see `hold`."""

    def hold(self, offsets: Sizes, box: torch.Tensor) -> None:
        """Take a view whose first element is at `offsets` of the tensor."""
        self._boxes[offsets] = box

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: there is nothing to compute with."""
        raise NotImplementedError(f"{func} on Spans, which only describe where elements lie")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=box.shape)
            for offsets, box in self._boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._boxes[tuple(index.offset or ())]


def add_piece(spans: dict[str, Spans], key: str, piece: Piece, tensor: torch.Tensor) -> None:
    """Add a piece of a parameter that lies in a 1-d tensor to what is known of its key."""
    if key not in spans:
        spans[key] = Spans(whole_shape(piece.spec), tensor.dtype, tensor.device)
    run = tensor[piece.in_shard.start : piece.in_shard.stop]
    for box in boxes_of(piece.spec.shape, without_padding(piece.spec, piece.in_param)):
        start = box.run.start - piece.in_param.start
        view = run[start : start + box.run.elements].view(box.sizes)
        spans[key].hold(whole_offsets(piece.spec, box.offsets), view)


def add_whole(spans: dict[str, Spans], key: str, tensor: torch.Tensor) -> None:
    """Add a tensor that this rank holds all of."""
    spans[key] = Spans(tuple(tensor.shape), tensor.dtype, tensor.device)
    if tensor.numel():
        spans[key].hold((0,) * tensor.dim(), tensor.detach())


def pieces_of(flat: Flat, tensor: torch.Tensor) -> list[Piece]:
    """List the parts of parameters in a tensor as long as the flat, or as its own shard."""
    if tensor.numel() == flat.layout.shard_elements:
        return flat.layout.pieces(flat.shard_index)
    return [
        Piece(spec=s.spec, in_param=Span(start=0, stop=s.span.elements), in_shard=s.span)
        for s in flat.layout.slots
        if s.span.elements
    ]
