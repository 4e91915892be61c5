"""Know which module of a model runs now, in forward and in backward, and which unit holds it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.tensors import tensors_in


class ModuleWatch:
    """Hooks on every module; `unit` is the unit at work, `running` the modules entered."""

    def __init__(self, module: nn.Module, units: Sequence[str]) -> None:
        self.unit = ""
        self.running: list[str] = []
        self._units = frozenset(units)
        self._handles: list[RemovableHandle] = []
        for name, part in module.named_modules():
            self._watch(part, name, _unit_of(name, self._units), is_unit=name in units)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, part: nn.Module, name: str, unit: str, *, is_unit: bool) -> None:
        def before(module: nn.Module, args: Any) -> None:
            # A recomputation ends by an exception, after which no hook has run.
            while self.running and not f"{name}.".startswith(f"{self.running[-1]}.".lstrip(".")):
                self.running.pop()
            self.running.append(name)
            self.unit = unit

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()
            if self.running:
                self.unit = _unit_of(self.running[-1], self._units)
            if is_unit and torch.is_grad_enabled():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(self._enter_backward(unit))  # type: ignore[no-untyped-call]

        self._handles += [
            part.register_forward_pre_hook(before, prepend=True),
            part.register_forward_hook(after),
        ]

    def _enter_backward(self, unit: str) -> Callable[[torch.Tensor], None]:
        def arrived(grad: torch.Tensor) -> None:
            self.unit = unit

        return arrived


def _unit_of(name: str, units: Collection[str]) -> str:
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name
