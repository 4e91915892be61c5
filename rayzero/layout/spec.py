"""What the layout needs to know of a parameter, and how flats, shards and spans are cut from many.

A *flat* is one buffer that holds the parameters of one (unit, dtype, param group, trained or
frozen), one after another, padded at its end to a multiple of shards x ALIGNMENT elements.
A *shard* is one of its equal parts. A *span* is a run of elements.
"""

import functools
import math
from dataclasses import dataclass

ALIGNMENT = 32
"""Elements. torch's fused CPU kernels round a buffer's tail differently; a multiple has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpShard:
    """A parameter is block `index` of `count` equal ones, cut along tensor dim `dim`."""

    dim: int
    index: int
    count: int
    whole: int | None = None
    """Size of the whole dim 0 where count does not divide it: what the blocks have beyond it, at
    their end, is padding, which no checkpoint, export or full tensor holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter as this tp rank holds it: shape is local, dtype a name such as bf16."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0
    unit: str = ""
    trained: bool = True
    tp: TpShard | None = None

    @property
    def numel(self) -> int:
        """Elements held by this tp rank."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements start <= i < stop."""

    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Length of the span."""
        return self.stop - self.start

    def overlap(self, other: "Span") -> "Span":
        """Return the common part; empty (start == stop) where there is none."""
        start = max(self.start, other.start)
        return Span(start=start, stop=max(start, min(self.stop, other.stop)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a parameter lies in its flat."""

    spec: ParamSpec
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a parameter that lies in one shard."""

    spec: ParamSpec
    in_param: Span
    in_shard: Span


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """One flat: its parameters in order, those split by tp last, then padding."""

    index: int
    unit: str
    dtype: str
    group: int
    trained: bool
    slots: tuple[Slot, ...]
    shards: int
    persistent: bool = False
    """At stage 3: small parameters that stay whole on every rank."""

    @property
    def name(self) -> str:
        """A short name for ledgers and errors."""
        return f"{'whole' if self.persistent else self.unit or 'bucket'}#{self.index}"

    @functools.cached_property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return self.slots[-1].span.stop if self.slots else 0

    @functools.cached_property
    def padded(self) -> int:
        """Elements with padding: a multiple of shards x ALIGNMENT."""
        step = self.shards * ALIGNMENT
        return -(-self.numel // step) * step

    @functools.cached_property
    def shard_elements(self) -> int:
        """Elements of one shard, padding included."""
        return self.padded // self.shards

    @property
    def first_tp(self) -> int:
        """Where the parameters split by tp begin; those before are equal on all tp ranks."""
        for slot in self.slots:
            if slot.spec.tp is not None:
                return slot.span.start
        return self.padded

    def shard(self, index: int) -> Span:
        """Return shard `index` as a span of the flat."""
        size = self.shard_elements
        return Span(start=index * size, stop=(index + 1) * size)

    def shard_padding(self, index: int) -> int:
        """Elements of padding in shard `index`."""
        size = self.shard_elements
        return min(size, max(0, (index + 1) * size - self.numel))

    def pieces(self, index: int) -> list[Piece]:
        """List the parts of parameters that shard `index` holds."""
        shard = self.shard(index)
        found = []
        for slot in self.slots:
            common = slot.span.overlap(shard)
            if common.elements:
                found.append(
                    Piece(
                        spec=slot.spec,
                        in_param=_moved(common, -slot.span.start),
                        in_shard=_moved(common, -shard.start),
                    )
                )
        return found


def _moved(span: Span, by: int) -> Span:
    return Span(start=span.start + by, stop=span.stop + by)
