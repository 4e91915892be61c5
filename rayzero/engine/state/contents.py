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

from rayzero.engine.assembly import Assembly
from rayzero.engine.disk_states import MASTER
from rayzero.engine.flats import Flat
from rayzero.engine.optimizer import is_moment
from rayzero.layout.spec import ParamSpec
from rayzero.records import Where

WEIGHTS, MOMENTS = "weights", "moments"

IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Settings of a param group that choose code, not training: a checkpoint leaves them alone."""

PLAIN = (torch.Tensor, bool, int, float, str, list, tuple, type(None))
"""What settings may be; others, such as functions, are the caller's to bring again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One number of an optimizer's state; dtype is torch's name, or int or float of Python."""

    value: float
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The optimizer's numbers by key, and the names of the parameters that share them."""

    names: tuple[str, ...]
    numbers: dict[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One param group: names of its parameters in the module's order, and its plain settings."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def key_of(kind: str, name: str) -> str:
    """Return the key of a named tensor."""
    return f"{kind}/{name}"


def name_in(key: str) -> str:
    """Return the name in a key."""
    kind, rest = key.split("/", 1)
    return rest.split("/", 1)[1] if kind == MOMENTS else rest


def kind_in(key: str) -> str:
    """Return the kind in a key; of a moment, which one."""
    kind, rest = key.split("/", 1)
    return rest.split("/", 1)[0] if kind == MOMENTS else kind


def flat_tensors(parts: Assembly) -> list[tuple[str, Flat, torch.Tensor]]:
    """List what this rank holds of the state, by kind and flat, what is on disk first."""
    held = list(_held_tensors(parts))
    return sorted(held, key=lambda one: not is_on_disk(parts, one[0], one[1]))


def is_on_disk(parts: Assembly, kind: str, flat: Flat) -> bool:
    """Whether a flat's state of this kind is on disk."""
    return Where.DISK is (flat.where if kind == WEIGHTS else parts.optimizer.where(flat))


def _held_tensors(parts: Assembly) -> Iterator[tuple[str, Flat, torch.Tensor]]:
    for flat in parts.flats:
        yield WEIGHTS, flat, flat.shard
    for flat in parts.trained:
        tensors = parts.optimizer.tensors(flat)
        for key, tensor in tensors.items():
            if key != MASTER:
                yield f"{MOMENTS}/{key}", flat, tensor
            elif parts.optimizer.has_copy(flat):
                yield MASTER, flat, tensor


def on_disk(parts: Assembly) -> dict[str, Flat]:
    """Return the flats whose states are on disk, by the names of their parameters."""
    away = [flat for flat in parts.trained if parts.optimizer.where(flat) is Where.DISK]
    return {slot.spec.name: flat for flat in away for slot in flat.layout.slots}


def shard_axis(parts: Assembly, flat: Flat) -> str:
    """Return the axis that the flat's shards are spread over."""
    return "shard" if flat.layout.shards == parts.comm.size("shard") else "data"


def specs_of(parts: Assembly) -> dict[str, ParamSpec]:
    """Return every parameter of the module by name."""
    return {slot.spec.name: slot.spec for flat in parts.flats for slot in flat.layout.slots}


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the first."""
    first = {id(p): name for name, p in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if name != first[id(p)]}


def counters_of(parts: Assembly) -> list[Counters]:
    """Return the optimizer's numbers; the parameters of one flat share theirs."""
    counters = []
    for flat in parts.trained:
        target = parts.optimizer.target(flat)
        state = parts.optimizer.torch_optimizer.state.get(target, {})
        found = {k: _scalar(v) for k, v in state.items() if not is_moment(v, target)}
        if found:
            names = tuple(slot.spec.name for slot in flat.layout.slots)
            counters.append(Counters(names=names, numbers=found))
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


def _scalar(value: Any) -> Scalar:
    if isinstance(value, torch.Tensor):
        return Scalar(value=value.item(), dtype=str(value.dtype).removeprefix("torch."))
    return Scalar(value=value, dtype=type(value).__name__)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    skipped = ("params", "param_names", *IMPLEMENTATION)
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in skipped and isinstance(value, PLAIN)
    }
