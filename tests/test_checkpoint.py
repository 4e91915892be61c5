"""The verb checkpoint shows what is inside, and says by its exit code whether all is whole."""

from pathlib import Path

import pytest

from rayzero.app import main
from tests.ranks import Pools, RankContext
from tests.state.cases import Layout, train, transformer_engine
from tests.state.test_damage import flip, truncate


def save_two(ctx: RankContext, folder: Path) -> None:
    with transformer_engine(ctx, Layout(3, 2, params="bf16")) as engine:
        for step in (1, 2):
            train(engine, step, 1)
            engine.save(folder / f"it's step={step}")
        engine.export(folder / "weights")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["checkpoint", *words])
    printed = capsys.readouterr()
    return code, " ".join((printed.out + printed.err).split())


def test_what_is_inside_is_shown_and_whether_it_is_whole(
    ranks: Pools,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ranks(2)(save_two, tmp_path)
    for words in ((str(tmp_path),), (f"run.checkpoint_folder={tmp_path}",)):
        code, text = shown(capsys, *words)
        assert code == 0
        assert "it's step=2" in text
        assert "stage 3 on 2 ranks (shard 2)" in text
        assert text.index("step=2") < text.index("step=1"), "the newest is not the first"
    monkeypatch.chdir(tmp_path)
    code, text = shown(capsys, f"run.restore={tmp_path / 'weights'}")
    assert code == 0
    assert "weights as safetensors" in text
    first = tmp_path / "first"
    (tmp_path / "it's step=1").rename(first)
    code, text = shown(capsys, "first")
    assert code == 0
    assert "first is whole: step 1, saved by stage 3 on 2 ranks" in text
    assert "output.weight tied to tokens.weight" in text
    assert "tokens.weight │ 27 x 20 │ bfloat16 │ float32 │ float32 │ float32 │ 7,560" in text
    flip(first / "rank-00001.bin")
    code, text = shown(capsys, "first")
    assert code == 1
    assert "is DAMAGED" in text
    truncate(first / "rank-00001.bin")
    code, text = shown(capsys, ".")
    assert code == 1
    assert "DAMAGED" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a checkpoint"),
        (("no/such",), "there is no checkpoint"),
        ((".",), "is no checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_said(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = shown(capsys, *words)
    assert code != 0
    assert message in text
