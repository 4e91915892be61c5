"""A save in the background holds what was there when it was asked for; its failures are told."""

import os
import resource
import signal
import subprocess
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.engine import OffloadOptions, PrecisionOptions, ZeroEngine, ZeroOptions
from rayzero.engine.state.agreement import CheckpointNotice
from rayzero.engine.state.folders import check, verify
from rayzero.errors import CheckpointError
from rayzero.records import Kind
from tests.engine.test_offload import Wide
from tests.ranks import Pools, RankContext
from tests.state.cases import (
    ADAMW,
    Layout,
    differences,
    named_state,
    train,
    transformer_engine,
)

LAYOUT = Layout(2, 2)


def wait_until_whole(folder: Path) -> None:
    end = time.monotonic() + 20
    while not folder.exists():
        assert time.monotonic() < end, "no thread has named the checkpoint"
        time.sleep(0.01)


def save_and_train_on(ctx: RankContext, folder: Path) -> tuple[list[str], list[int], list[str]]:
    with transformer_engine(ctx, LAYOUT) as engine:
        train(engine, 0, 2)
        before = named_state(engine)
        save = engine.save(folder / "a", wait=False)
        staged = [engine.holdings().bytes_of(Kind.STAGING)]
        train(engine, 2, 2)
        wait_until_whole(folder / "a")
        save.wait()
        save.wait()
        staged.append(engine.holdings().bytes_of(Kind.STAGING))
        after = named_state(engine)
        engine.save(folder / "b", wait=False)
        engine.save(folder / "c", wait=False)
        assert (folder / "b").exists(), "two saves were under way at once"
        engine.load(folder / "a")
        loaded = differences(before, named_state(engine))
        engine.load(folder / "b")
        loaded += differences(after, named_state(engine))
        engine.save(folder / "d", wait=False)
    wait_until_whole(folder / "d")
    return loaded, staged, sorted(path.name for path in folder.iterdir())


def test_training_goes_on_while_a_save_is_written(ranks: Pools, tmp_path: Path) -> None:
    results = ranks(2)(save_and_train_on, tmp_path)
    files = check(tmp_path / "a").files
    for (wrong, staged, names), num_bytes in zip(results, files, strict=True):
        assert not wrong
        assert names == ["a", "b", "c", "d"]
        assert staged == [num_bytes, 0], "host memory is another than the save's, or is kept"
    verify(tmp_path / "d")


ON_DISK = Layout(3, 2, params="bf16", offload="disk", offload_params="disk")


def save_from_disk(ctx: RankContext, folder: Path, layout: Layout) -> tuple[bool, list[int]]:
    """Save at once, then the same in the background, over a former one, while training goes on."""
    with transformer_engine(ctx, layout) as engine:
        train(engine, 0, 1)
        engine.save(folder / "later")
        train(engine, 1, 1)
        engine.save(folder / "now")
        before = engine.holdings().bytes_of(Kind.STAGING)
        save = engine.save(folder / "later", wait=False)
        staged = engine.holdings().bytes_of(Kind.STAGING) - before
        train(engine, 2, 2)
        save.wait()
        name = f"rank-{ctx.rank:05d}.bin"
        saved = [(folder / one / name).read_bytes() for one in ("now", "later")]
        return saved[0] == saved[1], [staged, len(saved[0])]


@pytest.mark.parametrize("params", ["none", "disk"])
def test_what_is_on_disk_is_saved_in_the_background_as_it_was(
    ranks: Pools, tmp_path: Path, params: str
) -> None:
    layout = replace(ON_DISK, offload_params=params)
    for is_equal, (staged, num_bytes) in ranks(2)(save_from_disk, tmp_path, layout):
        assert is_equal, "training changed what was being saved"
        assert staged < (num_bytes / 50 if params == "disk" else num_bytes / 6), "disk is staged"
    verify(tmp_path / "later")


def wide_engine(ctx: RankContext, folder: Path) -> ZeroEngine:
    """Train one step with 111 MB of states on disk."""
    with torch.device("meta"):
        module = Wide(16)
    engine = ZeroEngine(
        module,
        optimizer=ADAMW,
        zero=ZeroOptions(stage=3, overlap=False),
        precision=PrecisionOptions(params="bf16", reduce="bf16", accumulate="bf16"),
        offload=OffloadOptions(optimizer="disk", params="disk", folder=str(folder)),
        mesh=ctx.mesh(),
    )
    engine.backward(engine(torch.ones(1, 704, dtype=torch.bfloat16)))
    engine.step()
    return engine


def resident_growth(ctx: RankContext, folder: Path) -> tuple[int, int]:
    """Save in the background; return the bytes written and by how much RSS grew."""
    with wide_engine(ctx, folder) as engine:
        engine.save(folder / "first")
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_of_process("VmRSS")
        save = engine.save(folder / "second", wait=False)
        save.wait()
        grown = memory_of_process("VmHWM") - before
    return sum(path.stat().st_size for path in (folder / "second").iterdir()), grown


def memory_of_process(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def test_a_save_of_what_is_on_disk_needs_little_memory(ranks: Pools, tmp_path: Path) -> None:
    num_bytes, grown = ranks(1)(resident_growth, tmp_path)[0]
    assert num_bytes > 110e6
    assert grown < 20e6, "what is on disk was brought to memory"


def die_while_saving(ctx: RankContext, folder: Path) -> None:
    engine = wide_engine(ctx, folder)
    engine.save(folder / "c", {"save": 1})
    engine.save(folder / "c", {"save": 2}, wait=False)
    os.kill(os.getpid(), signal.SIGKILL)


def load_saved(ctx: RankContext, folder: Path) -> Any:
    with wide_engine(ctx, folder) as engine:
        return engine.load(folder / "c")


def test_a_crash_while_what_is_on_disk_is_saved_leaves_the_former(
    ranks: Pools, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="exit code -9"):
        ranks(1)(die_while_saving, tmp_path)
    assert (tmp_path / "c.saving").exists(), "it died too late to show anything"
    verify(tmp_path / "c")
    assert ranks(1)(load_saved, tmp_path) == [{"save": 1}]


def fill_up(ctx: RankContext, folder: Path, wait: bool) -> tuple[str, list[str], list[str]]:
    """Save where rank 1 may not write enough, train on, and save again where it may."""
    with transformer_engine(ctx, LAYOUT) as engine:
        train(engine, 0, 1)
        engine.save(folder / "first")
        before = named_state(engine)
        text = ""
        with room(20_000 if ctx.rank == 1 else None):
            try:
                engine.save(folder / "second", wait=wait).wait()
            except CheckpointError as error:
                text = str(error)
        wrong = differences(before, named_state(engine))
        names = sorted(path.name for path in folder.iterdir())
        train(engine, 1, 1)
        engine.save(folder / "third")
        return text, wrong, names


class room:
    """Bound the size of files that this process may write."""

    def __init__(self, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self._num_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._num_bytes, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_finds_no_room_is_an_error_on_all_ranks_and_changes_nothing(
    ranks: Pools, tmp_path: Path, wait: bool
) -> None:
    results = ranks(2)(fill_up, tmp_path, wait)
    for text, wrong, names in results:
        assert "could not save" in text
        assert "on ranks [1]" in text
        assert "File too large" in text
        assert "Training can go on" in text
        assert not wrong
        assert names == ["first"], "what was half-written is still there"
    assert {path.name for path in tmp_path.iterdir()} == {"first", "third"}
    verify(tmp_path / "third")


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """Mount a file system of 200 KiB; skip where this user may not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def save_on_small_disk(ctx: RankContext, folder: Path) -> tuple[str, str]:
    with transformer_engine(ctx, LAYOUT) as engine:
        train(engine, 0, 1)
        texts = []
        for call in (engine.save, engine.export):
            with pytest.raises(CheckpointError) as raised:
                call(folder / "c")
            texts.append(str(raised.value))
            train(engine, 1, 1)
        return texts[0], texts[1]


def test_a_full_disk_is_a_clear_error(ranks: Pools, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * 190_000)
    results = ranks(2)(save_on_small_disk, small_disk)
    for saving, exporting in results:
        assert "could not save" in saving
        assert "could not export" in exporting
        assert "No space left on device" in saving
        assert "No space left on device" in exporting
    assert {path.name for path in small_disk.iterdir()} == {"ballast"}


def save_twice(ctx: RankContext, folder: Path) -> list[str]:
    with transformer_engine(ctx, LAYOUT) as engine, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CheckpointNotice)
        train(engine, 0, 1)
        with room(20_000):
            engine.save(folder / "lost", wait=False)._written.wait()
        engine.save(folder / "kept")
        return [str(w.message) for w in said if w.category is CheckpointNotice]


def test_a_failure_in_the_background_is_told_at_the_next_save(ranks: Pools, tmp_path: Path) -> None:
    said = ranks(2)(save_twice, tmp_path)
    assert "could not save" in said[0][0]
    assert not said[1], "every rank says it"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def bad_extra(ctx: RankContext, folder: Path) -> str:
    with transformer_engine(ctx, LAYOUT) as engine:
        extra = {"x": torch.nn.Linear(1, 1)} if ctx.rank == 1 else {"x": 1}
        with pytest.raises(CheckpointError) as raised:
            engine.save(folder / "c", extra)
        return str(raised.value)


def test_extra_that_could_not_be_loaded_is_refused_on_all_ranks(
    ranks: Pools, tmp_path: Path
) -> None:
    assert all("extra cannot be saved" in text for text in ranks(2)(bad_extra, tmp_path))
    assert not list(tmp_path.iterdir())
