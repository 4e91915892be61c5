"""Bytes as people read them. A report is binary throughout (MiB, GiB); GB stands only beside it."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit of bytes; a column or an axis has one, and names it once."""

    name: str
    num_bytes: int

    def of(self, num_bytes: float) -> float:
        """Convert bytes to this unit."""
        return num_bytes / self.num_bytes

    def text(self, num_bytes: float) -> str:
        """Return the number alone: fewer decimals the larger it is, none for bytes."""
        value = self.of(num_bytes)
        if self.num_bytes == 1:
            return f"{value:,.0f}"
        decimals = 3 if value < 10 else 2 if value < 100 else 1
        return f"{value:,.{decimals}f}"


BYTE = Unit(name="B", num_bytes=1)
KIB = Unit(name="KiB", num_bytes=2**10)
MIB = Unit(name="MiB", num_bytes=2**20)
GIB = Unit(name="GiB", num_bytes=2**30)
TIB = Unit(name="TiB", num_bytes=2**40)
GB = Unit(name="GB", num_bytes=10**9)


def common_unit(values: Iterable[float | None]) -> Unit:
    """Pick the largest binary unit that leaves the largest value at 1 or more; MiB for none."""
    largest = max((value for value in values if value is not None), default=MIB.num_bytes)
    fitting = [unit for unit in (KIB, MIB, GIB, TIB) if largest >= unit.num_bytes]
    return fitting[-1] if fitting else BYTE


def both(num_bytes: int) -> str:
    """Write one amount in both systems: 2^30 bytes are '1.000 GiB = 1.074 GB'."""
    return f"{GIB.of(num_bytes):.3f} GiB = {GB.of(num_bytes):.3f} GB"


def with_unit(num_bytes: float) -> str:
    """Write one amount with the binary unit that suits it."""
    unit = common_unit([num_bytes])
    return f"{unit.text(num_bytes)} {unit.name}"
