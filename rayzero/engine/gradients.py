"""Where gradients are summed: in whole flats (stages 0 and 1) or in shards (stages 2 and 3).

Every reduction takes the mean over the data ranks; summing over micro-batches and dividing by the
window's weight is left to the step. A parameter without gradient counts as zero at every stage.
"""

from collections.abc import Callable, Sequence
from enum import Enum

import torch

from rayzero.dist.dtypes import BY_NAME
from rayzero.engine.flats import Flat, to_host
from rayzero.engine.wire import Wire
from rayzero.records import Where


class SumState(Enum):
    """What a whole flat's gradient buffer holds.

    EMPTY: nothing of this window. LOCAL: this rank's sum since the last reduction (after `add`).
    REDUCED: the mean over ranks (after `reduce`), until the next `add` moves it to a second buffer.
    """

    EMPTY = "empty"
    LOCAL = "local"
    REDUCED = "reduced"


class FullGradients:
    """Sums of whole flats, reduced in place: the gradients of stages 0 and 1.

    `kept` cuts from a flat's buffer what stays meaningful after a reduction: all of it where the
    reduction is an all-reduce, the own shard where it is a reduce-scatter.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        wire: Wire,
        kept: Callable[[Flat, torch.Tensor], torch.Tensor],
    ) -> None:
        self._flats = flats
        self._wire = wire
        self._kept = kept
        self._sums: dict[int, torch.Tensor] = {}
        self._earlier: dict[int, torch.Tensor] = {}
        self._has_earlier: set[int] = set()
        self._states = {flat.layout.index: SumState.EMPTY for flat in flats}
        self._is_finished = False

    def add(self, flat: Flat) -> None:
        """Add the gradients that a backward left on the parameters to the flat's local sum."""
        index = flat.layout.index
        if index not in self._sums:
            self._sums[index] = torch.zeros_like(flat.whole, dtype=BY_NAME[flat.dtypes.accumulate])
        if self._states[index] is SumState.REDUCED:
            self._set_aside(flat)
        views = flat.views_of(self._sums[index])
        if self._states[index] is SumState.EMPTY:
            copy_gradients(flat.take_gradients(), views)
        else:
            add_gradients(flat.take_gradients(), views)
        self._states[index] = SumState.LOCAL
        self._is_finished = False

    def reduce(self, flat: Flat) -> None:
        """Start the reduction of the flat's local sum."""
        index = flat.layout.index
        assert self._states[index] is SumState.LOCAL, f"{flat.layout.name} has no local sum"
        total = self._sums[index]
        self._states[index] = SumState.REDUCED
        if flat.dtypes.reduce == flat.dtypes.accumulate:
            self._wire.reduce(flat, total, lambda: None)
            return
        buffer = self._wire.buffer(flat)
        buffer.copy_(total)
        kept, sent = self._kept(flat, total), self._kept(flat, buffer)

        def write_back() -> None:
            kept.copy_(sent)

        self._wire.reduce(flat, buffer, write_back)

    def finish(self) -> bool:
        """Reduce what is left, wait, and merge what earlier reductions of the window brought.

        Return whether anything came since the last finish.
        """
        if self._is_finished:
            return False
        self._is_finished = True
        for flat in self._flats:
            if self._states[flat.layout.index] is SumState.LOCAL:
                self.reduce(flat)
        self._wire.drain()
        for flat in self._flats:
            index = flat.layout.index
            if index in self._has_earlier:
                self._kept(flat, self._sums[index]).add_(self._earlier[index])
        self._has_earlier.clear()
        return True

    def gradient(self, flat: Flat) -> torch.Tensor:
        """Return the reduced gradient that this rank keeps of a flat, after finish."""
        return self._kept(flat, self._sums[flat.layout.index])

    def clear(self) -> None:
        """Forget the window; buffers stay for the next."""
        self._wire.drain()
        self._has_earlier.clear()
        self._states = dict.fromkeys(self._states, SumState.EMPTY)
        self._is_finished = False

    def tensors(self) -> list[tuple[Flat, Where, torch.Tensor]]:
        """List the gradient buffers held, with their place."""
        buffers = (self._sums, self._earlier)
        return [
            (flat, Where.DEVICE, held[flat.layout.index])
            for held in buffers
            for flat in self._flats
            if flat.layout.index in held
        ]

    def _set_aside(self, flat: Flat) -> None:
        self._wire.drain()
        index = flat.layout.index
        reduced = self._kept(flat, self._sums[index])
        if index in self._has_earlier:
            self._earlier[index].add_(reduced)
        elif index in self._earlier:
            self._earlier[index].copy_(reduced)
        else:
            self._earlier[index] = reduced.clone()
        self._has_earlier.add(index)
        self._states[index] = SumState.EMPTY


class ShardGradients:
    """Sums of own shards, each backward's gradients reduced at once: stages 2 and 3.

    A flat that is_away has its sum in host memory, copied there as each reduction ends.
    """

    def __init__(self, flats: Sequence[Flat], wire: Wire, is_away: Callable[[Flat], bool]) -> None:
        self._flats = flats
        self._wire = wire
        self._is_away = is_away
        self._sums: dict[int, torch.Tensor] = {}
        self._filled: set[int] = set()
        self._is_finished = False

    def reduce(self, flat: Flat) -> None:
        """Send the gradients that a backward left on the parameters to their owners."""
        self._is_finished = False
        buffer = self._wire.buffer(flat)
        copy_gradients(flat.take_gradients(), flat.views_of(buffer))
        buffer[flat.layout.numel :].zero_()
        total, is_first = self._sum_of(flat), flat.layout.index not in self._filled
        self._filled.add(flat.layout.index)
        if is_first and total.dtype is buffer.dtype and total.device == buffer.device:
            self._wire.reduce(flat, buffer, lambda: None, out=total)
            return

        def add() -> None:
            reduced = flat.own(buffer)
            if is_first:
                total.copy_(reduced, non_blocking=True)
            else:
                total.add_(reduced.to(total.device))

        self._wire.reduce(flat, buffer, add)

    def finish(self) -> bool:
        """Wait for the reductions under way; return whether any came since the last finish."""
        if self._is_finished:
            return False
        self._is_finished = True
        self._wire.drain()
        if any(self._is_away(flat) and flat.whole.is_cuda for flat in self._flats):
            torch.cuda.current_stream().synchronize()  # the host reads next what was copied
        for flat in self._flats:
            if flat.layout.index not in self._filled:
                self._sum_of(flat).zero_()
        return True

    def gradient(self, flat: Flat) -> torch.Tensor:
        """Return the reduced gradient of the own shard, after finish."""
        return self._sums[flat.layout.index]

    def clear(self) -> None:
        """Forget the window; buffers stay for the next."""
        self._wire.drain()
        self._filled.clear()
        self._is_finished = False

    def tensors(self) -> list[tuple[Flat, Where, torch.Tensor]]:
        """List the gradient buffers held, with their place."""
        return [
            (
                flat,
                Where.HOST if self._is_away(flat) else Where.DEVICE,
                self._sums[flat.layout.index],
            )
            for flat in self._flats
            if flat.layout.index in self._sums
        ]

    def _sum_of(self, flat: Flat) -> torch.Tensor:
        index = flat.layout.index
        if index not in self._sums:
            dtype = BY_NAME[flat.dtypes.accumulate]
            total = flat.whole.new_zeros(flat.layout.shard_elements, dtype=dtype)
            self._sums[index] = to_host(total) if self._is_away(flat) else total
        return self._sums[index]


def copy_gradients(grads: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]) -> None:
    """Write gradients into their places, zeros where none came."""
    present = [(g, v) for g, v in zip(grads, views, strict=True) if g is not None]
    for grad, view in zip(grads, views, strict=True):
        if grad is None:
            view.zero_()
    if present:
        torch._foreach_copy_([v for _, v in present], [g for g, _ in present])


def add_gradients(grads: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]) -> None:
    """Add gradients to their places in the places' dtype."""
    for grad, view in zip(grads, views, strict=True):
        if grad is not None:
            view.add_(grad)
