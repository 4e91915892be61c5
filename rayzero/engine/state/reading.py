"""Read what torch.distributed.checkpoint has planned from our files: one packed file per rank.

DCP's own files hold a pickle per tensor (slow where tensors are small) and a pickled index (which
runs code when it is read); these hold bytes, and the index is JSON.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
)

from rayzero.engine.state.blocks import BlockReader
from rayzero.engine.state.manifest import (
    Chunk,
    Manifest,
    Stored,
    packed_path,
    read_sums,
)

SLAB_BYTES = 16 << 20
"""A reader holds at most this much of a file at a time."""


class Reader(Protocol):
    """Named tensors in files."""

    @property
    def metadata(self) -> Metadata:
        """What there is, as DCP has it."""

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read what is planned and convert it into the planner's tensors."""


class PackedReader:
    """Reads parts of the packed files, each file from front to back and only where it is asked."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.metadata = metadata_of(manifest.tensors)
        self._folder = folder
        self._tensors = manifest.tensors
        self._chunks = {
            (key, chunk.offsets): chunk
            for key, stored in manifest.tensors.items()
            for chunk in stored.chunks
        }

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read what is planned, file by file."""
        by_rank: dict[int, list[tuple[Chunk, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            offsets = tuple(item.storage_index.offset or ())
            chunk = self._chunks[item.storage_index.fqn, offsets]
            by_rank[chunk.rank].append((chunk, item))
        for rank, wanted in by_rank.items():
            with ExitStack() as stack:
                sums = read_sums(self._folder, rank)
                file = BlockReader(packed_path(self._folder, rank), sums.packed)
                stack.enter_context(file)
                for chunk, item in sorted(wanted, key=_place):
                    dtype = self._tensors[item.storage_index.fqn].torch_dtype
                    region = Region(file, dtype, chunk.start, chunk.sizes)
                    target = planner.resolve_tensor(item).detach()
                    region.copy_to(target, list(item.storage_offsets), list(item.lengths))
                    planner.commit_tensor(item, target)


class Region:
    """A box of a tensor as it lies in a file: rows one after another."""

    def __init__(
        self, file: BlockReader, dtype: torch.dtype, start: int, sizes: Sequence[int]
    ) -> None:
        self._file = file
        self._dtype = dtype
        self._start = start
        self._strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]

    def copy_to(self, target: torch.Tensor, offsets: list[int], lengths: list[int]) -> None:
        """Copy the part of the region at these offsets, slab by slab."""
        places = list(zip(offsets, lengths, self._strides, strict=True))
        first = sum(offset * stride for offset, _, stride in places)
        count = 1 + sum((length - 1) * stride for _, length, stride in places)
        size = self._dtype.itemsize
        if count * size <= SLAB_BYTES:
            raw = self._file.read(self._start + first * size, count * size)
            flat = torch.frombuffer(raw, dtype=self._dtype)
            target.copy_(flat.as_strided(lengths, self._strides))
            return
        dim = next(d for d, length in enumerate(lengths) if length > 1)
        step = max(1, SLAB_BYTES // (self._strides[dim] * size))
        for begin in range(0, lengths[dim], step):
            length = min(step, lengths[dim] - begin)
            self.copy_to(
                target.narrow(dim, begin, length),
                [*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :]],
                [*lengths[:dim], length, *lengths[dim + 1 :]],
            )


def metadata_of(tensors: dict[str, Stored]) -> Metadata:
    """Return the index as DCP has it."""
    return Metadata(
        state_dict_metadata={
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=stored.torch_dtype),
                size=torch.Size(stored.shape),
                chunks=[
                    ChunkStorageMetadata(
                        offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes)
                    )
                    for chunk in stored.chunks
                ],
            )
            for key, stored in tensors.items()
        }
    )


def _place(wanted: tuple[Chunk, ReadItem]) -> tuple[int, tuple[int, ...]]:
    chunk, item = wanted
    return chunk.start, tuple(item.storage_offsets)
