"""Count what an engine holds: bytes of distinct live storages, by kind."""

from collections import defaultdict
from collections.abc import Iterator

import torch

from rayzero.engine.assembly import Assembly
from rayzero.engine.flats import Flat
from rayzero.records import Held, Holdings, Kind, Where


def held_tensors(parts: Assembly) -> Iterator[tuple[Kind, Flat | None, torch.Tensor]]:
    """Yield every tensor the engine holds between calls, with its kind and its flat, if any."""
    for flat in parts.flats:
        yield Kind.PARAMETERS, flat, flat.shard if flat.sharded else flat.whole
        if flat.sharded:
            yield Kind.GATHERED, None, flat.whole
            yield Kind.COUNTERS, None, flat.placeholder
    for flat, tensor in parts.stage.gradient_tensors():
        yield Kind.GRADIENTS, flat, tensor
    for flat, tensor in parts.optimizer.masters():
        yield Kind.MASTER, flat, tensor
    for flat, tensor in parts.optimizer.state():
        is_moment = tensor.dim() == 1 and tensor.numel() == parts.stage.part(flat).numel()
        yield (Kind.MOMENTS, flat, tensor) if is_moment else (Kind.COUNTERS, None, tensor)
    for tensor in parts.stage.bucket_tensors():
        yield Kind.BUCKETS, None, tensor
    for buffer in parts.module.buffers():
        yield Kind.MODULE_BUFFERS, None, buffer


def count(parts: Assembly) -> Holdings:
    """Count what the engine holds now."""
    census = Census()
    for kind, flat, tensor in held_tensors(parts):
        census.count(kind, tensor, padding_bytes=padding_bytes(flat, tensor) if flat else 0)
    return census.holdings()


def padding_bytes(flat: Flat, tensor: torch.Tensor) -> int:
    """Bytes of padding in a tensor as long as the flat, or as its own shard."""
    if tensor.numel() == flat.layout.padded:
        return (flat.layout.padded - flat.layout.numel) * tensor.itemsize
    return flat.layout.shard_padding(flat.shard_index) * tensor.itemsize


class Census:
    """Bytes by kind and place; a storage that several tensors share counts once."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[Kind, Where], int] = defaultdict(int)
        self._padding: dict[tuple[Kind, Where], int] = defaultdict(int)
        self._seen: set[int] = set()

    def count(self, kind: Kind, tensor: torch.Tensor, *, padding_bytes: int = 0) -> None:
        """Add a tensor's storage under a kind; padding_bytes of it are padding."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen and storage.nbytes():
            self._seen.add(storage._cdata)
            self._bytes[kind, Where.DEVICE] += storage.nbytes()
            self._padding[kind, Where.DEVICE] += padding_bytes

    def holdings(self) -> Holdings:
        """Return the count."""
        return Holdings(
            entries=tuple(
                Held(kind=k, where=w, num_bytes=n, padding_bytes=self._padding[k, w])
                for (k, w), n in self._bytes.items()
            )
        )
