"""The user's torch optimizer on flat shards, with master copies where parameters are narrower."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from rayzero.dist.dtypes import BY_NAME
from rayzero.engine.flats import Flat
from rayzero.errors import ConfigError, EngineError

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class FlatOptimizer:
    """One torch optimizer whose tensors are this rank's part of each trained flat.

    `part` cuts from a flat what this rank updates: its shard, or at stage 0 the whole.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        settings: Sequence[dict[str, Any]],
        flats: Sequence[Flat],
        part: Callable[[Flat], torch.Tensor],
    ) -> None:
        check_element_wise(factory)
        self._flats = flats
        self._part = part
        self._targets = [self._target(flat) for flat in flats]
        self._stepping = False
        groups = [{**group, "params": []} for group in settings]
        for flat, target in zip(flats, self._targets, strict=True):
            groups[flat.layout.group]["params"].append(target)
        self.torch_optimizer = factory(groups)
        self.torch_optimizer.register_step_pre_hook(self._refuse_outside_step)

    def write_master(self, flat: Flat, values: torch.Tensor) -> None:
        """Set a flat's master to values in master precision (1-d, as long as the part)."""
        position = next(i for i, f in enumerate(self._flats) if f is flat)
        self._targets[position].data.copy_(values)

    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Step on gradients (one per flat, as long as the part), then refresh the parameters."""
        same = [g.dtype is t.dtype for g, t in zip(gradients, self._targets, strict=True)]
        if all(same):
            self._assign(range(len(gradients)), gradients)
            self._step()
        else:
            # A gradient in another dtype is widened one flat at a time, not all at once.
            for index, gradient in enumerate(gradients):
                self._assign([index], [gradient.to(self._targets[index].dtype)])
                self._step()
        for flat, target in zip(self._flats, self._targets, strict=True):
            if flat.dtypes.has_master:
                self._part(flat).copy_(target.data)

    def masters(self) -> list[tuple[Flat, torch.Tensor]]:
        """List the master copies held."""
        return [
            (f, t.data)
            for f, t in zip(self._flats, self._targets, strict=True)
            if f.dtypes.has_master
        ]

    def state(self) -> list[tuple[Flat, torch.Tensor]]:
        """List the tensors of the optimizer's state: moments as long as the part, and counters."""
        held = []
        for flat, target in zip(self._flats, self._targets, strict=True):
            values = self.torch_optimizer.state.get(target, {}).values()
            held += [(flat, v) for v in values if isinstance(v, torch.Tensor)]
        return held

    def _target(self, flat: Flat) -> nn.Parameter:
        part = self._part(flat)
        if flat.dtypes.has_master:
            return nn.Parameter(part.to(BY_NAME[flat.dtypes.master]))
        return nn.Parameter(part)

    def _assign(self, indices: Iterable[int], gradients: Sequence[torch.Tensor]) -> None:
        for target in self._targets:
            target.grad = None
        for index, gradient in zip(indices, gradients, strict=True):
            self._targets[index].grad = gradient

    def _step(self) -> None:
        self._stepping = True
        try:
            self.torch_optimizer.step()
        finally:
            self._stepping = False
            for target in self._targets:
                target.grad = None

    def _refuse_outside_step(self, *_: Any) -> None:
        if not self._stepping:
            raise EngineError(
                "optimizer.step() would use unreduced gradients; call engine.step() instead"
            )


def check_element_wise(factory: OptimizerFactory) -> None:
    """Raise ConfigError for an optimizer that treats a tensor and its two halves differently.

    ZeRO cuts tensors at shard borders, so an update must not look beyond its element.
    """
    start = torch.linspace(-1.0, 1.0, 64)
    gradient = torch.linspace(2.0, -1.0, 64).sin()
    try:
        whole = _two_steps(factory, [start], [gradient])
        halves = _two_steps(factory, list(start.chunk(2)), list(gradient.chunk(2)))
    except Exception as error:
        raise ConfigError(
            f"the optimizer cannot step on 1-d shards of parameters ({error}); ZeRO needs an "
            "element-wise one such as torch.optim.AdamW or SGD"
        ) from error
    if not torch.allclose(whole, halves, rtol=1e-6, atol=1e-9):
        raise ConfigError(
            "the optimizer's update depends on more than one element (a norm, a shape, a matrix): "
            "two steps on a tensor and on its halves differ. ZeRO cuts parameters at shard "
            "borders; use an element-wise optimizer such as torch.optim.AdamW or SGD"
        )


def _two_steps(
    factory: OptimizerFactory, values: list[torch.Tensor], gradients: list[torch.Tensor]
) -> torch.Tensor:
    parameters = [nn.Parameter(v.clone()) for v in values]
    optimizer = factory([{"params": parameters}])
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([p.detach() for p in parameters])
