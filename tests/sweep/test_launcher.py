"""Hydra's multirun through our launcher: every job runs whatever became of the others."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest

from rayzero import app

Plain = dict[str, Any]


class Witness:
    """Stands where a campaign stands and notes what Hydra hands it."""

    def __init__(self, fate: Callable[[Plain], float]) -> None:
        self.fate = fate
        self.expected: list[list[Plain]] = []
        self.ran: list[Plain] = []
        self.many: bool | None = None
        self.exit_code = 0

    def __call__(self, shared: Plain, *, many: bool, command: Sequence[str]) -> Self:
        self.many = many
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.left_by = kind

    def expect(self, cells: Sequence[Plain]) -> None:
        self.expected.append(list(cells))

    def run(self, cell: Plain) -> float:
        self.ran.append(cell)
        return self.fate(cell)

    @property
    def stages(self) -> list[int]:
        return [cell["zero"]["stage"] for cell in self.ran]


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Witness]:
    """Return a function that puts a witness in the campaign's place."""
    monkeypatch.chdir(tmp_path)

    def stand_in(fate: Callable[[Plain], float] = lambda cell: 0.1) -> Witness:
        stands = Witness(fate)
        monkeypatch.setattr(app, "_module", lambda verb: SimpleNamespace(Campaign=stands))
        return stands

    return stand_in


def test_a_job_that_raises_ends_neither_the_sweep_nor_the_others(
    witness: Callable[..., Witness],
) -> None:
    def fate(cell: Plain) -> float:
        if cell["zero"]["stage"] == 0:
            raise RuntimeError("this cell is broken")
        if cell["zero"]["stage"] == 1:
            raise MemoryError
        return 0.1

    seen = witness(fate)
    assert app.main(["sweep", "stage=0,1,2", "parallel.tp=1"]) == app.EXIT_OK
    assert seen.stages == [0, 1, 2]


def test_all_cells_are_known_before_the_first_one_runs(witness: Callable[..., Witness]) -> None:
    def fate(cell: Plain) -> float:
        assert len(seen.expected[0]) == 12
        return 0.1

    seen = witness(fate)
    assert app.main(["sweep"]) == app.EXIT_OK
    assert seen.ran == seen.expected[0]
    axes = {(cell["zero"]["stage"], cell["parallel"]["tp"]) for cell in seen.ran}
    assert axes == {(stage, tp) for stage in range(4) for tp in (1, 2, 4)}


def test_the_command_line_replaces_an_axis_of_the_experiment(
    witness: Callable[..., Witness],
) -> None:
    seen = witness()
    assert app.main(["sweep", "stage=2,3", "parallel.tp=1"]) == app.EXIT_OK
    assert seen.stages == [2, 3]


@pytest.mark.parametrize("axis", ["stage=1,3", "stage=choice(1,3)", "stage=range(1,4,2)"])
def test_run_with_multirun_is_a_sweep(axis: str, witness: Callable[..., Witness]) -> None:
    seen = witness()
    assert app.main(["run", "--multirun", axis]) == app.EXIT_OK
    assert seen.many is True
    assert seen.stages == [1, 3]


def test_run_is_one_cell_and_its_error_ends_the_program(witness: Callable[..., Witness]) -> None:
    seen = witness(lambda cell: math.inf)
    assert app.main(["run", "stage=3"]) == app.EXIT_OK
    assert seen.many is False
    assert seen.stages == [3]

    def broken(cell: Plain) -> float:
        raise RuntimeError("a fault of ours")

    witness(broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        app.main(["run"])


def test_ctrl_c_ends_the_sweep_with_code_130_after_leaving_the_campaign(
    witness: Callable[..., Witness],
) -> None:
    def fate(cell: Plain) -> float:
        if cell["zero"]["stage"] == 1:
            raise KeyboardInterrupt
        return 0.1

    seen = witness(fate)
    assert app.main(["sweep", "stage=0,1,2", "parallel.tp=1"]) == app.EXIT_INTERRUPTED
    assert seen.stages == [0, 1]
    assert seen.left_by is KeyboardInterrupt


def test_the_campaigns_exit_code_is_the_programs(witness: Callable[..., Witness]) -> None:
    seen = witness()
    seen.exit_code = app.EXIT_FAILED
    assert app.main(["sweep", "stage=0", "parallel.tp=1"]) == app.EXIT_FAILED


def test_showing_the_config_opens_no_campaign(
    witness: Callable[..., Witness], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = witness()
    assert app.main(["sweep", "--cfg", "job"]) == app.EXIT_OK
    assert "global_batch" in capsys.readouterr().out
    assert seen.many is None


def test_hydra_leaves_the_working_folder_alone(
    witness: Callable[..., Witness], tmp_path: Path
) -> None:
    witness()
    assert app.main(["run"]) == app.EXIT_OK
    assert not list(tmp_path.iterdir())
