"""Gather units ahead of their use, in the order of the pass before.

A pass is one forward or one backward. While uses come as they came last time, the next units are
gathered as long as the elements ahead of use stay within the limits, and of the one after them the
own shard is read, where it is on disk: its buffer lies idle between gathers. A pass that takes
another way than the last gathers nothing ahead from there on, and the next follows the new way.
"""

from collections.abc import Sequence

from rayzero.engine.unit import Unit, UnitState

Use = tuple[Unit, ...]


class Prefetcher:
    """The order of one kind of pass. elements: most that may be gathered ahead of use."""

    def __init__(self, *, elements: int, max_live_elements: int | None) -> None:
        self._elements = elements
        self._max_live = max_live_elements
        self._last: list[Use] = []
        self._now: list[Use] = []
        self._on_track = True

    def begin(self) -> None:
        """Begin a pass."""
        self._last, self._now = self._now or self._last, []
        self._on_track = True

    def used(self, use: Use) -> None:
        """Note a use, whose units are whole; gather what came after it last time."""
        place = len(self._now)
        self._now.append(use)
        self._on_track = self._on_track and place < len(self._last) and self._last[place] is use
        if self._on_track and self._elements:
            live = sum(unit.elements for unit in use)
            self._gather_ahead(self._last[place + 1 :], live)

    def _gather_ahead(self, coming: Sequence[Use], live_elements: int) -> None:
        ahead = 0
        for use in coming:
            for unit in use:
                if unit.state is UnitState.WHOLE:
                    continue
                ahead += unit.elements
                live = live_elements + ahead
                if ahead > self._elements or (self._max_live is not None and live > self._max_live):
                    unit.read_ahead()
                    return
                unit.start_unshard()
