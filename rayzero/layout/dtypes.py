"""Which dtype each kind of bytes has, given a parameter's; shared by engine and theory."""

import functools
from dataclasses import dataclass

ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatDtypes:
    """The dtypes of one flat's parameters, gradients on the wire and in memory, and master."""

    params: str
    reduce: str
    accumulate: str
    master: str

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a copy; otherwise it updates the parameters themselves."""
        return self.master != self.params


@functools.cache
def dtypes_of(params: str, *, reduce: str | None, accumulate: str, master: str) -> FlatDtypes:
    """Resolve the dtypes of a flat. fp64 parameters keep fp64 throughout; reduce=None follows
    accumulate."""
    if params == "fp64":
        return FlatDtypes(params="fp64", reduce="fp64", accumulate="fp64", master="fp64")
    return FlatDtypes(
        params=params, reduce=reduce or accumulate, accumulate=accumulate, master=master
    )
