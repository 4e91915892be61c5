"""What of an engine a checkpoint holds, and under which names.

    weights/NAME        a parameter as forward uses it, frozen ones included, or a persistent buffer
    master/NAME         what the optimizer updates, where that is a copy
    moments/KEY/NAME    the optimizer's state, such as exp_avg, as long as the parameter

NAME is the module's own; a tied parameter has the first of its names. Counters (the optimizer's
state of one number, such as step) and settings of param groups are plain values of the manifest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.engine.assembly import Assembly
from rayzero.engine.flats import Flat
from rayzero.engine.state.spans import Spans
from rayzero.layout.boxes import boxes_of, whole_offsets, whole_shape
from rayzero.layout.spec import ParamSpec, Piece, Span

WEIGHTS, MASTER, MOMENTS = "weights", "master", "moments"

IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Settings of a param group that choose code, not training: a checkpoint leaves them alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One number of an optimizer's state; dtype is torch's name, or int or float of Python."""

    value: float
    dtype: str


Counters = dict[str, dict[str, Scalar]]
"""By parameter name, then by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One param group: names of its parameters in the module's order, and its plain settings."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def key_of(kind: str, name: str) -> str:
    """Return the key of a named tensor."""
    return f"{kind}/{name}"


def held_spans(parts: Assembly) -> dict[str, Spans]:
    """Describe what this rank writes: every element of the state by exactly one rank."""
    spans: dict[str, Spans] = {}
    if parts.comm.rank("replicate") == 0:
        for kind, flat, tensor in _flat_tensors(parts):
            own = flat.own(tensor) if tensor.numel() == flat.layout.padded else tensor
            for piece in pieces_of(flat, own):
                if piece.spec.tp is not None or parts.comm.rank("tp") == 0:
                    add_piece(spans, key_of(kind, piece.spec.name), piece, own)
    if is_first(parts.comm):
        for name, buffer in buffers_of(parts.module).items():
            add_whole(spans, key_of(WEIGHTS, name), buffer)
    return spans


def add_piece(spans: dict[str, Spans], key: str, piece: Piece, tensor: torch.Tensor) -> None:
    """Add a piece of a parameter that lies in a 1-d tensor to what is known of its key."""
    if key not in spans:
        spans[key] = Spans(whole_shape(piece.spec), tensor.dtype, tensor.device)
    run = tensor[piece.in_shard.start : piece.in_shard.stop]
    for box in boxes_of(piece.spec.shape, piece.in_param):
        start = box.run.start - piece.in_param.start
        view = run[start : start + box.run.elements].view(box.sizes)
        spans[key].hold(whole_offsets(piece.spec, box.offsets), view)


def add_whole(spans: dict[str, Spans], key: str, tensor: torch.Tensor) -> None:
    """Add a tensor that this rank holds all of."""
    spans[key] = Spans(tuple(tensor.shape), tensor.dtype, tensor.device)
    if tensor.numel():
        spans[key].hold((0,) * tensor.dim(), tensor.detach())


def pieces_of(flat: Flat, tensor: torch.Tensor) -> list[Piece]:
    """List the parts of parameters in a tensor as long as the flat, or as its own shard."""
    if tensor.numel() == flat.layout.shard_elements:
        return flat.layout.pieces(flat.shard_index)
    return [
        Piece(spec=s.spec, in_param=Span(start=0, stop=s.span.elements), in_shard=s.span)
        for s in flat.layout.slots
        if s.span.elements
    ]


def specs_of(parts: Assembly) -> dict[str, ParamSpec]:
    """Return every parameter of the module by name."""
    return {slot.spec.name: slot.spec for flat in parts.flats for slot in flat.layout.slots}


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by the name that module.state_dict() gives them."""
    return {
        f"{path}.{key}" if path else key: buffer
        for path, owner in module.named_modules()
        for key, buffer in owner._buffers.items()
        if buffer is not None and key not in owner._non_persistent_buffers_set
    }


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the first."""
    first = {id(p): name for name, p in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if name != first[id(p)]}


def counters_of(parts: Assembly) -> Counters:
    """Return the optimizer's numbers; the parameters of one flat share theirs."""
    counters: Counters = {}
    for flat in parts.trained:
        target = parts.optimizer.target(flat)
        state = parts.optimizer.torch_optimizer.state.get(target, {})
        found = {k: _scalar(v) for k, v in state.items() if not is_moment(v, target)}
        if found:
            counters |= {slot.spec.name: found for slot in flat.layout.slots}
    return counters


def groups_of(parts: Assembly) -> list[Group]:
    """Return the param groups of the optimizer, by names instead of tensors."""
    names: dict[int, list[str]] = {}
    for flat in parts.trained:
        names.setdefault(flat.layout.group, []).extend(s.spec.name for s in flat.layout.slots)
    return [
        Group(names=tuple(sorted(names.get(i, []))), settings=_settings(group))
        for i, group in enumerate(parts.optimizer.torch_optimizer.param_groups)
    ]


def is_moment(value: Any, target: torch.Tensor) -> bool:
    """Whether a value of the optimizer's state has an element for each of the target."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == target.numel()


def is_first(comm: Communicator) -> bool:
    """Whether this is the rank that speaks for all."""
    return all(comm.rank(axis) == 0 for axis in ("replicate", "shard", "tp"))


def _flat_tensors(parts: Assembly) -> Iterator[tuple[str, Flat, torch.Tensor]]:
    for flat in parts.flats:
        yield WEIGHTS, flat, flat.shard
    for flat, master in parts.optimizer.masters():
        yield MASTER, flat, master
    for flat in parts.trained:
        target = parts.optimizer.target(flat)
        for key, value in parts.optimizer.torch_optimizer.state.get(target, {}).items():
            if is_moment(value, target):
                yield f"{MOMENTS}/{key}", flat, value


def _scalar(value: Any) -> Scalar:
    if isinstance(value, torch.Tensor):
        return Scalar(value=value.item(), dtype=str(value.dtype).removeprefix("torch."))
    return Scalar(value=value, dtype=type(value).__name__)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    skipped = ("params", "param_names", *IMPLEMENTATION)
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in skipped
    }
