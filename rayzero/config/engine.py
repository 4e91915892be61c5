"""Engine group: who runs the step."""

from dataclasses import dataclass
from enum import Enum


class EngineName(Enum):
    """rayzero's own engine, or a peer behind the same verbs."""

    RAYZERO = "rayzero"
    DDP = "ddp"
    ZERO_REDUNDANCY = "zero_redundancy"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"


class OnNonfinite(Enum):
    """What a NaN or infinite gradient does: raise, skip the step on all ranks, or step anyway."""

    RAISE = "raise"
    SKIP = "skip"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which engine, and its policy."""

    name: EngineName = EngineName.RAYZERO
    """rayzero, ddp, zero_redundancy, fsdp2 or deepspeed."""
    on_nonfinite: OnNonfinite = OnNonfinite.RAISE
    """raise, skip or ignore."""
