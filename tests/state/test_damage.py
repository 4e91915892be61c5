"""A checkpoint cut short, changed or half-written is refused by name; the newest whole is found."""

import io
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rayzero.engine.state import folders, manifest
from rayzero.engine.state.blocks import BLOCK_BYTES, BlockReader, write_blocks
from rayzero.engine.state.folders import check, latest, prune, scan, verify
from rayzero.errors import CheckpointError, DamagedCheckpointError
from tests.ranks import Pools, RankContext
from tests.state.cases import Layout, differences, named_state, train, transformer_engine

LAYOUT = Layout(3, 2)


def save_steps(ctx: RankContext, folder: Path, count: int) -> None:
    with transformer_engine(ctx, LAYOUT) as engine:
        for step in range(count):
            train(engine, step, 1)
            engine.save(folder / f"step-{step}", {"step": step})


def load_refused(ctx: RankContext, folder: Path) -> tuple[str, str, bool]:
    with transformer_engine(ctx, LAYOUT) as engine:
        with pytest.raises(CheckpointError) as raised:
            engine.load(folder)
        weights = torch.cat([w.flatten() for w in engine.full_state_dict(all_ranks=True).values()])
        is_nan = bool(weights.isnan().all())
        return type(raised.value).__name__, str(raised.value), is_nan


def load_latest(ctx: RankContext, folder: Path) -> int:
    with transformer_engine(ctx, LAYOUT) as engine:
        newest = latest(folder)
        assert newest is not None
        step: int = engine.load(newest)["step"]
        return step


@pytest.fixture(scope="module")
def three(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three checkpoints."""
    folder = tmp_path_factory.mktemp("three")
    ranks(2)(save_steps, folder, 3)
    return folder


@pytest.fixture
def folder(three: Path, tmp_path: Path) -> Path:
    """Return a copy of it to spoil."""
    return Path(shutil.copytree(three, tmp_path / "copy"))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("spoil", [flip, truncate, os.unlink])
@pytest.mark.parametrize(
    "name", ["manifest", "rank-00001.bin", "rank-00000.extra", "rank-00001.sums"]
)
def test_any_damage_to_any_file_is_found_and_named(
    folder: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    newest = folder / "step-2"
    verify(newest)
    spoil(newest / name)
    with pytest.raises(DamagedCheckpointError, match=name):
        verify(newest)
    lazily_found = name in ("rank-00001.bin", "rank-00000.extra") and spoil is flip
    if not lazily_found:
        assert latest(folder) == folder / "step-1"


def test_a_flipped_bit_is_refused_when_it_is_read_and_leaves_no_mixture(
    ranks: Pools, folder: Path
) -> None:
    flip(folder / "step-2" / "rank-00001.bin")
    for kind, text, is_nan in ranks(2)(load_refused, folder / "step-2"):
        assert kind == "DamagedCheckpointError"
        assert "rank-00001.bin was changed after it was written" in text
        assert is_nan, "weights are partly the checkpoint's"


def test_the_newest_whole_one_is_used(ranks: Pools, folder: Path) -> None:
    truncate(folder / "step-2" / "rank-00000.bin")
    os.unlink(folder / "step-1" / "rank-00001.sums")
    shutil.copytree(folder / "step-2", folder / "step-9.saving")
    damaged = {found.path.name: found.damage for found in scan(folder) if not found.is_whole}
    assert damaged.keys() == {"step-1", "step-2", "step-9.saving"}
    assert all("rank-0000" in damage for damage in damaged.values())
    assert set(ranks(2)(load_latest, folder)) == {0}


def test_what_is_no_checkpoint_is_neither_loaded_nor_replaced(ranks: Pools, folder: Path) -> None:
    for path, words in ((folder / "none", "there is no checkpoint"), (folder, "is no checkpoint")):
        assert words in ranks(2)(load_refused, path)[0][1]
    with pytest.raises(CheckpointError, match="name another folder"):
        folders.begin(folder)


def test_an_interrupted_replacement_leaves_the_former(folder: Path) -> None:
    path = folder / "step-2"
    path.rename(folders.beside(path, folders.REPLACED))
    assert check(folders.standing(path)).step == 2


def test_old_ones_are_removed_and_damaged_ones_are_left_to_their_owner(folder: Path) -> None:
    truncate(folder / "step-1" / "rank-00000.bin")
    prune(folder, 1)
    assert {path.name for path in folder.iterdir()} == {"step-1", "step-2"}


class Mine:
    """Runs code when unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(Path(os.environ["RAYZERO_TEST_TRAP"])),)


def test_loading_runs_no_code_from_the_files(
    ranks: Pools, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "sprung"
    monkeypatch.setenv("RAYZERO_TEST_TRAP", str(trap))
    newest = folder / "step-2"
    buffer = io.BytesIO()
    torch.save({"step": Mine()}, buffer, pickle_module=pickle)
    path = manifest.extra_path(newest, 0)
    written = write_blocks(path, [memoryview(buffer.getvalue())])
    sums = manifest.read_sums(newest, 0)
    manifest.write_sums(newest, 0, manifest.RankFiles(packed=sums.packed, extra=written))
    kind, _, _ = ranks(2)(load_refused, newest)[0]
    assert kind == "CheckpointError"
    assert not trap.exists()


def test_blocks_give_back_any_part_and_check_what_they_read(tmp_path: Path) -> None:
    raw = bytes(range(251)) * 9000
    written = write_blocks(tmp_path / "f", [memoryview(raw[:7]), memoryview(raw[7:])])
    assert written.num_bytes == len(raw)
    assert written.crc32[0] == zlib.crc32(raw[:BLOCK_BYTES])
    parts = [(0, 1), (5, BLOCK_BYTES), (BLOCK_BYTES - 3, 9), (0, len(raw)), (len(raw) - 2, 2)]
    with BlockReader(tmp_path / "f", written) as file:
        for start, count in parts:
            assert bytes(file.read(start, count)) == raw[start : start + count]
        with pytest.raises(DamagedCheckpointError, match="ends before"):
            file.read(len(raw) - 1, 2)


def state_after(ctx: RankContext, folder: Path) -> list[str]:
    with transformer_engine(ctx, LAYOUT) as engine:
        train(engine, 0, 1)
        engine.save(folder / "c", {"step": 1})
        before = named_state(engine)
        train(engine, 1, 1)
        engine.save(folder / "c", {"step": 2})
        engine.load(folder / "c")
        assert differences(before, named_state(engine)), "the first save is still there"
        return sorted(path.name for path in folder.iterdir())


def test_a_save_replaces_one_of_the_same_name_and_leaves_nothing_beside_it(
    ranks: Pools, tmp_path: Path
) -> None:
    assert ranks(2)(state_after, tmp_path)[0] == ["c"]
