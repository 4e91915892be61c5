"""torch's DistributedDataParallel: all is replicated, and no fp32 master beside bf16 parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayzero.baselines.peer import GroupsFactory, OptimizerFactory, clip, held_by
from rayzero.records import Kind


class Ddp:
    """Every rank holds everything; gradients are all-reduced in buckets while backward runs."""

    def __init__(self, module: nn.Module, groups: GroupsFactory, factory: OptimizerFactory) -> None:
        self._module = module
        self._ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.optimizer = self._make_optimizer(groups(trained), factory)

    def begin(self, *, last: bool) -> None:
        """Reduce in the window's last backward alone; DDP reads this in forward."""
        self._ddp.require_backward_grad_sync = last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, or in evaluation the module alone."""
        trains = self._module.training and torch.is_grad_enabled()
        return (self._ddp if trains else self._module)(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, max_norm: float | None) -> torch.Tensor:
        """Clip gradients, which are whole on each rank, and update."""
        norm = clip(self._parameters, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def held(self) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Yield parameters, buffers and moments."""
        yield from held_by(self._module, self._stepping)

    def full_state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the weights, which each rank holds whole."""
        return {k: v.detach().cpu().clone() for k, v in self._module.state_dict().items()}

    def close(self) -> None:
        """Nothing outlives the objects."""

    def _make_optimizer(
        self, groups: list[dict[str, Any]], factory: OptimizerFactory
    ) -> torch.optim.Optimizer:
        return factory([group for group in groups if group["params"]])

    @property
    def _stepping(self) -> torch.optim.Optimizer:
        """The optimizer that holds this rank's states."""
        return self.optimizer
