"""The limit of all engines: a rank's own compute and its share of the update, nothing sent.

Ranks drift apart, so nothing is learnt here and no loss of it is compared with any other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayzero.baselines.peer import GroupsFactory, OptimizerFactory, clip, held_by
from rayzero.records import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """This rank's elements of one parameter, and the weights the optimizer updates for them."""

    parameter: nn.Parameter
    start: int
    stop: int
    master: nn.Parameter
    """A view of the parameter, or a copy where the master's dtype is another."""

    @property
    def weights(self) -> torch.Tensor:
        """The elements that forward uses."""
        return self.parameter.detach().view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> torch.Tensor:
        """Their gradient, in the parameter's dtype."""
        assert self.parameter.grad is not None, "each parameter takes part in the loss"
        return self.parameter.grad.view(-1)[self.start : self.stop]


class ComputeOnly:
    """Forward and backward of the whole module, the optimizer on 1/world of each parameter."""

    def __init__(
        self,
        module: nn.Module,
        groups: GroupsFactory,
        factory: OptimizerFactory,
        *,
        rank: int,
        world: int,
        master: torch.dtype,
    ) -> None:
        self._module = module
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        shares = {p: _share(p, rank, world, master) for _, p in trained}
        chosen = groups(trained)
        for group in chosen:
            group["params"] = [shares[p].master for p in group["params"]]
        self._shares = list(shares.values())
        self.optimizer = factory(chosen)

    def begin(self, *, last: bool) -> None:
        """Nothing is sent."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self._module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, max_norm: float | None) -> torch.Tensor:
        """Clip and update the share, as if its gradient were reduced."""
        for share in self._shares:
            share.master.grad = share.gradient.to(share.master.dtype)
        norm = clip((share.master for share in self._shares), max_norm)
        self.optimizer.step()
        for share in self._shares:
            if share.master.dtype != share.parameter.dtype:
                share.weights.copy_(share.master.detach())
            share.master.grad = share.parameter.grad = None
        return norm

    def held(self) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Yield parameters, copies of the share and moments."""
        yield from held_by(self._module, self.optimizer)
        for share in self._shares:
            if share.master.dtype != share.parameter.dtype:
                yield Kind.MASTER, share.master

    def full_state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's weights; other ranks have others."""
        return {k: v.detach().cpu().clone() for k, v in self._module.state_dict().items()}

    def close(self) -> None:
        """Nothing outlives the objects."""


def _share(parameter: nn.Parameter, rank: int, world: int, master: torch.dtype) -> Share:
    size = -(-parameter.numel() // world)
    start = min(rank * size, parameter.numel())
    stop = min(start + size, parameter.numel())
    own = parameter.detach().view(-1)[start:stop].to(master)
    return Share(parameter=parameter, start=start, stop=stop, master=nn.Parameter(own))
