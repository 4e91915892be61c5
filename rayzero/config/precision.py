"""Precision group: the dtype of each kind of bytes."""

from dataclasses import dataclass, field
from enum import Enum


class Dtype(Enum):
    """A floating point format; value is its name in configs and tables."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """The dtypes of parameters, gradients on the wire and in memory, master weights and moments."""

    name: str = "fp32"
    """How the preset is called in tables."""
    params: Dtype = Dtype.FP32
    """Parameters that forward and backward use."""
    reduce: Dtype = Dtype.FP32
    """Gradients on the wire."""
    accumulate: Dtype = Dtype.FP32
    """Gradients in memory, summed over micro-batches."""
    master: Dtype = Dtype.FP32
    """Weights that the optimizer updates; no copy exists where it equals params."""
    moments: Dtype = Dtype.FP32
    """Optimizer moments."""
    keep_fp32: list[str] = field(default_factory=list)
    """Patterns of parameter names that stay fp32."""
    loss_scale: str | None = None
    """fp16: dynamic, or a number; null is no scaling."""

    @property
    def has_master(self) -> bool:
        """Whether the optimizer works on a copy of the parameters."""
        return self.master is not self.params
