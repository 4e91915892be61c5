"""How papers round: half up or cut off, at exact fractions, so that 1.875 is 1.88 and not 1.87."""

import math
from fractions import Fraction


def half_up(value: Fraction, *, decimals: int) -> Fraction:
    """Round half up to this many decimals."""
    unit = Fraction(10) ** -decimals
    return math.floor(value / unit + Fraction(1, 2)) * unit


def truncated(value: Fraction, *, decimals: int) -> Fraction:
    """Cut off after this many decimals (negative: before the point)."""
    unit = Fraction(10) ** -decimals
    return math.floor(value / unit) * unit


def keeps_digits(value: Fraction, digits: int) -> int:
    """Return the decimals that leave this many significant digits of a positive number."""
    whole_digits = 0
    while value >= 1:
        value /= 10
        whole_digits += 1
    return digits - whole_digits
