"""torch's FSDP2: parameters, gradients and optimizer state sharded as DTensors, block by block.

Stage 3 gathers a block for its forward and again for its backward. As stage 2 a block stays whole
from its first forward in a window to its last backward. Gradients are reduced in each micro-batch
at both, as these stages promise: set_requires_gradient_sync(False) would keep them whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rayzero.baselines.peer import GroupsFactory, OptimizerFactory, clip, held_by, local
from rayzero.records import Kind

Draw = Callable[[str, int, int], torch.Tensor]
"""(name, start, stop) -> elements [start, stop) of the flattened parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What is gathered as one, when it is dropped, and in which dtypes.

    blocks: modules by name; the root takes the rest. keep_whole: stage 2 instead of 3.
    master: dtype of the shards that the optimizer updates.
    """

    mesh: DeviceMesh
    blocks: Sequence[str]
    keep_whole: bool
    params: torch.dtype
    reduce: torch.dtype
    master: torch.dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Return the dtypes as FSDP2 takes them: None where nothing is cast."""
        return MixedPrecisionPolicy(
            param_dtype=self.params if self.params is not self.master else None,
            reduce_dtype=self.reduce if self.reduce is not self.params else None,
        )


class Fsdp2:
    """A module under fully_shard; one on meta is never whole on any rank: `draw` fills shards."""

    def __init__(
        self,
        module: nn.Module,
        groups: GroupsFactory,
        factory: OptimizerFactory,
        *,
        sharding: Sharding,
        draw: Draw | None,
    ) -> None:
        self._module: Any = module
        self._keep_whole = sharding.keep_whole
        settings: dict[str, Any] = {
            "mesh": sharding.mesh,
            "reshard_after_forward": not sharding.keep_whole,
            "mp_policy": sharding.policy,
        }
        for name in sharding.blocks:
            fully_shard(module.get_submodule(name), **settings)
        fully_shard(module, **settings)
        if draw is not None:
            _fill(module, sharding.mesh, sharding.master, draw)
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.optimizer = factory([group for group in groups(trained) if group["params"]])

    def begin(self, *, last: bool) -> None:
        """At stage 2, drop the gathered parameters only after the window's last backward."""
        if self._keep_whole:
            self._module.set_reshard_after_backward(last)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its hooks."""
        return self._module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, which reduces into sharded gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, max_norm: float | None) -> torch.Tensor:
        """Clip by the norm over all shards, and update the shards."""
        norm = clip(self._module.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def held(self) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Yield this rank's shards of parameters and moments."""
        yield from held_by(self._module, self.optimizer)

    def full_state_dict(self) -> Mapping[str, torch.Tensor]:
        """Gather the weights to the host, on every rank."""
        options = StateDictOptions(full_state_dict=True)
        state: dict[str, Any] = get_model_state_dict(self._module, options=options)
        return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def close(self) -> None:
        """Nothing outlives the objects."""


def _fill(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, draw: Draw) -> None:
    """Put real shards in the place of those on meta; shared parameters stay shared."""
    real = {
        parameter: nn.Parameter(_drawn(name, parameter, mesh, dtype, draw))
        for name, parameter in module.named_parameters()
    }
    for owner in module.modules():
        for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            setattr(owner, key, real[parameter])


def _drawn(
    name: str, parameter: torch.Tensor, mesh: DeviceMesh, dtype: torch.dtype, draw: Draw
) -> torch.Tensor:
    """Draw this rank's rows: DTensor's chunks along dim 0, each of ceil(rows / ranks)."""
    assert isinstance(parameter, DTensor), "fully_shard leaves DTensors"
    shard = local(parameter)
    row_elements = parameter.numel() // parameter.shape[0]
    rows_per_rank = -(-parameter.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * rows_per_rank, parameter.shape[0]) * row_elements
    values = draw(name, start, start + shard.numel()).view(shard.shape)
    return DTensor.from_local(
        values.to(mesh.device_type, dtype),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
