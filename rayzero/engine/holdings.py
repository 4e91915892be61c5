"""Count what an engine holds: bytes of distinct live storages, by kind."""

from collections import defaultdict
from collections.abc import Iterator

import torch

from rayzero.engine.assembly import Assembly
from rayzero.engine.flats import Flat
from rayzero.engine.optimizer import is_moment
from rayzero.records import Held, Holdings, Kind, Where

HeldTensor = tuple[Kind, Where, Flat | None, torch.Tensor]


def held_tensors(parts: Assembly) -> Iterator[HeldTensor]:
    """Yield every tensor the engine holds between calls: kind, place, its flat if any, tensor."""
    device = Where.DEVICE
    for flat in parts.flats:
        if flat.file is not None:
            yield Kind.STAGING, Where.HOST, None, flat.file.buffer
        else:
            yield Kind.PARAMETERS, flat.where, flat, flat.shard if flat.sharded else flat.whole
        if flat.sharded:
            yield Kind.GATHERED, device, None, flat.whole
            yield Kind.COUNTERS, device, None, flat.placeholder
    for flat, place, tensor in parts.stage.gradient_tensors():
        yield Kind.GRADIENTS, place, flat, tensor
    yield from _optimizer_tensors(parts)
    for tensor in parts.stage.bucket_tensors():
        yield Kind.BUCKETS, device, None, tensor
    for tensor in parts.staging:
        yield Kind.STAGING, Where.HOST, None, tensor
    for buffer in parts.module.buffers():
        yield Kind.MODULE_BUFFERS, device, None, buffer


def _optimizer_tensors(parts: Assembly) -> Iterator[HeldTensor]:
    optimizer = parts.optimizer
    for flat, tensor in optimizer.masters():
        yield Kind.MASTER, optimizer.where(flat), flat, tensor
    for flat, tensor in optimizer.state():
        if is_moment(tensor, parts.stage.part(flat)):
            yield Kind.MOMENTS, optimizer.where(flat), flat, tensor
        elif tensor.numel():
            place = Where.DEVICE if optimizer.where(flat) is Where.DEVICE else Where.HOST
            yield Kind.COUNTERS, place, None, tensor
    yield Kind.COUNTERS, Where.DEVICE, None, optimizer.sums
    for tensor in optimizer.staging():
        yield Kind.STAGING, Where.HOST, None, tensor


def count(parts: Assembly) -> Holdings:
    """Count what the engine holds now."""
    census = Census()
    for kind, where, flat, tensor in held_tensors(parts):
        padding = _padding(flat, tensor.numel()) * tensor.itemsize if flat else 0
        census.count(kind, where, tensor, padding_bytes=padding)
    shards = [(Kind.PARAMETERS, f, f.shard.itemsize) for f in parts.flats if f.file is not None]
    for kind, flat, itemsize in [*shards, *parts.optimizer.disk_files()]:
        elements = flat.shard.numel() if flat.sharded else parts.stage.part(flat).numel()
        padding = _padding(flat, elements) * itemsize
        census.add(kind, Where.DISK, elements * itemsize, padding_bytes=padding)
    return census.holdings()


def _padding(flat: Flat, elements: int) -> int:
    """Elements of padding in a tensor as long as the flat, or as its own shard."""
    if elements == flat.layout.padded:
        return flat.layout.padded - flat.layout.numel
    return flat.layout.shard_padding(flat.shard_index)


class Census:
    """Bytes by kind and place; a storage that several tensors share counts once."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[Kind, Where], int] = defaultdict(int)
        self._padding: dict[tuple[Kind, Where], int] = defaultdict(int)
        self._seen: set[int] = set()

    def count(
        self, kind: Kind, where: Where, tensor: torch.Tensor, *, padding_bytes: int = 0
    ) -> None:
        """Add a tensor's storage under a kind; padding_bytes of it are padding."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen and storage.nbytes():
            self._seen.add(storage._cdata)
            self.add(kind, where, storage.nbytes(), padding_bytes=padding_bytes)

    def add(self, kind: Kind, where: Where, num_bytes: int, *, padding_bytes: int = 0) -> None:
        """Add bytes under a kind."""
        self._bytes[kind, where] += num_bytes
        self._padding[kind, where] += padding_bytes

    def holdings(self) -> Holdings:
        """Return the count."""
        return Holdings(
            entries=tuple(
                Held(kind=k, where=w, num_bytes=n, padding_bytes=self._padding[k, w])
                for (k, w), n in self._bytes.items()
                if n
            )
        )
