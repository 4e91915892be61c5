"""The parts of one named tensor that one rank holds, as torch.distributed.checkpoint asks for them.

A flat shard cuts a parameter at any element, so a part is a run of it: a few boxes, each of which is
contiguous in the shard. DCP finds out by three methods (torch's `_Checkpointable` protocol) where
they lie in the whole tensor, which on no rank exists.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from rayzero.layout.boxes import Sizes


class Spans(torch.Tensor):
    """A tensor by shape and dtype; of its elements only some boxes, each a view of a shard."""

    _boxes: dict[Sizes, torch.Tensor]

    @staticmethod
    def __new__(
        cls: type[Self], shape: Sizes, dtype: torch.dtype, device: torch.device
    ) -> "Spans":
        made: Spans = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._boxes = {}
        return made

    def __init__(self, shape: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing is held yet; see `hold`."""

    def hold(self, offsets: Sizes, box: torch.Tensor) -> None:
        """Take a view whose first element is at `offsets` of the tensor."""
        self._boxes[offsets] = box

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: there is nothing to compute with."""
        raise NotImplementedError(f"{func} on Spans, which only describe where elements lie")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=box.shape)
            for offsets, box in self._boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._boxes[tuple(index.offset or ())]
