"""The user's torch optimizer on flat shards, with master copies where parameters are narrower."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rayzero.dist.dtypes import BY_NAME
from rayzero.dist.fake import with_values
from rayzero.engine.disk_states import MASTER, DiskFlat, DiskStates
from rayzero.engine.flats import Flat, to_host
from rayzero.engine.options import OffloadOptions
from rayzero.engine.shelf import AnyShelf
from rayzero.errors import ConfigError, EngineError
from rayzero.layout.plan import offloaded
from rayzero.records import Kind, Where

PLACES = {"none": Where.DEVICE, "host": Where.HOST, "disk": Where.DISK}

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class FlatOptimizer:
    """One torch optimizer whose tensors are this rank's part of each trained flat.

    `part` cuts from a flat what this rank updates: its shard, or at stage 0 the whole. A flat has a
    copy for the optimizer where the master is wider or the states live elsewhere than the part.

    What users write into parameters must reach such a copy, or the next step overwrites it. Writes
    in place count themselves; one through `parameter.data` shows only in a sum of the part's bits.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        settings: Sequence[dict[str, Any]],
        flats: Sequence[Flat],
        part: Callable[[Flat], torch.Tensor],
        offload: OffloadOptions,
        shelf: AnyShelf,
    ) -> None:
        moments = probe_moments(factory)
        self._flats = flats
        self._part = part
        self._offload = offload
        self._positions = {flat.layout.index: i for i, flat in enumerate(flats)}
        self._away = offloaded([flat.layout for flat in flats], offload.optimizer, offload.fraction)
        self._targets = [self._make_target(flat) for flat in flats]
        self._num_writes = [flat.num_writes for flat in flats]
        self._watched = [flat for flat in flats if self.has_copy(flat) and not flat.sharded]
        device = flats[0].whole.device if flats else None
        self._places = {flat.layout.index: place for place, flat in enumerate(self._watched)}
        self.sums = torch.zeros(len(self._watched), dtype=torch.int64, device=device)
        """Of the bits of each watched flat's part, as the optimizer left them."""
        self._written: list[Flat] = []
        self._stepping = False
        groups = [{**group, "params": []} for group in settings]
        for flat, target in zip(flats, self._targets, strict=True):
            groups[flat.layout.group]["params"].append(target)
        self.torch_optimizer = factory(groups)
        self.torch_optimizer.register_step_pre_hook(self._refuse_outside_step)
        on_disk = offload.optimizer == "disk"
        self._disk = DiskStates(shelf, self._disk_flats(moments)) if on_disk else None

    def target(self, flat: Flat) -> nn.Parameter:
        """Return the tensor that torch's optimizer updates for a flat."""
        return self._targets[self._positions[flat.layout.index]]

    def has_copy(self, flat: Flat) -> bool:
        """Whether the optimizer updates a copy of the flat's part."""
        return flat.dtypes.has_master or self.where(flat) is not flat.where

    def where(self, flat: Flat) -> Where:
        """Return where a flat's master and moments live."""
        return PLACES[self._place(flat)]

    def write_master(self, flat: Flat, values: torch.Tensor) -> None:
        """Set a flat's master to values in master precision (1-d, as long as the part)."""
        if self._disk is not None and self._on_disk(flat):
            self._disk.write_master(flat.layout.index, values)
        else:
            self.target(flat).data.copy_(values)
        self._remember(flat)

    def adopt_writes(self, flat: Flat) -> None:
        """Bring what was written into a flat's parameters to its master."""
        if not self._on_disk(flat):
            self._adopt_writes(flat)
            return
        for staged in self.staged():
            if staged is flat:
                self._adopt_writes(flat)

    def unlike_sums(self) -> torch.Tensor:
        """Tell of each watched flat whether its part is another than the optimizer left."""
        if not self._watched:
            return self.sums.bool()
        return torch.stack([_sum_of(self._part(flat)) for flat in self._watched]) != self.sums

    def take_written(self, flags: Sequence[bool]) -> None:
        """Let the next update take over what was written into flats; flags: of `unlike_sums`."""
        self._written = [f for f, flag in zip(self._watched, flags, strict=True) if flag]

    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Step on gradients (one per flat, as long as the part), then refresh the parameters.

        Gradients that lie as their targets do are stepped on in one call. The others, and flats on
        disk, are taken one at a time, so that no more than one is ever widened or staged.
        """
        together: list[int] = []
        alone: list[int] = []
        for i, (gradient, target) in enumerate(zip(gradients, self._targets, strict=True)):
            if not self._on_disk(self._flats[i]):
                (together if _fits(gradient, target) else alone).append(i)
        self._step(together, [gradients[i] for i in together])
        for i in alone:
            self._step([i], [gradients[i]])
        for flat in self.staged():
            i = self._positions[flat.layout.index]
            self._step([i], [gradients[i]])

    def masters(self) -> list[tuple[Flat, torch.Tensor]]:
        """List the copies held in memory."""
        pairs = zip(self._flats, self._targets, strict=True)
        return [(f, t.data) for f, t in pairs if self.has_copy(f)]

    def state(self) -> list[tuple[Flat, torch.Tensor]]:
        """List the tensors of the optimizer's state: moments as long as the part, and counters."""
        held = []
        for flat, target in zip(self._flats, self._targets, strict=True):
            values = self.torch_optimizer.state.get(target, {}).values()
            held += [(flat, v) for v in values if isinstance(v, torch.Tensor)]
        return held

    def tensors(self, flat: Flat) -> dict[str, torch.Tensor]:
        """Return what is updated of a flat, as MASTER, and its moments by key.

        Of a flat on disk these are buffers that `bring` fills.
        """
        if self._disk is not None and self._on_disk(flat):
            return self._disk.buffers(flat.layout.index)
        target = self.target(flat)
        state = self.torch_optimizer.state.get(target, {})
        return {MASTER: target.data} | {k: v for k, v in state.items() if is_moment(v, target)}

    def bring(self, flat: Flat) -> None:
        """Read the states of a flat on disk into its buffers."""
        assert self._disk is not None, f"{flat.layout.name} is not on disk"
        self._disk.bring(flat.layout.index)

    def staged(self) -> Iterator[Flat]:
        """Yield each flat on disk with its states in memory; changes to them go back to disk."""
        for index in self._disk.staged() if self._disk is not None else ():
            yield self._flats[self._positions[index]]

    def forget_state(self) -> None:
        """Let the optimizer start anew."""
        for state in self.torch_optimizer.state.values():
            state.clear()
        if self._disk is not None:
            self._disk.forget_moments()

    def staging(self) -> list[torch.Tensor]:
        """List the buffers between disk and memory."""
        return self._disk.tensors() if self._disk is not None else []

    def disk_files(self) -> list[tuple[Kind, Flat, int]]:
        """List the files that hold values as long as a flat's part: kind, flat, itemsize."""
        files = self._disk.files() if self._disk is not None else []
        return [(kind, self._flats[self._positions[i]], size) for kind, i, size in files]

    def _make_target(self, flat: Flat) -> nn.Parameter:
        part = self._part(flat)
        dtype = BY_NAME[flat.dtypes.master]
        if self._on_disk(flat):
            # It has no elements but while it is staged.
            return nn.Parameter(torch.zeros(0, dtype=dtype))
        if not self.has_copy(flat):
            return nn.Parameter(part)
        if flat.layout.index not in self._away:
            return nn.Parameter(flat.whole.new_zeros(part.numel(), dtype=dtype))
        return nn.Parameter(to_host(torch.zeros(part.numel(), dtype=dtype)))

    def _disk_flats(self, moments: Sequence[str]) -> list[DiskFlat]:
        return [
            DiskFlat(
                index=flat.layout.index,
                target=self.target(flat),
                elements=self._part(flat).numel(),
                state=self.torch_optimizer.state[self.target(flat)],
                moments=tuple(moments),
                shared_master=None if self.has_copy(flat) or flat.file is None else flat.file.name,
            )
            for flat in self._flats
            if flat.layout.index in self._away
        ]

    def _place(self, flat: Flat) -> str:
        return self._offload.optimizer if flat.layout.index in self._away else "none"

    def _on_disk(self, flat: Flat) -> bool:
        return self._place(flat) == "disk"

    def _step(self, positions: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Update these flats alone, and their parameters from them."""
        if not positions:
            return
        for position, gradient in zip(positions, gradients, strict=True):
            flat = self._flats[position]
            if flat in self._written or flat.num_writes != self._num_writes[position]:
                self._adopt_writes(flat)
            target = self._targets[position]
            target.grad = gradient.to(target.device, target.dtype)
        self._stepping = True
        try:
            self.torch_optimizer.step()
        finally:
            self._stepping = False
            for position in positions:
                self._targets[position].grad = None
        for position in positions:
            flat = self._flats[position]
            if self.has_copy(flat):
                # What comes to the host may be read there next, by a save for instance.
                stays = flat.where is Where.DEVICE
                self._part(flat).copy_(self._targets[position].data, non_blocking=stays)
                flat.store()
                self._remember(flat)

    def _remember(self, flat: Flat) -> None:
        place = self._places.get(flat.layout.index)
        if place is not None:
            self.sums[place] = _sum_of(self._part(flat))

    def _adopt_writes(self, flat: Flat) -> None:
        # Elements that still are their master's rounding keep the master's precision.
        master = self.target(flat).data
        if self.has_copy(flat):
            flat.fetch()
            part = self._part(flat).to(master.device)
            master.copy_(torch.where(part == master.to(part.dtype), master, part.to(master.dtype)))
        self._num_writes[self._positions[flat.layout.index]] = flat.num_writes

    def _refuse_outside_step(self, *_: Any) -> None:
        if not self._stepping:
            raise EngineError(
                "optimizer.step() would use unreduced gradients; call engine.step() instead"
            )


def is_moment(value: Any, target: torch.Tensor) -> bool:
    """Whether a value of the optimizer's state has an element for each of the target."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == target.numel()


def _sum_of(part: torch.Tensor) -> torch.Tensor:
    """Sum the bits, eight bytes at a time: other values have another sum, in another order not."""
    return part.view(torch.int64).sum()


def _fits(gradient: torch.Tensor, target: torch.Tensor) -> bool:
    return gradient.dtype is target.dtype and gradient.device == target.device


@with_values()
def probe_moments(factory: OptimizerFactory) -> list[str]:
    """Return the names of the optimizer's moments; raise ConfigError if it is not element-wise.

    Found by behaviour: two steps on a tensor and on its halves must agree, since ZeRO cuts tensors
    at shard borders and an update must not look beyond its element.
    """
    # The halves have other norms; in fp64 it shows however small the learning rate is.
    start = torch.linspace(-1.0, 2.0, 64, dtype=torch.float64)
    gradient = torch.linspace(2.0, -1.0, 64, dtype=torch.float64).sin()
    try:
        whole, state = _two_steps(factory, [start], [gradient])
        halves, _ = _two_steps(factory, list(start.chunk(2)), list(gradient.chunk(2)))
    except Exception as error:
        raise ConfigError(
            f"the optimizer cannot step on 1-d shards of parameters ({error}); ZeRO needs an "
            "element-wise one such as torch.optim.AdamW or SGD"
        ) from error
    largest = float((whole - start).abs().max())
    if not torch.allclose(whole, halves, rtol=0.0, atol=1e-6 * largest):
        raise ConfigError(
            "the optimizer's update depends on more than one element (a norm, a shape, a matrix): "
            "two steps on a tensor and on its halves differ. ZeRO cuts parameters at shard "
            "borders; use an element-wise optimizer such as torch.optim.AdamW or SGD"
        )
    return [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.numel() == 64]


def _two_steps(
    factory: OptimizerFactory, values: list[torch.Tensor], gradients: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    parameters = [nn.Parameter(v.clone()) for v in values]
    optimizer = factory([{"params": parameters}])
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([p.detach() for p in parameters]), dict(optimizer.state[parameters[0]])
