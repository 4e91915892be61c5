"""A door to collectives that is watched, or left shut on purpose: for experiments."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.dist.comm import Axis, Communicator, Handle
from rayzero.dist.ledger import Line
from rayzero.dist.process import current_store
from rayzero.dist.slow import Slow
from rayzero.dist.transport import TransportFactory, transport_for
from rayzero.records import Phase

TORCH_OPS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}
"""What c10d calls its collectives under dispatch, in every torch from 2.11 on."""


class Links:
    """Makes transports with a latency, and adds up how much of it waits have seen."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._links: list[Slow] = []

    def __call__(self, group: torch.distributed.ProcessGroup, device_type: str) -> Slow:
        """Make one axis' transport."""
        self._links.append(Slow(group, self._latency_s))
        return self._links[-1]

    @property
    def exposed_s(self) -> float:
        """Seconds of latency that this rank has waited for."""
        return sum(link.exposed_s for link in self._links)


class ObservedCommunicator(Communicator):
    """Remembers which storages were handed to a transport.

    publishes: False leaves out the all-gather of updated parameters after the optimizer's step.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        transport: TransportFactory = transport_for,
        publishes: bool = True,
    ) -> None:
        super().__init__(mesh, store=current_store(), transport=transport)
        self._publishes = publishes
        self._sent: set[int] = set()

    def all_gather(self, flat: torch.Tensor, *, axis: str, unit: str) -> Handle:
        """Gather, but for updated parameters where these stay unpublished."""
        if self.ledger.phase is Phase.STEP and not self._publishes:
            return self._nothing()
        return super().all_gather(flat, axis=axis, unit=unit)

    def forget(self) -> None:
        """Begin to remember anew: addresses of buffers that are gone may be given out again."""
        self._sent.clear()

    def bytes_sent_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Sum the bytes of those tensors whose storage was in any transfer."""
        return sum(t.nbytes for t in tensors if t.untyped_storage().data_ptr() in self._sent)

    def _write(self, op: str, axis: Axis, tensor: torch.Tensor, *rest: Any) -> Line:
        self._sent.add(tensor.untyped_storage().data_ptr())
        return super()._write(op, axis, tensor, *rest)


@contextlib.contextmanager
def counting_collectives() -> Iterator[Mapping[str, int]]:
    """Count the elements of whole buffers in torch's own collectives inside the block, by op."""
    mode = _CollectiveCount()
    with mode:
        yield mode.elements


class _CollectiveCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what reaches c10d, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        op = TORCH_OPS.get(name.removeprefix("c10d::")) if name.startswith("c10d::") else None
        if op is not None:
            sizes = [_elements(arg) for arg in args]
            self.elements[op] += max(sizes)
        return func(*args, **(kwargs or {}))


def _elements(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel()
    if isinstance(argument, list | tuple):
        return sum(_elements(item) for item in argument)
    return 0
