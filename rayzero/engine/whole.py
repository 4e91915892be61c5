"""Full tensors from the shards of all ranks: to read, and to write back."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.engine.assembly import Assembly
from rayzero.engine.flats import Flat
from rayzero.errors import EngineError
from rayzero.layout.spec import TpShard


def full_weights(parts: Assembly, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the module's full state by its own names where keep, else an empty dict."""
    pairs = ((flat, flat.fetch() if flat.sharded else flat.whole) for flat in parts.flats)
    tensors = full_tensors(pairs, parts.comm, keep=keep)
    return _by_module_names(parts.module, tensors) if keep else {}


def full_tensors(
    pairs: Iterable[tuple[Flat, torch.Tensor]], comm: Communicator, *, keep: bool
) -> dict[str, torch.Tensor]:
    """Gather (flat, own shard or whole) over the shard and tp axes, one flat at a time.

    Returns full tensors on the host by parameter name where keep, else an empty dict.
    """
    full: dict[str, torch.Tensor] = {}
    for flat, held in pairs:
        buffer = held
        if held.numel() != flat.layout.padded:
            buffer = flat.whole.new_zeros(flat.layout.padded, dtype=held.dtype)
            flat.own(buffer).copy_(held)
            comm.all_gather(buffer, axis="shard", unit=flat.layout.name).wait()
        for slot, view in zip(flat.layout.slots, flat.views_of(buffer), strict=True):
            cut = slot.spec.tp
            tensor = view if cut is None else _over_tp(view, cut, comm, slot.spec.name)
            if keep:
                full[slot.spec.name] = tensor.cpu().clone()
    return full


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by the name that module.state_dict() gives them."""
    return {
        f"{path}.{key}" if path else key: buffer
        for path, owner in module.named_modules()
        for key, buffer in owner._buffers.items()
        if buffer is not None and key not in owner._non_persistent_buffers_set
    }


@contextlib.contextmanager
def gathered(
    parts: Assembly, parameters: Sequence[nn.Parameter], writer_rank: int | None
) -> Iterator[None]:
    """Hold full weights inside the block; what is written there survives only with a writer."""
    ranks = parts.comm.size("shard")
    if writer_rank is not None and not 0 <= writer_rank < ranks:
        raise EngineError(
            f"writer_rank={writer_rank} is no rank of the shard axis; allowed: 0 to {ranks - 1}"
        )
    wanted = {id(p) for p in parameters}
    flats = [f for f in parts.flats if any(id(m.parameter) in wanted for m in f.members)]
    parts.stage.gathered(flats)
    before = [flat.whole.clone() for flat in flats]
    writer = None
    try:
        yield
        writer = writer_rank
    finally:
        with torch.no_grad():
            for flat, old in zip(flats, before, strict=True):
                flat.bring_back()
                if writer is None:
                    flat.whole.copy_(old)
                else:
                    _take_over(parts, flat, writer)
        parts.stage.release(flats)


def _take_over(parts: Assembly, flat: Flat, writer_rank: int) -> None:
    """Give all data ranks the writer's values, masters included."""
    if parts.comm.rank("shard") != writer_rank:
        flat.whole.zero_()
    # One rank has values and the others zeros, so the sum is a broadcast from any rank.
    parts.comm.all_reduce(flat.whole, axis="shard", unit=flat.layout.name)
    parts.comm.broadcast(flat.whole, axis="replicate", unit=flat.layout.name)
    if flat.sharded:
        flat.shard.copy_(flat.own(flat.whole))
        flat.store()
    if flat.layout.trained:
        parts.optimizer.adopt_writes(flat)


def _by_module_names(
    module: nn.Module, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Name full tensors as module.state_dict() does: tied ones under each name, with buffers."""
    first = {id(p): name for name, p in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    state = {name: tensors[first[id(p)]] for name, p in named}
    buffers = buffers_of(module).items()
    return state | {name: buffer.detach().cpu().clone() for name, buffer in buffers}


def _over_tp(block: torch.Tensor, cut: TpShard, comm: Communicator, name: str) -> torch.Tensor:
    blocks = block.new_empty(comm.size("tp"), *block.shape)
    blocks[comm.rank("tp")].copy_(block)
    comm.all_gather(blocks.view(-1), axis="tp", unit=name).wait()
    joined = torch.cat(list(blocks), dim=cut.dim)
    return joined if cut.whole is None else joined.narrow(cut.dim, 0, cut.whole)
