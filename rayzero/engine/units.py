"""Stage 3's units: gathered before their module runs, freed after, and again around its backward.

[Note: a unit's day]
forward pre-hook: the unit and every unit whose parameters the module also uses become whole.
forward hook: they are freed, unless another running module uses them, or this forward is a
recomputation inside backward, whose backward follows at once. A hook on each output tensor makes
them whole again when its gradient comes. An identity function on the module's inputs sees when the
last node of this use has run, and frees. A use whose inputs need no gradient is freed when its
gradients are final, at the latest at the end of backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.partition import own_parameters
from rayzero.engine.prefetch import Prefetcher
from rayzero.engine.tensors import map_tensors, tensors_in
from rayzero.engine.unit import Unit, UnitState


class UnitHooks:
    """Hooks on the modules of one engine. See [Note: a unit's day]."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        *,
        in_backward: Callable[[], bool],
        is_final: Callable[[Unit], bool],
        prefetcher: Callable[[], Prefetcher],
    ) -> None:
        self._units = units
        self._forward, self._backward = prefetcher(), prefetcher()
        self._in_backward = in_backward
        self._is_final = is_final
        self._handles: list[RemovableHandle] = []
        owner = {id(m.parameter): unit for unit in units for f in unit.flats for m in f.members}
        # A parameter that stays whole has no unit.
        names = [unit.name for unit in units]
        for unit in units:
            part = module.get_submodule(unit.name)
            own = [id(p) for p in own_parameters(part, unit.name, names)]
            used = dict.fromkeys(owner[key] for key in own if key in owner)
            if used:
                self._watch(part, tuple(used))

    def start_forward(self) -> None:
        """Forget modules that a forward which raised left running."""
        self._forward.begin()
        for unit in self._units:
            unit.running = 0

    def end_forward(self) -> None:
        """Drop what was gathered ahead and not used."""
        for unit in self._units:
            if unit.state is UnitState.GATHERING:
                unit.reshard()

    def start_backward(self) -> None:
        """Follow the order of the backward before."""
        self._backward.begin()

    def grads_final(self, unit: Unit) -> None:
        """Free a unit all of whose gradients have come, unless the end of a use will tell."""
        if unit.marked_uses <= 0:
            unit.reshard()

    def end_backward(self) -> None:
        """Bring every unit to its shards."""
        for unit in self._units:
            unit.open_uses = unit.marked_uses = unit.running = 0
            unit.backward_users.clear()
            unit.reshard()

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, part: nn.Module, used: tuple[Unit, ...]) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._unshard(used)
            for unit in used:
                unit.running += not self._in_backward()
            return self._open_use(used, args, kwargs) if torch.is_grad_enabled() else None

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        _on_gradient(tensor, lambda: self._unshard_for_backward(used))
            if not self._in_backward():
                self._end_forward(used)

        hook = part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self._handles += [hook, part.register_forward_hook(after)]

    def _open_use(self, used: tuple[Unit, ...], args: Any, kwargs: Any) -> Any:
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        for unit in used:
            # Inside backward only a reentrant recomputation opens a use: its forward had no graph.
            if not self._in_backward() or not unit.open_uses:
                unit.open_uses += 1
                unit.marked_uses += bool(inputs)
        if not inputs:
            return None
        marked = iter(_EndOfUse.apply(lambda: self._end_of_use(used), *inputs))  # type: ignore[no-untyped-call]
        return map_tensors((args, kwargs), lambda t: next(marked) if t.requires_grad else t)

    def _end_forward(self, used: tuple[Unit, ...]) -> None:
        for unit in used:
            unit.running -= 1
            if unit.running <= 0:
                unit.reshard()

    def _unshard_for_backward(self, used: tuple[Unit, ...]) -> None:
        self._unshard(used)
        for unit in used:
            unit.backward_users.add(used)

    def _unshard(self, used: tuple[Unit, ...]) -> None:
        gathers = any(unit.state is not UnitState.WHOLE for unit in used)
        for unit in used:
            unit.unshard()
        if gathers:
            (self._backward if self._in_backward() else self._forward).used(used)

    def _end_of_use(self, used: tuple[Unit, ...]) -> None:
        for unit in used:
            unit.open_uses -= 1
            unit.marked_uses -= 1
            unit.backward_users.discard(used)
            # The last use is over only when no node beside its inputs' path waits: gradients tell.
            if not unit.backward_users and (unit.open_uses > 0 or self._is_final(unit)):
                unit.reshard()


def _on_gradient(tensor: torch.Tensor, call: Callable[[], None]) -> None:
    tensor.register_hook(lambda grad: call())  # type: ignore[no-untyped-call]


class _EndOfUse(torch.autograd.Function):
    """Identity whose backward runs after every node of the use that it precedes."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.done = done
        return tuple(t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.done()
        return (None, *grads)
