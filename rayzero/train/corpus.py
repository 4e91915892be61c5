"""The bytes a text model learns: Python's own sources or any files, with a part held out."""

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rayzero.config.data import DataConfig
from rayzero.errors import DataError

Bytes = npt.NDArray[np.uint8]

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
"""Folders of the standard library's path that differ from one machine's Python to another's."""
BLOCK_BYTES = 1 << 14
MAX_BYTES = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Text as bytes; no byte of held_out is in train."""

    train: Bytes
    held_out: Bytes


def load_corpus(config: DataConfig) -> Corpus:
    """Read the text; raise DataError where data.path is missing, empty, too short or too long."""
    files = list(_standard_library() if config.path is None else _files(config.path))
    text = _read(config, files)
    return _split(config, text, num_files=len(files))


def _standard_library() -> Iterator[Path]:
    top = Path(sysconfig.get_path("stdlib"))
    return (f for f in _walk(top, LEFT_OUT) if f.suffix == ".py")


def _files(path: str) -> Iterator[Path]:
    for found in sorted(glob.glob(os.path.expanduser(path), recursive=True)):
        top = Path(found)
        yield from _walk(top, set()) if top.is_dir() else [top]


def _walk(top: Path, left_out: set[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(set(folders) - left_out)
        yield from (Path(folder, name) for name in sorted(names))


def _read(config: DataConfig, files: list[Path]) -> Bytes:
    """Join the readable files' bytes."""
    total = sum(f.stat().st_size for f in files if f.is_file())
    if total > MAX_BYTES:
        raise DataError(
            f"{_where(config)} holds {total} bytes; allowed: {MAX_BYTES}, as each rank keeps the "
            "text in memory. Name fewer files, or set data.factory to a reader of your own"
        )
    pieces = [
        np.fromfile(f, dtype=np.uint8) for f in files if os.access(f, os.R_OK) and f.is_file()
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)


def _split(config: DataConfig, text: Bytes, *, num_files: int) -> Corpus:
    """Hold out every k-th block, so that both parts are of the same kind of text."""
    needed = config.seq_len + 1
    block = max(needed, min(BLOCK_BYTES, int(len(text) * config.held_out)))
    index = np.arange(len(text) // block + 1)
    is_held = np.floor((index + 1) * config.held_out) > np.floor(index * config.held_out)
    mask = np.repeat(is_held, block)[: len(text)]
    corpus = Corpus(train=text[~mask], held_out=text[mask])
    if min(len(corpus.train), len(corpus.held_out)) < needed:
        raise DataError(
            f"{_where(config)} gives {len(text)} bytes in {num_files} files: "
            f"{len(corpus.train)} to train on and {len(corpus.held_out)} held out "
            f"(data.held_out={config.held_out}), but each part needs data.seq_len + 1 = {needed}. "
            "Set data.path to a folder or glob with more text, or a smaller data.seq_len"
        )
    return corpus


def _where(config: DataConfig) -> str:
    return f"data.path={'null (the standard library)' if config.path is None else config.path}"
