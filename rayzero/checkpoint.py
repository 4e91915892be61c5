"""The verb checkpoint: what is in a checkpoint, or in a folder of them, and whether it is whole."""

import math
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from rayzero.config.cell import CellConfig
from rayzero.config.run import RESTORE_WORDS
from rayzero.engine.state.contents import WEIGHTS, kind_in, name_in
from rayzero.engine.state.folders import scan, verify
from rayzero.engine.state.manifest import NAME, Manifest, Stored
from rayzero.engine.state.source import open_source
from rayzero.errors import CheckpointError, ConfigError, DamagedCheckpointError

MB = 1e6


def main(config: CellConfig) -> int:
    """Print tables; return 0 if all that was asked for is whole."""
    path = _asked_path(config)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}")
    console = Console()
    if (path / NAME).exists():
        return _show_one(path, console)
    if scan(path):
        return _show_folder(path, console)
    source = open_source(path)
    console.print(f"{path}: weights as safetensors")
    console.print(_tensors(source.tensors))
    return 0


def _asked_path(config: CellConfig) -> Path:
    if config.run.restore not in RESTORE_WORDS:
        return Path(config.run.restore)
    if config.run.checkpoint_folder is None:
        raise ConfigError("name a checkpoint, or a folder of them: rayzero checkpoint PATH")
    return Path(config.run.checkpoint_folder)


def _show_one(path: Path, console: Console) -> int:
    """Check every byte against its sum and list what is inside."""
    try:
        manifest = verify(path)
    except DamagedCheckpointError as error:
        console.print(f"{path} is DAMAGED: {error}")
        return 1
    console.print(f"{path} is whole: {_about(manifest)}")
    console.print(_tensors(manifest.tensors))
    return 0


def _show_folder(path: Path, console: Console) -> int:
    """List the checkpoints in a folder, by their small files alone."""
    found = scan(path)
    saved_at = Column("saved", no_wrap=True)
    table = Table("checkpoint", saved_at, "step", "layout", "MB", "", title=str(path))
    for one in found:
        if one.manifest is None:
            table.add_row(one.path.name, "", "", "", "", f"DAMAGED: {one.damage}")
            continue
        saved = datetime.fromtimestamp(one.manifest.saved_unix_s).strftime("%m-%d %H:%M:%S")
        size = f"{sum(one.manifest.files) / MB:.2f}"
        step = str(one.manifest.step)
        table.add_row(one.path.name, saved, step, _layout(one.manifest), size, "whole")
    console.print(table)
    return 0 if all(one.is_whole for one in found) else 1


def _about(manifest: Manifest) -> str:
    tied = "".join(f", {alias} tied to {name}" for alias, name in manifest.tied.items())
    return (
        f"step {manifest.step}, saved by {_layout(manifest)}, {manifest.optimizer}, "
        f"{len(manifest.tensors)} tensors, {sum(manifest.files) / MB:.2f} MB in "
        f"{manifest.world} files{tied}"
    )


def _layout(manifest: Manifest) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in manifest.mesh.items() if size > 1)
    return f"stage {manifest.stage} on {manifest.world} ranks" + (f" ({axes})" if axes else "")


def _tensors(tensors: dict[str, Stored]) -> Table:
    """List each name once, with the dtypes of what is kept of it."""
    kept: dict[str, dict[str, Stored]] = defaultdict(dict)
    for key, stored in tensors.items():
        kept[name_in(key)][kind_in(key)] = stored
    others = sorted({kind for kinds in kept.values() for kind in kinds if kind != WEIGHTS})
    names = Column("name", overflow="fold")
    table = Table(names, "shape", WEIGHTS, *others, Column("bytes", justify="right"))
    for name in sorted(kept):
        kinds = kept[name]
        shape = next(iter(kinds.values())).shape
        dtypes = [kinds[kind].dtype if kind in kinds else "" for kind in (WEIGHTS, *others)]
        size = sum(_bytes(stored) for stored in kinds.values())
        table.add_row(name, " x ".join(map(str, shape)) or "scalar", *dtypes, f"{size:,}")
    table.add_section()
    total = sum(map(_bytes, tensors.values()))
    table.add_row(f"{len(kept)} names", "", *_totals((WEIGHTS, *others), tensors), f"{total:,}")
    return table


def _totals(kinds: Iterable[str], tensors: dict[str, Stored]) -> list[str]:
    return [
        f"{sum(_bytes(s) for key, s in tensors.items() if kind_in(key) == kind):,}"
        for kind in kinds
    ]


def _bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * stored.torch_dtype.itemsize
