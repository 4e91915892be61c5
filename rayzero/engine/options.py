"""What a user may choose about an engine: stage and sizes, dtypes, places."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayzero.errors import ConfigError, NotBuiltYetError
from rayzero.layout.dtypes import ITEMSIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOptions:
    """Stage 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.

    bucket_elements: gradients travel in buckets of at most this size (stages 0-2); None is a
        quarter of the model, within limits (layout.plan.default_bucket).
    overlap: communicate while backward (stage 3: and forward) computes; same bits either way.
    prefetch_elements: stage 3 gathers up to this many elements ahead of their use.
    persistence_elements: stage 3 keeps parameters of at most this size whole (the small ones).
    max_live_elements: stage 3 prefetches only while fewer elements than this are gathered.
    units: names of the modules that stage 3 gathers as one; None finds repeated blocks.
    """

    stage: int = 0
    bucket_elements: int | None = None
    overlap: bool = True
    prefetch_elements: int | None = None
    persistence_elements: int = 0
    max_live_elements: int | None = None
    units: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"stage={self.stage} is unknown; allowed: 0, 1, 2, 3")
        if self.bucket_elements is not None and self.bucket_elements < 1:
            raise ConfigError(f"bucket_elements={self.bucket_elements}; allowed: 1 or more")
        if self.persistence_elements < 0:
            raise ConfigError(f"persistence_elements={self.persistence_elements}; allowed: 0 up")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionOptions:
    """Dtypes by name (fp64 fp32 bf16 fp16).

    params=None keeps the module's own; fp64 parameters keep fp64 throughout. reduce=None sends
    gradients as they are accumulated. keep_fp32: patterns (fnmatch) of parameter names.
    loss_scale: None, a number, or "dynamic" (see engine.loss_scale).
    """

    params: str | None = None
    reduce: str | None = None
    accumulate: str = "fp32"
    master: str = "fp32"
    moments: str = "fp32"
    keep_fp32: Sequence[str] = ()
    loss_scale: str | float | None = None

    def __post_init__(self) -> None:
        for key in ("params", "reduce", "accumulate", "master", "moments"):
            value = getattr(self, key)
            if value is not None and value not in ITEMSIZE:
                raise ConfigError(
                    f"precision.{key}={value!r} is unknown; allowed: {', '.join(ITEMSIZE)}"
                )
        if self.moments != self.master:
            raise NotBuiltYetError(
                f"precision.moments={self.moments} differs from precision.master={self.master}: "
                "moments in a dtype of their own are not built yet; set both to one dtype"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Which states leave the device: "none", "host" or "disk" (files in `folder`).

    optimizer: masters and moments, with the shards of gradients in host memory (stages 2 and 3).
    params: shards of parameters between uses (stage 3); on disk they are read into one staging
        buffer when their unit is gathered, with overlap while the unit before it computes, and
        written after the step.
    fraction: of the optimizer's states. What optimizer and params send to the same place is updated
        there, without a second copy, where master and parameters have one dtype.
    """

    optimizer: str = "none"
    params: str = "none"
    folder: str | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        for key in ("optimizer", "params"):
            value = getattr(self, key)
            if value not in ("none", "host", "disk"):
                raise ConfigError(f"offload.{key}={value!r} is unknown; allowed: none, host, disk")
        if "disk" in (self.optimizer, self.params) and self.folder is None:
            raise ConfigError("offload to disk needs offload.folder, a folder with room for it")
        if not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(f"offload.fraction={self.fraction} is outside 0 to 1")
