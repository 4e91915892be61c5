"""What a sweep tells a tracker, and the tracker that keeps nothing; imports no MLflow."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rayzero.records import CellRecord

Plain = Mapping[str, object]


class End(Enum):
    """How a run ended, in MLflow's words.

    FINISHED: what was asked is known. FAILED: an error stopped it. KILLED: a person or system did.
    """

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"


class Tracker(Protocol):
    """A sweep with its cells on the way to a store. Only open_sweep may raise (TrackingError)."""

    def open_sweep(
        self, experiment: str, question: str, config: Plain, tags: Mapping[str, str]
    ) -> str:
        """Start the parent run and return its id; raise TrackingError if the store is mute."""

    def open_cell(self, name: str, config: Plain) -> str:
        """Start a child run and return its id, '' if it could not be written."""

    def close_cell(self, record: CellRecord) -> None:
        """Write all of a cell and end its run; a cell that was never opened is opened first."""

    def close_sweep(self, end: End, folder: Path) -> None:
        """Upload the folder's tables, pictures and page, and end the parent run."""

    def view_url(self, address: str | None = None) -> str:
        """Return the link to the saved comparison view, '' if there is none."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be written, a sentence each, for the end of the sweep."""

    def __enter__(self) -> Self:
        """Begin; leaving by an exception ends open runs FAILED, by Ctrl-C KILLED."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End what is still open."""


class NullTracker:
    """Keeps nothing (tracking.enabled=false)."""

    problems: tuple[str, ...] = ()

    def open_sweep(
        self, experiment: str, question: str, config: Plain, tags: Mapping[str, str]
    ) -> str:
        """Start nothing."""
        return ""

    def open_cell(self, name: str, config: Plain) -> str:
        """Start nothing."""
        return ""

    def close_cell(self, record: CellRecord) -> None:
        """Write nothing."""

    def close_sweep(self, end: End, folder: Path) -> None:
        """Upload nothing."""

    def view_url(self, address: str | None = None) -> str:
        """Return ''."""
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End nothing."""
