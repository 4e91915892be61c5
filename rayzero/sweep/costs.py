"""What a sweep's time was spent on, so that its own cost stays in sight."""

import contextlib
import csv
import time
from collections.abc import Iterator
from pathlib import Path

from rayzero.records import CellRecord
from rayzero.rows import slowest_steps

COSTS_FILE = "costs.csv"
SET_UP, BUILD, WARM_UP = "set-up", "build", "warm-up"
TIMED, AROUND, TRACKING, REPORT = "timed steps", "around steps", "tracking", "report"
PARTS = (SET_UP, BUILD, WARM_UP, TIMED, AROUND, TRACKING, REPORT)
"""set-up: Ray, MLflow and the folder. around steps: start of ranks, hand-over, probe, validation.
tracking: records, matrix and MLflow."""


class Costs:
    """Seconds by part, from the start of the campaign."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._spent_s = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Charge the block to a part."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._spent_s[part] += time.monotonic() - began_s

    def cell(self, record: CellRecord) -> None:
        """Move what a measured cell did itself out of `around steps`, which it was charged to."""
        if not record.reports:
            return
        steps = slowest_steps(record.reports)[record.reports[0].restored_steps :]
        for part, seconds in (
            (BUILD, max(report.build_s for report in record.reports)),
            (WARM_UP, sum(step.step_s for step in steps if not step.timed)),
            (TIMED, sum(step.step_s for step in steps if step.timed)),
        ):
            self._spent_s[part] += seconds
            self._spent_s[AROUND] -= seconds

    @property
    def total_s(self) -> float:
        """Seconds since the campaign began."""
        return time.monotonic() - self._began_s

    def sentence(self) -> str:
        """Say what the time was spent on, and what is left without a name."""
        parts = [f"{part} {seconds:.1f}" for part, seconds in self._lines()]
        return f"time:    {self.total_s:.1f} s = " + ", ".join(parts)

    def write(self, folder: Path) -> None:
        """Write costs.csv: part, seconds."""
        with (folder / COSTS_FILE).open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(("part", "seconds"))
            writer.writerows((part, f"{seconds:.3f}") for part, seconds in self._lines())

    def _lines(self) -> list[tuple[str, float]]:
        rest_s = self.total_s - sum(self._spent_s.values())
        return [*self._spent_s.items(), ("other", max(0.0, rest_s))]
