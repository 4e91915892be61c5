"""Folders of checkpoints: begun under another name, renamed when whole, found by their content."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rayzero.engine.state.blocks import BlockReader, Written
from rayzero.engine.state.manifest import (
    NAME,
    Manifest,
    extra_path,
    packed_path,
    read_manifest,
    read_sums,
    sync_folder,
)
from rayzero.errors import CheckpointError, DamagedCheckpointError

SAVING, REPLACED, REMOVING = ".saving", ".replaced", ".removing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint in a folder of them; damage is empty where its files are all there."""

    path: Path
    manifest: Manifest | None
    damage: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether all files are there with the right sizes; their bytes are checked when read."""
        return not self.damage

    @property
    def is_interrupted(self) -> bool:
        """Whether a save came to no end here."""
        return not self.is_whole and self.path.suffix == SAVING

    @property
    def age(self) -> tuple[int, float]:
        """What orders checkpoints: training step, then time."""
        assert self.manifest is not None, "only whole checkpoints have an age"
        return self.manifest.step, self.manifest.saved_unix_s


def beside(folder: Path, suffix: str) -> Path:
    """Return the neighbour of a checkpoint with a suffix to its name."""
    return folder.with_name(folder.name + suffix)


def begin(folder: Path, marker: str = NAME) -> Path:
    """Make the empty folder that becomes `folder` when it is whole.

    What an interrupted save left there is removed. Raise CheckpointError where `folder` holds
    anything but a checkpoint (told by its marker file), which a save would replace.
    """
    if folder.exists() and (not folder.is_dir() or _holds_other_things(folder, marker)):
        raise CheckpointError(
            f"{folder} exists and is no checkpoint; a save would replace it: name another folder"
        )
    temporary = beside(folder, SAVING)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def commit(folder: Path) -> None:
    """Give a complete folder its name, and only then remove what had it before."""
    temporary, replaced = beside(folder, SAVING), beside(folder, REPLACED)
    sync_folder(temporary)
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def standing(folder: Path) -> Path:
    """Return the folder, or the one that a save was about to replace when it was interrupted."""
    replaced = beside(folder, REPLACED)
    if folder.exists():
        return folder
    if replaced.exists():
        return replaced
    raise CheckpointError(f"there is no checkpoint {folder}")


def check(folder: Path) -> Manifest:
    """Return the manifest of a whole checkpoint; DamagedCheckpointError names what is wrong."""
    manifest = read_manifest(folder)
    for rank, num_bytes in enumerate(manifest.files):
        sums = read_sums(folder, rank)
        if sums.packed.num_bytes != num_bytes:
            raise DamagedCheckpointError(
                f"{packed_path(folder, rank)} is of another save than its manifest"
            )
        _check_size(packed_path(folder, rank), sums.packed)
        _check_size(extra_path(folder, rank), sums.extra)
    return manifest


def verify(folder: Path) -> Manifest:
    """Check, and read every byte against its checksum."""
    manifest = check(folder)
    for rank in range(manifest.world):
        sums = read_sums(folder, rank)
        for path, written in (
            (packed_path(folder, rank), sums.packed),
            (extra_path(folder, rank), sums.extra),
        ):
            with BlockReader(path, written) as file:
                file.check()
    return manifest


def scan(folder: Path) -> list[Found]:
    """List the checkpoints in a folder: whole ones, newest first, then damaged ones by name."""
    if not folder.is_dir():
        return []
    found = [_look(path) for path in sorted(folder.iterdir()) if (path / NAME).exists()]
    whole = [one for one in found if one.is_whole]
    return sorted(whole, key=lambda one: one.age, reverse=True) + [
        one for one in found if not one.is_whole
    ]


def latest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in a folder of them."""
    return next((one.path for one in scan(folder) if one.is_whole), None)


def prune(folder: Path, keep: int) -> None:
    """Remove whole checkpoints but the newest `keep`, and what interrupted saves and removals left.

    No save may be under way in the folder. Damaged ones are left for their owner to look at.
    """
    whole = [one.path for one in scan(folder) if one.is_whole and one.path.suffix != REMOVING]
    for path in whole[keep:]:
        path.rename(beside(path, REMOVING))
    left = [path for path in folder.glob(f"*{SAVING}") if path not in whole]
    for path in (*left, *folder.glob(f"*{REMOVING}")):
        shutil.rmtree(path, ignore_errors=True)


def _look(path: Path) -> Found:
    try:
        return Found(path=path, manifest=check(path))
    except (CheckpointError, OSError) as error:
        return Found(path=path, manifest=None, damage=str(error))


def _check_size(path: Path, written: Written) -> None:
    if not path.exists():
        raise DamagedCheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != written.num_bytes:
        raise DamagedCheckpointError(
            f"{path} has {size} bytes, {written.num_bytes} were written; load another checkpoint"
        )


def _holds_other_things(folder: Path, marker: str) -> bool:
    return any(folder.iterdir()) and not (folder / marker).exists()
