"""The door: python -m rayzero VERB [overrides]. Hydra composes, a frozen config goes in.

A verb's module is imported when the verb is called, so that help and a misspelt key cost nothing.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Protocol, Self

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from rayzero.config.build import Plain, build, defaults
from rayzero.config.run import RESTORE_WORDS
from rayzero.errors import ConfigError, RayzeroError
from rayzero.sweep.choices import quote_choice

OPEN_MAPPINGS = (
    "cluster.env",
    "model.factory_args",
    "data.factory_args",
    "parallel.plan",
    "parallel.heads",
)
"""Keys below these are the user's own; no default knows them."""

PATHS: Mapping[tuple[str, str], Sequence[str]] = {
    ("run", "output"): (),
    ("run", "checkpoint_folder"): (),
    ("run", "restore"): RESTORE_WORDS,
    ("offload", "folder"): (),
    ("data", "path"): (),
}
"""Keys that hold a path: of the driver's working directory, whoever reads them later; and the words
that may stand in its place."""

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A word of the command line; its module has main(config), or Campaign where it runs cells."""

    purpose: str
    module: str
    runs_cells: bool = False
    argument: str = ""
    """The key that a word without one sets, where the verb takes such a word."""


VERBS: Mapping[str, Verb] = {
    "run": Verb(purpose="measure one cell", module="rayzero.sweep.campaign", runs_cells=True),
    "sweep": Verb(
        purpose="measure all cells of an experiment",
        module="rayzero.sweep.campaign",
        runs_cells=True,
    ),
    "report": Verb(
        purpose="write the tables and figures of a sweep again", module="rayzero.sweep.rewrite"
    ),
    "dryrun": Verb(
        purpose="play one rank of any world: bytes held and sent, without machines",
        module="rayzero.studies.dryrun",
    ),
    "tables": Verb(
        purpose="lay the ZeRO paper's tables beside formula, dry run and measurement",
        module="rayzero.studies.tables",
    ),
    "claims": Verb(
        purpose="decide common claims on ZeRO, each by an experiment",
        module="rayzero.studies.claims.verb",
    ),
    "checkpoint": Verb(
        purpose="show what is in a checkpoint, and whether it is whole: checkpoint PATH",
        module="rayzero.checkpoint",
        argument="run.restore",
    ),
    "bench": Verb(
        purpose="race our engine against DDP, FSDP2 and DeepSpeed, round by round",
        module="rayzero.studies.bench",
    ),
    "doctor": Verb(
        purpose="check versions, devices, Ray, folders and MLflow", module="rayzero.doctor"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return 0 well, 1 failed, 2 bad input, 130 interrupted."""
    verb, *overrides = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(_help())
        return EXIT_OK
    try:
        return _call(verb, overrides)
    except KeyboardInterrupt:
        return _complain("interrupted; what was done is kept", EXIT_INTERRUPTED)
    except ConfigError as error:
        return _complain(str(error), EXIT_BAD_INPUT)
    except RayzeroError as error:
        return _complain(str(error), EXIT_FAILED)


def conf_folder() -> Path:
    """Return conf/: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).parent
    installed = package / "_conf"
    return installed if installed.is_dir() else package.parent / "conf"


def register_defaults() -> None:
    """Offer the dataclasses' defaults to Hydra as the config `base`."""
    base = OmegaConf.create(defaults())
    for key in OPEN_MAPPINGS:
        OmegaConf.set_struct(OmegaConf.select(base, key), False)
    ConfigStore.instance().store(name="base", node=base)


def to_plain(composed: DictConfig) -> Plain:
    """Resolve what Hydra composed, without Hydra's own part; relative paths become absolute."""
    ours = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    plain = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    for (group, key), words in PATHS.items():
        value = plain.get(group, {}).get(key)
        if isinstance(value, str) and value not in words:
            plain[group][key] = os.path.abspath(os.path.expanduser(value))
    return {str(key): value for key, value in plain.items()}


class Cells(Protocol):
    """What a campaign offers to Hydra's jobs."""

    def expect(self, cells: Sequence[Plain]) -> None:
        """Hear which cells come next."""

    def run(self, cell: Plain) -> float:
        """Measure one cell and return its objective."""

    @property
    def exit_code(self) -> int:
        """Return 0 if every cell was answered."""


class CellTask:
    """What Hydra calls for each cell; one without a launcher before it is measured at the end."""

    def __init__(self, open_campaign: Callable[..., AbstractContextManager[Cells]]) -> None:
        self._open = open_campaign
        self._stack = ExitStack()
        self._campaign: Cells | None = None
        self._alone: DictConfig | None = None

    def expect(self, base: DictConfig, cells: Iterable[DictConfig]) -> None:
        """Hear from the launcher what all cells share and which ones come next."""
        if self._campaign is None:
            self._campaign = self._stack.enter_context(self._open(to_plain(base), many=True))
        self._campaign.expect([to_plain(cell) for cell in cells])

    def __call__(self, composed: DictConfig) -> float | None:
        """Measure a cell of a sweep and return its objective; put a single one aside."""
        if self._campaign is None:
            self._alone = composed
            return None
        return self._campaign.run(to_plain(composed))

    def run_alone(self) -> None:
        """Measure the cell that was put aside, where an error may end the program."""
        if self._alone is not None:
            cell = to_plain(self._alone)
            self._campaign = self._stack.enter_context(self._open(cell, many=False))
            self._campaign.expect([cell])
            self._campaign.run(cell)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the campaign if one was opened."""
        self._stack.__exit__(kind, error, trace)

    @property
    def exit_code(self) -> int:
        """The campaign's; 0 where only help or a config was asked."""
        return EXIT_OK if self._campaign is None else self._campaign.exit_code


def _call(verb: str, overrides: Sequence[str]) -> int:
    if verb not in VERBS:
        raise ConfigError(
            f"unknown verb {verb}; {_closest(verb, VERBS)}allowed: {', '.join(VERBS)}"
        )
    if not VERBS[verb].runs_cells:
        return _call_once(verb, overrides)
    command = tuple(sys.orig_argv)

    def open_campaign(shared: Plain, *, many: bool) -> AbstractContextManager[Cells]:
        campaign: AbstractContextManager[Cells] = _module(verb).Campaign(
            shared, many=many, command=command
        )
        return campaign

    with CellTask(open_campaign) as task:
        _compose(verb, overrides, task)
        with _composition_errors():
            task.run_alone()
    return task.exit_code


def _call_once(verb: str, overrides: Sequence[str]) -> int:
    composed: list[DictConfig] = []
    key = VERBS[verb].argument
    overrides = [_set_by(word, key) if key else word for word in overrides]

    def keep(config: DictConfig) -> None:
        composed.append(config)

    _compose(verb, overrides, keep)
    with _composition_errors():
        configs = [build(to_plain(config)) for config in composed]
    return max((_module(verb).main(config) for config in configs), default=EXIT_OK)


def _set_by(word: str, key: str) -> str:
    """Return a word that is no override or option as a value of the key."""
    if "=" in word or word.startswith(("-", "+", "~")):
        return word
    quoted = word.replace("'", "\\'")
    return f"{key}='{quoted}'"


def _module(verb: str) -> ModuleType:
    return importlib.import_module(VERBS[verb].module)


def _compose(verb: str, overrides: Sequence[str], task: Callable[[DictConfig], object]) -> None:
    """Let Hydra call the task with each composed config; its errors become ConfigError."""
    register_defaults()
    # Without --multirun, Hydra reports a misspelt key beside `stage=2,3` as an ambiguous value.
    many = verb == "sweep" and not any(o.startswith("-") for o in overrides)
    command = [*map(quote_choice, overrides), *(["--multirun"] if many else [])]
    with _command_line([f"rayzero {verb}", *command]):
        door = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=verb)
        with _composition_errors():
            door(task)()


@contextmanager
def _composition_errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    except OSError as error:
        raise ConfigError(
            f"run.output: {error.filename} cannot be written ({error.strerror}); "
            "name another folder: run.output=PATH"
        ) from error


@contextmanager
def _command_line(command: list[str]) -> Iterator[None]:
    """Hand Hydra its command line, and have it raise errors instead of printing and exiting."""
    before = sys.argv
    sys.argv = command
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        del os.environ["HYDRA_FULL_ERROR"]


def _explain(error: Exception) -> str:
    """Say in one line which key or option is wrong, and what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        close = _closest(option, error.options)
        return f"{group}={option} is unknown; {close}allowed: {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override}: {str(error).splitlines()[0]}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    key = getattr(cause, "full_key", None)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and key:
        return _unknown_key(str(key))
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} has no value (???); give it one: {key}=..."
    if isinstance(cause, InterpolationKeyError):
        return f"{key} refers to a key that does not exist: {str(cause).splitlines()[0]}"
    return f"{error}" if cause in (None, error) else f"{error} ({cause})"


def _unknown_key(key: str) -> str:
    group, _, name = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in _known_keys() if k.rpartition(".")[0] == group]
    if not group:
        siblings = sorted({*siblings, *_groups()})
    if not siblings:
        return f"unknown key {key}; {_closest(key, _known_keys())}"
    close = _closest(name, siblings, prefix=f"{group}." if group else "")
    return f"unknown key {key}; {close}known here: {', '.join(siblings)}"


def _groups() -> list[str]:
    return sorted(p.name for p in conf_folder().iterdir() if p.is_dir())


def _known_keys() -> list[str]:
    """List every group and dotted key that has a default."""
    known: list[str] = []

    def walk(plain: Plain, prefix: str) -> None:
        for key, value in plain.items():
            known.append(f"{prefix}{key}")
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    walk(defaults(), "")
    return known


def _closest(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {prefix}{close[0]}? " if close else ""


def _complain(message: str, code: int) -> int:
    print(f"rayzero: {message}", file=sys.stderr)
    return code


def _help() -> str:
    verbs = "\n".join(f"  {name:<8} {verb.purpose}" for name, verb in VERBS.items())
    return (
        "usage: python -m rayzero VERB [overrides]\n\n"
        f"{verbs}\n\n"
        f"groups:  {', '.join(_groups())}\n"
        "example: python -m rayzero sweep experiment=zero_vs_tp stage=2,3 parallel.tp=1,2\n"
        "more:    python -m rayzero VERB --help lists options, --cfg job shows the config"
    )
