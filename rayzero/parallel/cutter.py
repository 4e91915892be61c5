"""Cuts parameters into the blocks of tp ranks; one that is shared is cut once."""

import torch
from torch import Tensor, nn

from rayzero.dist.comm import Communicator
from rayzero.errors import ConfigError
from rayzero.layout.spec import TpShard
from rayzero.parallel.region import AXIS


class Cutter:
    """This rank's blocks, and what they are blocks of."""

    def __init__(self, comm: Communicator) -> None:
        self._index, self._count = comm.rank(AXIS), comm.size(AXIS)
        self._locals: dict[nn.Parameter, nn.Parameter] = {}
        self.shards: dict[nn.Parameter, TpShard] = {}

    def cut(
        self, owner: nn.Module, key: str, *, dim: int, name: str, pads: bool = False
    ) -> nn.Parameter:
        """Return this rank's block of the owner's parameter; pads: rows may be added to its end."""
        whole = getattr(owner, key)
        if whole not in self._locals:
            total = whole.shape[dim]
            if total % self._count and not pads:
                raise ConfigError(
                    f"parallel.tp={self._count} does not divide dim {dim} of {name}.{key}, which "
                    f"has {total}; choose a tp that does"
                )
            size = -(-total // self._count)
            block = self._block(whole.detach(), dim, size)
            local = nn.Parameter(block, requires_grad=whole.requires_grad)
            self._locals[whole] = local
            self.shards[local] = TpShard(
                dim=dim,
                index=self._index,
                count=self._count,
                whole=total if total % self._count else None,
            )
        return self._locals[whole]

    def _block(self, whole: Tensor, dim: int, size: int) -> Tensor:
        """Copy `size` rows (or columns) of the whole; zeros where it has ended."""
        start = min(self._index * size, whole.shape[dim])
        stop = min(start + size, whole.shape[dim])
        own = whole.narrow(dim, start, stop - start)
        if stop - start == size:
            return own.clone()
        shape = list(whole.shape)
        shape[dim] = size - (stop - start)
        return torch.cat((own, whole.new_zeros(shape)), dim)

    def check_shared(self, module: nn.Module) -> None:
        """Raise ConfigError if a module still holds the whole of what another one had cut."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in self._locals:
                raise ConfigError(
                    f"the tensor-parallel plan cuts a parameter that {name} shares, but gives "
                    f"{name.rpartition('.')[0]} no style; name both modules in the plan"
                )
