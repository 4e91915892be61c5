"""Peak of live tensor storages during a call, by torch's MemTracker; the only file that uses it."""

from collections.abc import Callable, Iterable

import torch
from torch.distributed._tools.mem_tracker import MemTracker


def peak_of_storages(held: Iterable[torch.Tensor], call: Callable[[], object]) -> int:
    """Return the peak bytes of storages, those of `held` and all that the call makes."""
    tracker = MemTracker()
    tracker.track_external(*held)
    with tracker:
        call()
    peak = tracker.get_tracker_snapshot("peak")
    return int(sum(kinds["Total"] for kinds in peak.values()))
