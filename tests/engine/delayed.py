"""Transports that take their time: a missing wait shows as wrong weights."""

import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rayzero.dist.transport import Pairwise, Pending


@dataclass(frozen=True, slots=True)
class Promise:
    """A transfer that a worker has yet to make."""

    future: Future[None]

    def wait(self) -> None:
        """Return when it is made."""
        self.future.result()


class Late(Pairwise):
    """Each transfer returns at once; 1-3 ms later it reads its input and writes its output.

    One worker makes a rank's transfers one after another, so a buffer that is read, reused or
    freed before the wait is caught with wrong values in it.
    """

    def __init__(self, group: dist.ProcessGroup, worker: ThreadPoolExecutor) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(group, rank=rank, size=size)
        self._worker = worker
        self._delays = random.Random(rank)

    def all_gather(self, flat: torch.Tensor, label: str) -> Pending:
        return self._later(super().all_gather, flat, label)

    def reduce_scatter(self, flat: torch.Tensor, label: str, **options: Any) -> Pending:
        return self._later(super().reduce_scatter, flat, label, **options)

    def all_reduce(self, tensor: torch.Tensor, label: str, **options: Any) -> Pending:
        return self._later(super().all_reduce, tensor, label, **options)

    def broadcast(self, tensor: torch.Tensor, label: str) -> Pending:
        return self._later(super().broadcast, tensor, label)

    def _later(self, start: Callable[..., Pending], *args: Any, **options: Any) -> Pending:
        delay_s = self._delays.uniform(0.001, 0.003)

        def transfer() -> None:
            time.sleep(delay_s)
            start(*args, **options).wait()

        return Promise(self._worker.submit(transfer))
