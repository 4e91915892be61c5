"""Small checks that raise ConfigError with the key, the value found and what is allowed."""

import math

from rayzero.errors import CombinationError, ConfigError


def require(holds: bool, message: str) -> None:
    """Raise ConfigError with the message unless the condition holds."""
    if not holds:
        raise ConfigError(message)


def fit(holds: bool, message: str) -> None:
    """Raise CombinationError with the message unless values of several keys fit together."""
    if not holds:
        raise CombinationError(message)


def at_least(key: str, value: int | float, minimum: int | float) -> None:
    """Raise ConfigError unless value >= minimum."""
    require(value >= minimum, f"{key}={value} is too small; allowed: {minimum} or more")


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
