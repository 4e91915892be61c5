"""How a sweep goes, for a person: one live line at a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rayzero.records import CellRow, Progress, Status

PLAIN_EVERY_S = 10.0
MINUTE_S = 60


class Line(Protocol):
    """Where the present state of a cell is shown."""

    def show(self, text: str) -> None:
        """Replace what was shown."""

    def close(self) -> None:
        """Leave the screen as it was."""


class LiveLine:
    """The last line of a terminal, rewritten in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._live.start()

    def show(self, text: str) -> None:
        """Rewrite the line."""
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Remove the line."""
        self._live.stop()


class PlainLine:
    """A new line now and then, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = time.monotonic() + PLAIN_EVERY_S

    def show(self, text: str) -> None:
        """Print the line unless another one was printed a moment ago."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + PLAIN_EVERY_S
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to remove."""


class Display:
    """Tells of cells as they begin, step and end, and how long the rest may take."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line: Line = LiveLine(console) if console.is_terminal else PlainLine(console)
        self._num_cells = 0
        self._num_ended = 0
        self._measured_s: list[float] = []
        self._cell = ""
        self._begun_s = 0.0

    def expect(self, num_cells: int) -> None:
        """Hear that more cells will come."""
        self._num_cells += num_cells

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, cell: str) -> None:
        """Start the clock of a cell."""
        self._cell, self._begun_s = cell, time.monotonic()
        self._line.show(f"{self._place()} {cell} starts{self._remaining(done=0.0)}")

    def step(self, progress: Progress) -> None:
        """Show a running cell's newest step."""
        done = progress.step / max(1, progress.num_steps)
        self._line.show(
            f"{self._place()} {self._cell}  step {progress.step}/{progress.num_steps}"
            f"  loss {progress.loss:.3f}  {progress.tokens_per_s:,.0f} tokens/s"
            f"{self._remaining(done=done)}"
        )

    def end(self, row: CellRow, *, measured: bool) -> None:
        """Print how a cell ended; measured is False where an earlier run had answered it."""
        place = self._place()
        self._num_ended += 1
        if measured:
            self._measured_s.append(time.monotonic() - self._begun_s)
        self.say(f"{place} {row.cell}  {outcome(row)}{'' if measured else '  (measured before)'}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the screen as it was."""
        self._line.close()

    def _place(self) -> str:
        return f"cell {self._num_ended + 1}/{self._num_cells}"

    def _remaining(self, *, done: float) -> str:
        """Guess from the mean of the cells so far; say nothing before the first has ended."""
        if not self._measured_s:
            return ""
        mean_s = sum(self._measured_s) / len(self._measured_s)
        left_s = mean_s * (self._num_cells - self._num_ended - done)
        minutes, seconds = divmod(round(max(0.0, left_s)), MINUTE_S)
        return f"  about {minutes} min {seconds:02d} s left"


def outcome(row: CellRow) -> str:
    """Say how a cell ended: its speed, or the first line of the reason."""
    if row.status == Status.OK.value and row.tokens_per_s is not None:
        return f"{row.tokens_per_s:,.0f} tokens/s"
    return f"{row.status}: {row.reason.splitlines()[0]}" if row.reason else row.status
