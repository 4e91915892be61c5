"""Files of packed bytes with a checksum per block: any part can be read and trusted."""

import contextlib
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rayzero.errors import DamagedCheckpointError

BLOCK_BYTES = 1 << 20
"""A reader that wants less than a block reads all of it, to check it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a file holds: its length, and a CRC-32 for each block."""

    num_bytes: int
    crc32: tuple[int, ...]


def write_blocks(path: Path, views: Iterable[memoryview]) -> Written:
    """Write bytes one after another and bring them to the disk."""
    return BlockWriter(path).finish(views)


class BlockWriter:
    """A file under way: first what is copied at once, then, maybe in a thread, the rest."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")

    def copy(self, views: Iterable[memoryview]) -> None:
        """Write bytes and do nothing else: `finish` reads them back for their sums."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._file.close)
            for view in views:
                self._file.write(view)
            self._file.flush()
            on_error.pop_all()

    def finish(self, views: Iterable[memoryview]) -> Written:
        """Write bytes after those copied, bring all to the disk and close the file."""
        sums = Sums()
        with self._file as file:
            for start in range(0, file.tell(), BLOCK_BYTES):
                sums.add(memoryview(os.pread(file.fileno(), BLOCK_BYTES, start)))
            for view in views:
                file.write(view)
                sums.add(view)
            file.flush()
            os.fsync(file.fileno())
        return Written(num_bytes=sums.num_bytes, crc32=tuple(sums.crc32))


class Sums:
    """A CRC-32 for each block of bytes that come one after another."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.crc32: list[int] = []

    def add(self, view: memoryview) -> None:
        """Go on with these bytes."""
        for piece in _at_borders(view, self.num_bytes % BLOCK_BYTES):
            if self.num_bytes % BLOCK_BYTES == 0:
                self.crc32.append(0)
            self.crc32[-1] = zlib.crc32(piece, self.crc32[-1])
            self.num_bytes += len(piece)


def _at_borders(view: memoryview, filled: int) -> Iterable[memoryview]:
    """Cut bytes that follow `filled` others of a block at the borders of blocks."""
    start = 0
    while start < len(view):
        stop = min(len(view), start + BLOCK_BYTES - filled)
        yield view[start:stop]
        start, filled = stop, 0


class BlockReader:
    """Reads any part of a file; each block that it touches is checked against its sum."""

    def __init__(self, path: Path, written: Written) -> None:
        self._path = path
        self._written = written
        self._kept = (-1, b"")
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, start: int, num_bytes: int) -> bytearray:
        """Return bytes of the file; raise DamagedCheckpointError where they are not as written."""
        wanted = bytearray(num_bytes)
        view = memoryview(wanted)
        at = start
        while at < start + num_bytes:
            index, skipped = divmod(at, BLOCK_BYTES)
            length = min(self._length(index) - skipped, start + num_bytes - at)
            if length <= 0:
                raise self._damaged(index, f"ends before byte {start + num_bytes}")
            target = view[at - start : at - start + length]
            if length == self._length(index):
                self._check(index, os.preadv(self._file, [target], at), target)
            else:
                target[:] = self._block(index)[skipped : skipped + length]
            at += length
        return wanted

    def check(self) -> None:
        """Read all of the file; raise DamagedCheckpointError at the first block that is wrong."""
        for index in range(len(self._written.crc32)):
            self._block(index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def _block(self, index: int) -> bytes:
        """Return a block, the last one from memory: neighbours in the file are asked in order."""
        if self._kept[0] != index:
            block = os.pread(self._file, self._length(index), index * BLOCK_BYTES)
            self._check(index, len(block), block)
            self._kept = (index, block)
        return self._kept[1]

    def _length(self, index: int) -> int:
        return min(BLOCK_BYTES, self._written.num_bytes - index * BLOCK_BYTES)

    def _check(self, index: int, num_read: int, block: bytes | memoryview) -> None:
        if num_read != self._length(index):
            raise self._damaged(index, "is cut short")
        if zlib.crc32(block) != self._written.crc32[index]:
            raise self._damaged(index, "was changed after it was written (its checksum differs)")

    def _damaged(self, index: int, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self._path} {what}, at byte {index * BLOCK_BYTES} or after; load another checkpoint"
        )
