"""All 63 claims in order."""

from rayzero.studies.claims import (
    model_parallel,
    pitfalls,
    selection,
    tuning,
    zero1,
    zero2,
    zero3,
)

ALL = (
    *zero1.CLAIMS,
    *zero2.CLAIMS,
    *zero3.CLAIMS,
    *selection.CLAIMS,
    *model_parallel.CLAIMS,
    *tuning.CLAIMS,
    *pitfalls.CLAIMS,
)
