"""Bad input on the command line: a message with the key and the way out, exit code 2, no traces."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rayzero import app

ROOT = Path(__file__).parent.parent.parent
MULTIRUN = "multirun.yaml"
"""Hydra's own note of what a sweep was asked; written before it looks at the cells."""
HELP_WITHIN_S = 2.0
"""Far above the usual 0.2 s and far below what importing torch, ray or mlflow takes."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["swep"], ["unknown verb swep", "did you mean sweep?"]),
        (["run", "stage=7"], ["stage=7", "0, 1, 2, 3"]),
        (["sweep", "stage=0,7"], ["stage=7", "0, 1, 2, 3"]),
        (["run", "experiment=smok"], ["experiment=smok", "did you mean smoke?", "zero_vs_tp"]),
        (["run", "zero.stge=1"], ["zero.stge", "did you mean zero.stage?"]),
        (["run", "stge=1"], ["unknown key stge", "did you mean stage?"]),
        (["sweep", "zero.stge=1,2"], ["zero.stge", "did you mean zero.stage?"]),
        (["sweep", "stage=1,2", "zero.stge=1"], ["zero.stge", "did you mean zero.stage?"]),
        (["report", "run.num_stps=3"], ["run.num_stps", "did you mean run.num_steps?"]),
        (["report", "+extra.key=1"], ["unknown key extra"]),
        (["report", "data.seq_len=long"], ["data.seq_len='long'", "int"]),
        (["report", "model.name=???"], ["model.name", "???"]),
        (["report", "model.name=${absent.key}"], ["model.name", "absent.key"]),
        (["run", "data.seq_len=["], ["data.seq_len=["]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_ends_with_code_2_and_says_what_is_allowed(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(arguments) == app.EXIT_BAD_INPUT
    said = capsys.readouterr().err
    missing = [word for word in words if word not in said]
    assert not missing, f"{missing} not in: {said}"
    assert "Traceback" not in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != MULTIRUN]


def test_an_output_folder_that_cannot_be_made_names_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file where a folder is asked")
    assert app.main(["sweep", f"run.output={tmp_path}/taken"]) == app.EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert "run.output" in said
    assert str(tmp_path / "taken") in said


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    script = (
        "HEAVY = {'torch', 'ray', 'mlflow', 'matplotlib'};"
        "import sys; from rayzero.app import main; code = main(['--help']);"
        "sys.exit(code or ', '.join(HEAVY & sys.modules.keys()) or 0)"
    )
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in app.VERBS)
    assert time.monotonic() - start_s < HELP_WITHIN_S


def test_relative_paths_are_those_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    composed = OmegaConf.create(
        {"run": {"output": "out"}, "offload": {"folder": None}, "data": {"path": "texts/*.txt"}}
    )
    plain = app.to_plain(composed)
    assert plain["run"] == {"output": str(tmp_path / "out")}
    assert plain["offload"] == {"folder": None}
    assert plain["data"] == {"path": str(tmp_path / "texts/*.txt")}
