"""Where a plan makes a model's activations cross the tp ranks: what theory needs to know of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One all-reduce per micro-batch."""

    unit: str
    elements: int
    in_backward: bool
    per_token: bool = True
    """The elements are those of one token, else of the micro-batch."""
    exact: bool = False
    """In fp32, whatever the parameters' dtype is."""
