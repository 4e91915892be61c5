"""One save on one rank: bytes go to the disk now or in a thread; it is valid when all are there.

[Note: how ranks finish together]
Each rank writes its files and then its sums. Rank 0's thread waits until all sums are there and
renames the folder; so a save is valid soon after the slowest rank is done, without a collective in
any thread. `wait` is the meeting of all ranks: who failed is known, and what is half is removed.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rayzero.dist.comm import Communicator
from rayzero.engine.shelf import memory_of
from rayzero.engine.state.agreement import rank_of, said, told, world_of
from rayzero.engine.state.blocks import BlockWriter, write_blocks
from rayzero.engine.state.folders import SAVING, beside, commit
from rayzero.engine.state.manifest import (
    Manifest,
    RankFiles,
    extra_path,
    packed_path,
    sums_path,
    write_manifest,
    write_sums,
)
from rayzero.errors import CheckpointError

LOOK_S = 0.05
PATIENCE_S = 120.0
"""Rank 0 stops looking for the others' sums after this long; `wait` then decides."""

FAILED = ".failed"
"""Ends the name of the mark that a rank leaves which could not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What a rank writes: `at_once` before `save` returns, `views` after it and maybe later."""

    at_once: Iterable[memoryview]
    views: Iterable[memoryview]
    num_bytes: int
    extra: bytes
    manifest: Manifest | None
    """On one rank."""


class Save:
    """A save under way. See [Note: how ranks finish together].

    staging: where the thread's copy is listed; emptied when it is written.
    """

    def __init__(self, folder: Path, comm: Communicator, staging: list[torch.Tensor]) -> None:
        self._folder = folder
        self._staging = staging
        self._comm = comm
        self._rank, self._world = rank_of(comm), world_of(comm)
        self._is_first = comm.is_first
        self._error: Exception | None = None
        self._num_bytes = 0
        self._thread: threading.Thread | None = None
        self._written = threading.Event()
        self._leave = threading.Event()
        self._is_named = False
        self._is_settled = False

    def write(self, payload: Payload) -> None:
        """Write this rank's files; an error is kept for `wait`."""
        self._finish(payload, self._copy(payload))

    def start(self, payload: Payload) -> None:
        """Write what cannot wait, and the rest in a thread."""
        packed = self._copy(payload)
        self._thread = threading.Thread(target=self._run, args=(payload, packed), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the checkpoint is whole; all ranks must call it.

        Raise CheckpointError on all ranks where one could not write; the engine and earlier
        checkpoints are as they were.
        """
        if self._is_settled:
            return
        self._written.wait()
        failures = told(self._comm, _code(self._error), self._num_bytes)
        self._leave.set()
        self._join()
        if self._is_first and not any(code for code, _ in failures):
            self._name()
        named = told(self._comm, _code(self._error))
        self._is_settled = True
        if any(code for code, _ in failures) or any(code for (code,) in named):
            if self._is_first:
                shutil.rmtree(beside(self._folder, SAVING), ignore_errors=True)
            texts = said(self._comm, str(self._error or ""))
            raise self._failure(failures, texts) from self._error

    def close(self) -> None:
        """Let the thread end by itself; no other rank is asked, as some may be gone."""
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._staging.clear()

    def _copy(self, payload: Payload) -> BlockWriter | None:
        """Begin this rank's files; None where that failed."""
        temporary = beside(self._folder, SAVING)
        self._num_bytes = payload.num_bytes
        with self._keeping_error():
            if payload.manifest is not None:
                write_manifest(temporary, payload.manifest)
            packed = BlockWriter(packed_path(temporary, self._rank))
            packed.copy(payload.at_once)
            return packed
        return None

    def _finish(self, payload: Payload, packed: BlockWriter | None) -> None:
        temporary = beside(self._folder, SAVING)
        with self._keeping_error():
            if packed is not None:
                written = packed.finish(payload.views)
                extra = write_blocks(extra_path(temporary, self._rank), [memoryview(payload.extra)])
                write_sums(temporary, self._rank, RankFiles(packed=written, extra=extra))
        self._written.set()

    @contextlib.contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = error
            with contextlib.suppress(OSError):
                mark = f"rank-{self._rank:05d}{FAILED}"
                (beside(self._folder, SAVING) / mark).touch()

    def _run(self, payload: Payload, packed: BlockWriter | None) -> None:
        self._finish(payload, packed)
        temporary = beside(self._folder, SAVING)
        end = time.monotonic() + PATIENCE_S
        while self._is_first and not self._leave.is_set() and time.monotonic() < end:
            if all(sums_path(temporary, rank).exists() for rank in range(self._world)):
                self._name()
                return
            if any(temporary.glob(f"*{FAILED}")):
                return
            self._leave.wait(LOOK_S)

    def _name(self) -> None:
        """Rename the complete folder, once."""
        if self._is_named:
            return
        try:
            commit(self._folder)
            self._is_named = True
        except OSError as error:
            self._error = error

    def _failure(
        self, failures: Sequence[Sequence[float]], texts: Sequence[str]
    ) -> CheckpointError:
        failed = [rank for rank, text in enumerate(texts) if text]
        needed = sum(num_bytes for _, num_bytes in failures)
        return CheckpointError(
            f"could not save {self._folder} ({needed / 1e6:.3g} MB) on ranks {failed}: "
            f"{texts[failed[0]]}. Training can go on, and earlier checkpoints stand; make room or "
            "name another folder"
        )


def views_of(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of tensors, one at a time on the host."""
    for tensor in tensors:
        yield memory_of(as_bytes(tensor).cpu())


def stage(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into one host buffer of just their size."""
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    start = 0
    for tensor in tensors:
        flat = as_bytes(tensor)
        buffer[start : start + flat.numel()].copy_(flat, non_blocking=True)
        start += flat.numel()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return buffer


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as its bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _code(error: Exception | None) -> float:
    return float(error is not None)
