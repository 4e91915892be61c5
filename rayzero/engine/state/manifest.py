"""The small files of a checkpoint, which say what its large ones hold.

    manifest             what was saved: layout, named tensors and where they lie, settings
    rank-00000.bin       one rank's elements, packed without gaps or padding
    rank-00000.extra     what the caller added on that rank
    rank-00000.sums      sizes and checksums of these two, written after them

Manifest and sums are a line with their own checksum, then JSON. A checkpoint is whole if these and
all ranks' files are there and are as the sums say.
"""

import dataclasses
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rayzero.engine.state.blocks import Written
from rayzero.engine.state.contents import Counters, Group, Scalar
from rayzero.errors import CheckpointError, DamagedCheckpointError
from rayzero.layout.boxes import Sizes

VERSION = 1
NAME = "manifest"
HEAD = "rayzero checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a named tensor: in which rank's file, and from which byte on."""

    offsets: Sizes
    sizes: Sizes
    rank: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One named tensor; its chunks cover it without overlap."""

    dtype: str
    shape: Sizes
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return dtype_named(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that a checkpoint says about itself."""

    version: int
    stage: int
    mesh: dict[str, int]
    """Ranks per axis."""
    step: int
    """Of training, as the caller counts; else applied steps of the optimizer."""
    saved_unix_s: float
    optimizer: str
    """Name of the torch class."""
    loss_scale: dict[str, float]
    groups: tuple[Group, ...]
    counters: tuple[Counters, ...]
    tied: dict[str, str]
    """Further names of tied parameters, each with the one that is saved."""
    files: tuple[int, ...]
    """Bytes of each rank's packed file."""
    tensors: dict[str, Stored]

    def counters_by_name(self) -> dict[str, dict[str, Scalar]]:
        """Return the optimizer's numbers of each parameter."""
        return {name: counters.numbers for counters in self.counters for name in counters.names}

    @property
    def world(self) -> int:
        """Ranks that saved."""
        return len(self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """What one rank wrote."""

    packed: Written
    extra: Written


def packed_path(folder: Path, rank: int) -> Path:
    """Return where a rank's elements are."""
    return folder / f"rank-{rank:05d}.bin"


def extra_path(folder: Path, rank: int) -> Path:
    """Return where a rank's extra is."""
    return folder / f"rank-{rank:05d}.extra"


def sums_path(folder: Path, rank: int) -> Path:
    """Return where a rank's checksums are."""
    return folder / f"rank-{rank:05d}.sums"


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of this name, such as float32."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpointError(f"{name!r} is no dtype that this version of torch has")
    return dtype


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder."""
    tensors = {
        key: [s.dtype, s.shape, [[c.offsets, c.sizes, c.rank, c.start] for c in s.chunks]]
        for key, s in manifest.tensors.items()
    }
    plain = dataclasses.asdict(dataclasses.replace(manifest, tensors={}))
    _write(folder / NAME, {**plain, "tensors": tensors})


def write_sums(folder: Path, rank: int, files: RankFiles) -> None:
    """Write what says that a rank is done."""
    _write(sums_path(folder, rank), dataclasses.asdict(files))


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest; raise DamagedCheckpointError where it is not as it was written."""
    plain = _read(folder / NAME)
    if plain.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} has format {plain.get('version')}; this version of rayzero reads {VERSION}"
        )
    tensors = {key: _stored(value) for key, value in plain.pop("tensors").items()}
    groups = tuple(
        Group(names=tuple(g["names"]), settings=g["settings"]) for g in plain.pop("groups")
    )
    counters = tuple(
        Counters(
            names=tuple(c["names"]),
            numbers={key: Scalar(**scalar) for key, scalar in c["numbers"].items()},
        )
        for c in plain.pop("counters")
    )
    files = tuple(plain.pop("files"))
    return Manifest(tensors=tensors, groups=groups, counters=counters, files=files, **plain)


def read_sums(folder: Path, rank: int) -> RankFiles:
    """Read one rank's sizes and checksums."""
    plain = _read(sums_path(folder, rank))
    return RankFiles(packed=_written(plain["packed"]), extra=_written(plain["extra"]))


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _written(plain: dict[str, Any]) -> Written:
    return Written(num_bytes=plain["num_bytes"], crc32=tuple(plain["crc32"]))


def _stored(plain: list[Any]) -> Stored:
    dtype, shape, boxes = plain
    chunks = tuple(
        Chunk(offsets=tuple(offsets), sizes=tuple(sizes), rank=rank, start=start)
        for offsets, sizes, rank, start in boxes
    )
    return Stored(dtype=dtype, shape=tuple(shape), chunks=chunks)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write content under another name first: a file that is there is complete."""
    text = json.dumps(content).encode()
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(f"{HEAD} {zlib.crc32(text):08x}\n".encode() + text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        head, _, text = path.read_bytes().partition(b"\n")
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing: its checkpoint is not whole") from error
    if head != f"{HEAD} {zlib.crc32(text):08x}".encode():
        raise DamagedCheckpointError(f"{path} was changed after it was written, or cut short")
    content: dict[str, Any] = json.loads(text)
    return content
