"""Peaks of memory: of tensors in one probed step, and of the process' resident set."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from rayzero.dist.storage_trace import StorageTrace

CLEAR_PEAK = "5"


def peak_bytes(
    device: torch.device, held: Iterable[torch.Tensor], step: Callable[[], object]
) -> int:
    """Run one step and return the peak of tensor bytes in it.

    On CUDA the allocator's peak; on CPU, where torch keeps no statistics, every storage counted as
    it comes and goes: those of `held` and all that the step makes.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    with StorageTrace(held, lambda: None) as trace:
        step()
    return trace.peak_bytes


def reset_host_peak() -> None:
    """Forget the process' peak resident set, so that a cell's is its own."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)


def host_peak_bytes() -> int | None:
    """Return the process' peak resident set since the reset; None where /proc does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
