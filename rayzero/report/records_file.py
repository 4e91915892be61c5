"""A cell's record as a JSON file: exact in both directions, so that a sweep can go on from it."""

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from rayzero.errors import RecordError
from rayzero.records import CellRecord
from rayzero.report.files import replace_file

CELLS_FOLDER = "cells"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """The records of a folder by cell name, and the files that could not be read."""

    records: dict[str, CellRecord]
    damaged: tuple[str, ...]
    """A sentence each: file and what is wrong with it. Such a cell counts as not run."""


def record_path(folder: Path, cell: str) -> Path:
    """Name a cell's file; a name unfit for a file carries its hash."""
    clean = re.sub(r"[^\w.=+-]", "_", cell, flags=re.ASCII)[:120]
    if clean != cell or clean.startswith("."):
        clean = f"{clean.lstrip('.')}-{hashlib.sha256(cell.encode()).hexdigest()[:12]}"
    return folder / CELLS_FOLDER / f"{clean}.json"


def write_record(record: CellRecord, folder: Path) -> Path:
    """Write a record under the sweep's folder."""
    text = json.dumps(_encode(record), allow_nan=False, indent=1)
    return replace_file(record_path(folder, record.row.cell), text.encode())


def read_record(path: Path) -> CellRecord:
    """Read a record equal to the one written; raise RecordError that names the file."""
    try:
        record = _decode(CellRecord, json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordError(f"{path} is not a cell's record: {error}") from error
    return typing.cast(CellRecord, record)


def read_records(folder: Path) -> ReadBack:
    """Read all records under the sweep's folder; damaged files are named and left out."""
    records, damaged = {}, []
    for path in sorted((folder / CELLS_FOLDER).glob("*.json")):
        try:
            record = read_record(path)
        except RecordError as error:
            damaged.append(str(error))
        else:
            records[record.row.cell] = record
    return ReadBack(records=records, damaged=tuple(damaged))


def _encode(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _encode(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has no word for it; float() reads it back
    return value


def _decode(hint: typing.Any, value: typing.Any) -> object:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (hint,) = (inner for inner in typing.get_args(hint) if inner is not type(None))
        return _decode(hint, value)
    if dataclasses.is_dataclass(hint):
        return _decode_record(typing.cast(type, hint), value)
    if origin is tuple:
        item, _ = typing.get_args(hint)
        return tuple(_decode(item, inner) for inner in value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is float:
        return float(value)
    if isinstance(hint, type) and type(value) is not hint:
        raise TypeError(f"{value!r} is not {hint.__name__}")
    return value


def _decode_record(kind: type, value: Mapping[str, object]) -> object:
    hints = typing.get_type_hints(kind)
    return kind(**{key: _decode(hints[key], inner) for key, inner in value.items()})
