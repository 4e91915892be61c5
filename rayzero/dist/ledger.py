"""The ledger: every transfer this rank took part in, with its bytes and its time.

Bytes are taken where tensors are handed to torch, not from a formula. A window's lines are kept
until the next window begins, so after a step they are that step's; totals are kept for ever.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from rayzero.records import Phase, Transfer


@dataclass(slots=True, kw_only=True)
class Line:
    """One transfer and its times. waited_s: this rank stood still for it; done_s: start to end."""

    transfer: Transfer
    started_s: float
    done_s: float = 0.0
    waited_s: float = 0.0


class Ledger:
    """Transfers of one rank."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.phase = Phase.SETUP
        self.total_sent_bytes = 0
        self.total_transfers = 0

    def write(self, transfer: Transfer, started_s: float) -> Line:
        """Enter a transfer that has begun."""
        line = Line(transfer=transfer, started_s=started_s)
        self.lines.append(line)
        self.total_sent_bytes += transfer.sent_bytes
        self.total_transfers += 1
        return line

    def begin_window(self) -> None:
        """Drop the lines of the window before."""
        self.lines = []

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Enter transfers under this phase inside the block."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The window's transfers in order of issue."""
        return tuple(line.transfer for line in self.lines)

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sent in the window."""
        return sum(line.transfer.sent_bytes for line in self.lines)

    @property
    def waited_s(self) -> float:
        """Seconds this rank stood still for transfers in the window."""
        return sum(line.waited_s for line in self.lines)
