"""What is loaded from: a checkpoint of ours, or safetensors files of anybody's; read alike."""

import itertools
import json
import pickle
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from rayzero.engine.state.blocks import BlockReader
from rayzero.engine.state.contents import WEIGHTS, key_of
from rayzero.engine.state.extra import unpack_extra
from rayzero.engine.state.folders import check, standing
from rayzero.engine.state.manifest import NAME, Chunk, Manifest, Stored, extra_path, read_sums
from rayzero.engine.state.reading import PackedReader, Reader, metadata_of
from rayzero.engine.state.safetensors_door import open_safetensors
from rayzero.errors import CheckpointError, DamagedCheckpointError

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of dtypes in safetensors, and in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Named tensors with their places, and how to read them."""

    folder: Path
    tensors: dict[str, Stored]
    reader: Reader
    manifest: Manifest | None
    """What stands beside the tensors; None where there are only weights."""

    def extra(self, rank: int) -> Any:
        """Return what the caller had added on this rank; None where it added nothing."""
        if self.manifest is None:
            return None
        saved_by = rank % self.manifest.world
        path, written = extra_path(self.folder, saved_by), read_sums(self.folder, saved_by).extra
        with BlockReader(path, written) as file:
            raw = bytes(file.read(0, written.num_bytes))
        try:
            return unpack_extra(raw)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path} holds more than plain values: {error}") from error


def open_source(folder: Path) -> Source:
    """Read the small files; raise CheckpointError where there is nothing whole."""
    if folder.suffix == SUFFIX or (folder / INDEX).exists() or any(folder.glob(f"*{SUFFIX}")):
        reader = SafetensorsReader(folder)
        return Source(folder=folder, tensors=reader.tensors, reader=reader, manifest=None)
    folder = standing(folder)
    if folder.is_dir() and not (folder / NAME).exists():
        raise CheckpointError(
            f"{folder} is no checkpoint: it has neither {NAME} nor files *{SUFFIX}"
        )
    manifest = check(folder)
    return Source(
        folder=folder,
        tensors=manifest.tensors,
        reader=PackedReader(folder, manifest),
        manifest=manifest,
    )


class SafetensorsReader:
    """Reads parts of tensors in safetensors files, named as the module names them."""

    def __init__(self, folder: Path) -> None:
        self._files = safetensors_in(folder)
        self.tensors: dict[str, Stored] = {}
        self._paths: dict[str, Path] = {}
        for path in self._files:
            self._list(path)
        self.metadata = metadata_of(self.tensors)

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read what is planned, file by file."""
        by_path: dict[Path, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_path[self._paths[item.storage_index.fqn]].append(item)
        for path, items in by_path.items():
            with open_safetensors(path) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    name = item.storage_index.fqn.removeprefix(f"{WEIGHTS}/")
                    target.copy_(part_of(file, name, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)

    def _list(self, path: Path) -> None:
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                found = file.get_slice(name)
                shape, dtype = tuple(found.get_shape()), found.get_dtype()
                if dtype not in DTYPES:
                    raise CheckpointError(f"{name} in {path} has dtype {dtype}, which is not read")
                whole = Chunk(offsets=(0,) * len(shape), sizes=shape, rank=0, start=0)
                key = key_of(WEIGHTS, name)
                self.tensors[key] = Stored(dtype=DTYPES[dtype], shape=shape, chunks=(whole,))
                self._paths[key] = path


def safetensors_in(folder: Path) -> list[Path]:
    """List the files that an index names, else all there are."""
    if folder.suffix == SUFFIX:
        return [folder]
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob(f"*{SUFFIX}"))
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise DamagedCheckpointError(f"{index} names files outside its folder: {outside}")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise DamagedCheckpointError(f"{index} names files that are missing: {missing}")
    return [folder / name for name in names]


def part_of(file: Any, name: str, offsets: Any, lengths: Any) -> torch.Tensor:
    """Read a box of a tensor from an open file."""
    if not len(lengths):
        return torch.as_tensor(file.get_tensor(name))
    places = tuple(slice(o, o + n) for o, n in itertools.zip_longest(offsets, lengths))
    return torch.as_tensor(file.get_slice(name)[places])
