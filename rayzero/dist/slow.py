"""A link with a latency, for experiments and tests on what overlap hides."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rayzero.dist.transport import Pairwise, Pending


@dataclass(frozen=True, slots=True)
class Distant:
    """A transfer whose result is not there before a moment to come."""

    pending: Pending
    arrival_s: float
    link: "Slow"

    def wait(self) -> None:
        """Return when the result has come, and note how much of the latency was left."""
        left_s = max(0.0, self.arrival_s - time.perf_counter())
        self.link.exposed_s += left_s
        time.sleep(left_s)
        self.pending.wait()


class Slow(Pairwise):
    """A link with a latency: each transfer takes latency_s at least, however many are under way.

    exposed_s: what waits have seen of it. Unlike a clock's time it does not depend on what else
    the machine does.
    """

    def __init__(self, group: dist.ProcessGroup, latency_s: float) -> None:
        super().__init__(group, rank=dist.get_rank(group), size=dist.get_world_size(group))
        self._latency_s = latency_s
        self.exposed_s = 0.0

    def all_gather(self, flat: torch.Tensor, label: str) -> Pending:
        """Gather, later."""
        return self._distant(super().all_gather, flat, label)

    def reduce_scatter(self, flat: torch.Tensor, label: str, **options: Any) -> Pending:
        """Reduce, later."""
        return self._distant(super().reduce_scatter, flat, label, **options)

    def all_reduce(self, tensor: torch.Tensor, label: str, **options: Any) -> Pending:
        """Reduce, later."""
        return self._distant(super().all_reduce, tensor, label, **options)

    def broadcast(self, tensor: torch.Tensor, label: str) -> Pending:
        """Copy, later."""
        return self._distant(super().broadcast, tensor, label)

    def _distant(self, start: Callable[..., Pending], *args: Any, **options: Any) -> Pending:
        pending = start(*args, **options)
        return Distant(pending, time.perf_counter() + self._latency_s, self)
