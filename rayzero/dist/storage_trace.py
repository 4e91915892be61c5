"""Follow every tensor storage through a stretch of work: when it came, grew, shrank and went.

Exact for whatever torch dispatches, with real and with fake tensors, and for resized storages.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class Change(Generic[Place]):
    """A storage's bytes changed by `delta_bytes` at a place of the work."""

    place: Place
    storage: int
    delta_bytes: int


class StorageTrace(TorchDispatchMode, Generic[Place]):  # type: ignore[no-untyped-call]
    """Collects changes inside `with`.

    held: tensors that exist already. where: tells the present place of the work.
    """

    def __init__(self, held: Iterable[torch.Tensor], where: Callable[[], Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[Change[Place]] = []
        self._where = where
        self._numbers: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._next_number = 0
        self._note(list(held))
        self.at_start = {change.storage: change.delta_bytes for change in self.changes}
        self.changes.clear()

    def __enter__(self) -> Self:
        # torch dispatches no operation for it, so the method itself has to be watched.
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> None:
            resize(storage, num_bytes)
            self._note_size(storage)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop noting; storages that live on are not followed further."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note the storages that it made."""
        result = func(*args, **(kwargs or {}))
        self._note(result)
        return result

    @property
    def peak_bytes(self) -> int:
        """The most bytes that all storages had at once."""
        total = sum(self.at_start.values())
        peak = total
        for change in self.changes:
            total += change.delta_bytes
            peak = max(peak, total)
        return peak

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> list[int | None]:
        """Return the number under which each tensor's storage was followed, None if it was not."""
        return [self._numbers.get(t.untyped_storage()._cdata) for t in tensors]

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage._cdata not in self._numbers:
                self._add(storage)
        elif isinstance(value, list | tuple):
            for item in value:
                self._note(item)

    def _note_size(self, storage: torch.UntypedStorage) -> None:
        number = self._numbers.get(storage._cdata)
        if number is not None:
            self._set(number, storage.nbytes())

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, number = storage._cdata, self._next_number
        self._next_number += 1
        self._numbers[address] = number
        self._bytes[number] = 0
        self._references[number] = weakref.ref(storage, lambda _: self._remove(address, number))
        self._set(number, storage.nbytes())

    def _remove(self, address: int, number: int) -> None:
        self._set(number, 0)
        del self._numbers[address], self._bytes[number], self._references[number]

    def _set(self, number: int, num_bytes: int) -> None:
        delta = num_bytes - self._bytes[number]
        self._bytes[number] = num_bytes
        if delta:
            self.changes.append(Change(self._where(), number, delta))
