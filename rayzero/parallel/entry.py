"""One entry for several column-cut linears that read the same tensor.

Query, key and value share one all-reduce (or one all-gather and one reduce-scatter). Whether two
linears read the same is seen as they run, by the tensor's identity: so any module's linears may
share, and those that read different tensors never do.
"""

import weakref
from typing import Any

from torch import Tensor, nn

from rayzero.parallel.stream import Stream


class SharedEntry:
    """The entry of the column-cut linears below one module."""

    def __init__(self, stream: Stream, unit: str) -> None:
        self._stream = stream
        self._unit = unit
        self._num_readers = 0
        self._num_left = 0
        self._seen: weakref.ref[Tensor] | None = None
        self._entered: Tensor | None = None

    def add(self, linear: nn.Module) -> None:
        """Let one more linear's input come through here."""
        self._num_readers += 1
        linear.register_forward_pre_hook(self._hook)

    def _hook(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._enter(args[0]), *args[1:]

    def _enter(self, x: Tensor) -> Tensor:
        entered = self._entered
        if entered is None or self._seen is None or self._seen() is not x:
            entered = self._stream.enter(x, self._unit)
            self._num_left = self._num_readers
        self._num_left -= 1
        # After its last reader nothing here keeps the tensor alive.
        self._entered = entered if self._num_left else None
        self._seen = weakref.ref(x) if self._num_left else None
        return entered


def unit_of_entry(name: str) -> str:
    """Name the entry of a linear: the module around it, or itself where that is the model."""
    return name.rpartition(".")[0] or name
