"""Stage 3's units: gathered before their module runs, freed after, and again around its backward.

[Note: a unit's day]
forward pre-hook: the unit and every unit whose parameters the module also uses become whole.
forward hook: they are freed, unless another running module uses them, or this forward is a
recomputation inside backward, whose backward follows at once. A hook on each output tensor makes
them whole again when its gradient comes. The gradient of the module's first input that needs one is
the last of this use, and frees it: autograd runs what was made last first, so every other node of
the use has run. A use whose inputs need no gradient is freed at the end of backward. Gradients that
have come tell nothing: a checkpoint may still compute again with the unit.

[Note: one marked input]
The mark is a view of this use alone, as the input may have other users. An ordinary view, not a
function of our own: the module may change its input in place. One view, wherever the tensor is
given: attention asks whether query, key and value are the same one. And only one input: behind a
view this use's parts of a gradient are summed first, which changes bits where others use the tensor
too. The first input is mostly the one that a layer hands to the next; others are for many, as an
encoder's output is for each layer of the decoder.

[Note: other ways into a unit's backward]
A module may hand tensors out by other ways than its output: on an attribute, as a router keeps its
balance loss, or inside an object that nobody can look into. Their backward meets a weight that was
saved and has no bytes now. So weights saved for backward are packed with their unit, and unpacking
one makes the unit whole. torch looks for changes in place only where nothing is packed, so that is
done here too.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from rayzero.engine.partition import own_parameters
from rayzero.engine.prefetch import Prefetcher
from rayzero.engine.stage import Called
from rayzero.engine.tensors import map_tensors, tensors_in
from rayzero.engine.unit import Unit, UnitState
from rayzero.errors import EngineError


class Saved(NamedTuple):
    """A tensor that a forward saved for backward; use: the unit whose weight it is, alone."""

    tensor: torch.Tensor
    version: int
    use: tuple[Unit, ...] | None


class UnitHooks:
    """Hooks on the modules of one engine. See [Note: a unit's day]."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        *,
        in_backward: Callable[[], bool],
        used_up: Callable[[Unit], None],
        called: dict[str, Called],
        prefetcher: Callable[[], Prefetcher],
    ) -> None:
        self._units = units
        self._called = called
        self._forward, self._backward = prefetcher(), prefetcher()
        self._in_backward = in_backward
        self._used_up = used_up
        self._num_backwards = 0
        self._use_of_storage = {
            flat.whole.untyped_storage()._cdata: use
            for use in ((unit,) for unit in units)
            for flat in use[0].flats
        }
        self._packing = contextlib.ExitStack()
        self._handles: list[RemovableHandle] = []
        owner = {id(m.parameter): unit for unit in units for f in unit.flats for m in f.members}
        # A parameter that stays whole has no unit.
        names = [unit.name for unit in units]
        for unit in units:
            part = module.get_submodule(unit.name)
            own = [id(p) for p in own_parameters(part, unit.name, names)]
            used = dict.fromkeys(owner[key] for key in own if key in owner)
            if used:
                self._watch(unit.name, part, tuple(used))

    def start_forward(self) -> None:
        """Begin a forward; forget modules that one which raised left running."""
        self._forward.begin()
        self._packing.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        for unit in self._units:
            unit.running = 0

    def end_forward(self) -> None:
        """Drop what was gathered ahead and not used."""
        self._packing.close()
        for unit in self._units:
            unit.end_read_ahead()
            if unit.state is UnitState.GATHERING:
                unit.reshard()

    def start_backward(self) -> None:
        """Follow the order of the backward before."""
        self._num_backwards += 1
        self._backward.begin()

    def end_backward(self) -> None:
        """Bring every unit to its shards."""
        for unit in self._units:
            unit.open_uses = unit.running = 0
            unit.expected_ends, unit.ended_uses = unit.ended_uses or unit.expected_ends, 0
            unit.backward_users.clear()
            unit.end_read_ahead()
            unit.reshard()

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, name: str, part: nn.Module, used: tuple[Unit, ...]) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._called.setdefault(name, Called())
            self._unshard(used)
            for unit in used:
                unit.running += not self._in_backward()
            return self._open_use(name, used, args, kwargs) if torch.is_grad_enabled() else None

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                # What was only passed through has its gradient when the use is over.
                passed = {id(tensor) for tensor in tensors_in((args, kwargs))}
                for tensor in tensors_in(output):
                    if tensor.requires_grad and id(tensor) not in passed:
                        self._called[name].is_reached = True
                        _on_gradient(tensor, lambda: self._unshard_for_backward(used))
            if not self._in_backward():
                self._end_forward(used)

        hook = part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self._handles += [hook, part.register_forward_hook(after, with_kwargs=True)]

    def _open_use(self, name: str, used: tuple[Unit, ...], args: Any, kwargs: Any) -> Any:
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        for unit in used:
            # Inside backward only a reentrant recomputation opens a use: its forward had no graph.
            if not self._in_backward() or not unit.open_uses:
                unit.open_uses += 1
        if not inputs:
            return None
        self._called[name].goes_on = True
        # See [Note: one marked input].
        marked = inputs[0].view_as(inputs[0])
        _on_gradient(marked, self._end_of_use(used))
        return map_tensors((args, kwargs), lambda t: marked if t is inputs[0] else t)

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

    def _end_of_use(self, used: tuple[Unit, ...]) -> Callable[[], None]:
        """Return what the gradient of a use's marked input calls; it acts once in a backward."""
        last_ended = -1

        def end() -> None:
            nonlocal last_ended
            if last_ended != self._num_backwards:
                last_ended = self._num_backwards
                self._end(used)

        return end

    def _end(self, used: tuple[Unit, ...]) -> None:
        for unit in used:
            unit.open_uses -= 1
            unit.ended_uses += 1
            unit.backward_users.discard(used)
            if not unit.backward_users:
                unit.reshard()
            if unit.open_uses == 0 and unit.ended_uses >= unit.expected_ends:
                self._used_up(unit)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        # Detached: a node that held its own output would be a circle that nobody frees.
        held = tensor.detach()
        use = None
        if held.layout is torch.strided:
            use = self._use_of_storage.get(held.untyped_storage()._cdata)
        return Saved(tensor=held, version=tensor._version, use=use)

    def _unpack(self, saved: Saved) -> torch.Tensor:
        """See [Note: other ways into a unit's backward]."""
        if saved.tensor._version != saved.version:
            raise EngineError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was changed in "
                "place after the forward had saved it; change a copy instead"
            )
        if saved.use is not None:
            self._unshard(saved.use)
        return saved.tensor


def _on_gradient(tensor: torch.Tensor, call: Callable[[], None]) -> None:
    tensor.register_hook(lambda grad: call())  # type: ignore[no-untyped-call]
