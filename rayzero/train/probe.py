"""Peaks of memory: of tensors in one probed step, and of the process' resident set."""

import contextlib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from rayzero.dist.memory_trace import peak_of_storages

CLEAR_PEAK = "5"


def peak_bytes(
    device: torch.device, held: Iterable[torch.Tensor], step: Callable[[], object]
) -> int | None:
    """Run one step and return the peak of tensor bytes in it.

    On CUDA the allocator's peak; on CPU, where torch keeps no statistics, every storage counted as
    it comes and goes. None where torch cannot trace the step.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    with warnings.catch_warnings(), contextlib.suppress(NotImplementedError):
        # torch's tracker does not follow a module that runs twice in a step (accumulation).
        warnings.simplefilter("ignore")
        return peak_of_storages(held, step)
    return None


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
