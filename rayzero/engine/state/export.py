"""Weights for others, as safetensors: a plain module or Hugging Face loads them strictly.

Tensors are gathered flat by flat, so no rank ever holds the model; files fill up in the order of
the flats, and each is written by one rank. A tied parameter is written once, under the first of its
names, as Hugging Face does; the index lists its further names under metadata.tied.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rayzero.dist.dtypes import BY_NAME
from rayzero.engine.assembly import Assembly
from rayzero.engine.flats import Flat
from rayzero.engine.state.agreement import rank_of, together, world_of
from rayzero.engine.state.contents import aliases_of
from rayzero.engine.state.folders import SAVING, begin, beside, commit
from rayzero.engine.state.safetensors_door import (
    load_safetensors,
    open_safetensors,
    save_safetensors,
)
from rayzero.engine.state.source import (
    INDEX,
    SUFFIX,
    part_of,
    safetensors_in,
)
from rayzero.engine.whole import buffers_of, full_tensors
from rayzero.errors import CheckpointError
from rayzero.layout.boxes import boxes_of, whole_offsets, whole_shape, without_padding
from rayzero.layout.spec import ParamSpec, Span

FILE_BYTES = 1 << 30
"""A file ends before the tensor that would make it longer; one rank holds this much for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """One file: its name, the tensors in it and their bytes."""

    name: str
    tensors: tuple[str, ...]
    num_bytes: int


def write_export(parts: Assembly, folder: Path) -> None:
    """Write all weights and persistent buffers; raise CheckpointError where a rank could not."""
    comm = parts.comm

    def start() -> Path:
        return begin(folder, INDEX) if comm.is_first else beside(folder, SAVING)

    temporary = together(comm, start)
    files = plan_files(parts)
    error = _write_files(parts, temporary, files)

    def finish() -> None:
        if error is not None:
            raise CheckpointError(
                f"could not export {folder}: {error}; make room or name another folder"
            ) from error

    try:
        together(comm, finish)
        together(comm, lambda: _complete(parts, folder, files))
    except CheckpointError:
        if comm.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def plan_files(parts: Assembly) -> list[ExportFile]:
    """Share the tensors out among files, alike on all ranks."""
    sizes: dict[str, int] = {}
    for flat in parts.flats:
        itemsize = BY_NAME[flat.dtypes.params].itemsize
        for slot in flat.layout.slots:
            sizes[slot.spec.name] = math.prod(whole_shape(slot.spec)) * itemsize
    sizes |= {n: b.numel() * b.itemsize for n, b in buffers_of(parts.module).items()}
    groups: list[list[str]] = []
    filled = FILE_BYTES
    for name, size in sizes.items():
        if filled + size > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return [
        ExportFile(
            name=f"model-{i + 1:05d}-of-{len(groups):05d}{SUFFIX}",
            tensors=tuple(names),
            num_bytes=sum(sizes[name] for name in names),
        )
        for i, names in enumerate(groups)
    ]


def read_export(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return an export as module.load_state_dict(..., strict=True) takes it, with tied names."""
    state: dict[str, torch.Tensor] = {}
    for path in safetensors_in(Path(folder)):
        state |= load_safetensors(path)
    index = Path(folder) / INDEX
    if index.exists():
        tied = json.loads(index.read_text()).get("metadata", {}).get("tied", {})
        state |= {name: state[first] for name, first in tied.items()}
    return state


class ExportedValues:
    """The values of an export as ZeroEngine takes them: `initialize` for a module on meta.

    A rank reads the elements that it holds, so that a model is sharded without ever being whole.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._paths: dict[str, Path] = {}
        for path in safetensors_in(self._folder):
            with open_safetensors(path) as file:
                self._paths |= dict.fromkeys(file.keys(), path)

    def __call__(self, spec: ParamSpec, span: Span) -> torch.Tensor:
        """Return elements of the flattened block that spec describes."""
        if spec.name not in self._paths:
            raise CheckpointError(f"{self._folder} has no {spec.name}; it holds other weights")
        with open_safetensors(self._paths[spec.name]) as file:
            shape = tuple(file.get_slice(spec.name).get_shape())
            if shape != whole_shape(spec):
                raise CheckpointError(
                    f"{spec.name} has shape {list(shape)} in {self._folder}, here it has "
                    f"{list(whole_shape(spec))}"
                )
            boxes = [
                part_of(file, spec.name, whole_offsets(spec, box.offsets), box.sizes).reshape(-1)
                for box in boxes_of(spec.shape, without_padding(spec, span))
            ]
        padding = torch.zeros(span.elements - sum(box.numel() for box in boxes))
        return torch.cat([*boxes, padding.to(boxes[0].dtype)]) if boxes else padding


def _write_files(parts: Assembly, folder: Path, files: list[ExportFile]) -> Exception | None:
    """Gather with the others to the end, and write the own files; return what went wrong."""
    comm = parts.comm
    mine = {
        name: file
        for i, file in enumerate(files)
        for name in file.tensors
        if i % world_of(comm) == rank_of(comm)
    }
    held: dict[str, dict[str, torch.Tensor]] = {}
    error: Exception | None = None
    for name, tensor in _gathered(parts, mine):
        file = mine[name]
        of_file = held.setdefault(file.name, {})
        of_file[name] = tensor
        if len(of_file) == len(file.tensors):
            try:
                _save(held.pop(file.name), folder / file.name)
            except OSError as raised:
                error = error or raised
    return error


def _gathered(parts: Assembly, mine: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole tensors of the own files, in their order."""
    for flat in parts.flats:
        names = [slot.spec.name for slot in flat.layout.slots]
        keep = any(name in mine for name in names)
        whole = full_tensors([(flat, _held(flat))], parts.comm, keep=keep)
        yield from ((name, whole[name]) for name in names if name in mine)
    for name, buffer in buffers_of(parts.module).items():
        if name in mine:
            yield name, buffer.detach().cpu().clone()


def _held(flat: Flat) -> torch.Tensor:
    return flat.fetch() if flat.sharded else flat.whole


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_safetensors(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _complete(parts: Assembly, folder: Path, files: list[ExportFile]) -> None:
    """Write the index and name the folder, on the first rank."""
    if not parts.comm.is_first:
        return
    index = {
        "metadata": {
            "total_size": sum(file.num_bytes for file in files),
            "tied": aliases_of(parts.module),
        },
        "weight_map": {name: file.name for file in files for name in file.tensors},
    }
    path = beside(folder, SAVING) / INDEX
    with contextlib.closing(path.open("w")) as file:
        json.dump(index, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    commit(folder)
