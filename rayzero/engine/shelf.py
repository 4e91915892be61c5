"""Tensors in plain files: reserved at once, moved by one worker in order, gone at the end.

A touched memory map counts as resident memory, so bytes go through read and write calls into
staging buffers. Space is reserved when a file is made: a full disk is an error before training.
"""

import ctypes
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from rayzero.errors import OffloadError

Move = Callable[[int, list[memoryview], int], int]
"""os.preadv or os.pwritev: handle, buffers, offset; returns bytes moved."""


class Shelf:
    """The files of one rank, in a folder of their own below `folder`."""

    def __init__(self, folder: str) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="rayzero-offload-", dir=folder))
        except OSError as error:
            raise OffloadError(
                f"offload.folder={folder} cannot be written: {error.strerror}; name another folder"
            ) from error
        self._files: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rayzero-shelf")
        self._cleanup = weakref.finalize(self, _remove, self._folder, self._files, self._worker)

    def reserve(self, name: str, num_bytes: int) -> None:
        """Make a file of this size; raise OffloadError where the disk has no room for it."""
        self._sizes[name] = num_bytes
        try:
            handle = self._files[name] = os.open(self._folder / name, os.O_RDWR | os.O_CREAT)
            if num_bytes:
                os.posix_fallocate(handle, 0, num_bytes)
        except OSError as error:
            free = shutil.disk_usage(self._folder).free
            raise OffloadError(
                f"offload.folder={self._folder.parent} has no room: {num_bytes} bytes were asked "
                f"for after {sum(self._sizes.values()) - num_bytes}, {free} are free "
                f"({error.strerror}); name a folder with more room, or lower offload.fraction"
            ) from error

    def read(self, name: str, into: torch.Tensor) -> "Future[None]":
        """Fill a tensor from its file, after everything asked for earlier."""
        return self._submit(os.preadv, name, into)

    def write(self, name: str, values: torch.Tensor) -> "Future[None]":
        """Write a tensor to its file, after everything asked for earlier."""
        return self._submit(os.pwritev, name, values)

    def close(self) -> None:
        """Remove the files."""
        self._cleanup()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return dict(self._sizes)

    def _submit(self, call: Move, name: str, tensor: torch.Tensor) -> "Future[None]":
        if not self._cleanup.alive:
            raise OffloadError(
                f"{self._folder / name} was removed when the engine was closed; read weights and "
                "save before engine.close()"
            )
        return self._worker.submit(self._move, call, name, tensor)

    def _move(self, call: Move, name: str, tensor: torch.Tensor) -> None:
        done = 0
        for piece in _pieces(tensor):
            try:
                moved = call(self._files[name], [piece], done)
            except OSError as error:
                raise OffloadError(f"{self._folder / name}: {error.strerror} at {done}") from error
            if moved != piece.nbytes:
                raise OffloadError(
                    f"{self._folder / name}: {moved} of {piece.nbytes} bytes were moved at "
                    f"{done}; is the disk of offload.folder in order?"
                )
            done += moved


class SizesShelf:
    """A shelf without files, for tensors without values: it keeps their sizes."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def reserve(self, name: str, num_bytes: int) -> None:
        """Remember the size."""
        self.sizes[name] = num_bytes

    def read(self, name: str, into: torch.Tensor) -> "Future[None]":
        """Leave the tensor as it is."""
        return _done()

    def write(self, name: str, values: torch.Tensor) -> "Future[None]":
        """Drop the values, of which there are none."""
        return _done()

    def close(self) -> None:
        """There are no files."""


AnyShelf = Shelf | SizesShelf


@dataclass(slots=True)
class ReadAhead:
    """The read under way into a buffer that files share; name: of the file."""

    name: str = ""
    done: "Future[None] | None" = None

    def end(self) -> str:
        """Wait for it, whatever comes of it; return the name."""
        done, self.done = self.done, None
        if done is not None:
            wait([done])
            return self.name if done.exception() is None else ""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """A file, and the buffer in memory that it is read into and written from.

    Files share buffers, and the read ahead into each. Who writes into one must `end` that before.
    """

    shelf: AnyShelf
    name: str
    buffer: torch.Tensor
    ahead: ReadAhead

    def read_ahead(self) -> None:
        """Begin to read, into a buffer that nobody needs before the next `fetch`."""
        if self.ahead.done is None:
            self.ahead.name = self.name
            self.ahead.done = self.shelf.read(self.name, self.buffer)

    def fetch(self) -> None:
        """Read the file into the buffer, unless that has been done ahead."""
        if self.ahead.end() != self.name:
            self.shelf.read(self.name, self.buffer).result()

    def store(self) -> None:
        """Write the buffer to the file."""
        self.shelf.write(self.name, self.buffer).result()


PIECE_BYTES = 1 << 28


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host; they live as long as the view."""
    assert tensor.device.type == "cpu", f"a tensor on {tensor.device} has no memory here"
    assert tensor.is_contiguous(), "its memory is not one run"
    num_bytes = tensor.numel() * tensor.itemsize
    owner = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    owner.tensor = tensor  # type: ignore[attr-defined] # the view keeps its owner
    return memoryview(owner)


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    raw = memory_of(tensor)
    for start in range(0, raw.nbytes, PIECE_BYTES):
        yield raw[start : start + PIECE_BYTES]


def _remove(folder: Path, files: dict[str, int], worker: ThreadPoolExecutor) -> None:
    worker.shutdown(wait=True)
    for handle in files.values():
        os.close(handle)
    files.clear()
    shutil.rmtree(folder, ignore_errors=True)
