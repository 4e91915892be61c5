"""Find and replace the tensors inside whatever a module takes or returns."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(value: Any, change: TensorMap) -> Any:
    """Return value with each tensor in it changed; containers are copied only if they hold one.

    Looks into lists, tuples, named tuples, mappings and dataclasses, at any depth.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _map_mapping(value, change)
    if isinstance(value, list | tuple):
        items = [map_tensors(v, change) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors inside a value."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _map_mapping(value: Mapping[Any, Any], change: TensorMap) -> Any:
    items = {k: map_tensors(v, change) for k, v in value.items()}
    if all(items[k] is v for k, v in value.items()):
        return value
    changed = copy.copy(value)
    for key, item in items.items():
        changed[key] = item  # type: ignore[index]
    return changed


def _map_dataclass(value: Any, change: TensorMap) -> Any:
    changed = None
    for spec in dataclasses.fields(value):
        old = getattr(value, spec.name, None)
        new = map_tensors(old, change)
        if new is not old:
            changed = copy.copy(value) if changed is None else changed
            object.__setattr__(changed, spec.name, new)
    return value if changed is None else changed
