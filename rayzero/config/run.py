"""Run, tracking and experiment groups: how long a cell runs and where its record goes."""

from dataclasses import dataclass

from rayzero.config.checks import at_least, require

RESTORE_WORDS = ("auto", "never")
"""Values of run.restore that are no path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One cell's steps and limits."""

    num_steps: int = 20
    """Timed optimizer steps."""
    warmup_steps: int = 3
    """Steps before them that are not timed."""
    repeats: int = 1
    """How often the timed steps are run; medians are over all."""
    cell_timeout_s: float = 300.0
    """A cell that takes longer ends with status timeout."""
    resume: bool = True
    """A sweep skips cells that ended ok or impossible with the same config, code and hardware."""
    fail_fast: bool = False
    """A sweep stops after the first cell that failed."""
    seed: int = 0
    """Initial weights."""
    probe: bool = True
    """Measure peak memory in one extra step that is not timed."""
    validate: bool = False
    """Report a validation loss at the end."""
    output: str = "outputs"
    """Folder of all results."""
    checkpoint_folder: str | None = None
    """Folder of the run's checkpoints; null saves none. Cells of a sweep have one each in it."""
    checkpoint_every_steps: int = 100
    """Save after every so many steps, and after the last."""
    checkpoint_keep: int = 3
    """How many of the newest whole checkpoints stay."""
    restore: str = "auto"
    """auto goes on from the newest whole checkpoint in run.checkpoint_folder, never begins anew, a
    path goes on from that checkpoint."""
    memory_fraction: float = 0.8
    """Share of a node's memory that predicted bytes may take before a cell is called impossible."""

    def __post_init__(self) -> None:
        at_least("run.num_steps", self.num_steps, 1)
        at_least("run.warmup_steps", self.warmup_steps, 0)
        at_least("run.repeats", self.repeats, 1)
        at_least("run.checkpoint_every_steps", self.checkpoint_every_steps, 1)
        at_least("run.checkpoint_keep", self.checkpoint_keep, 1)
        require(
            self.cell_timeout_s > 0, f"run.cell_timeout_s={self.cell_timeout_s} must be above 0"
        )
        require(
            0.0 < self.memory_fraction <= 1.0,
            f"run.memory_fraction={self.memory_fraction} is outside 0 to 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    """MLflow."""

    enabled: bool = True
    """Write to MLflow."""
    uri: str | None = None
    """Tracking URI; null is sqlite in run.output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig:
    """The name a sweep's folder and MLflow experiment carry."""

    name: str = "custom"
    """Name of the experiment."""
    question: str = ""
    """What the experiment asks, in a sentence."""
