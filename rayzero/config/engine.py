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

    @property
    def is_peer(self) -> bool:
        """Whether it is somebody else's: theory has no formula for it, the ledger no line."""
        return self is not EngineName.RAYZERO


class OnNonfinite(Enum):
    """What a NaN or infinite gradient does: raise, skip the step on all ranks, or step anyway."""

    RAISE = "raise"
    SKIP = "skip"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which engine, and its policy."""

    name: EngineName = EngineName.RAYZERO
    """rayzero, ddp, zero_redundancy, fsdp2 or deepspeed; the peers' limits stand in peers.py."""
    on_nonfinite: OnNonfinite = OnNonfinite.RAISE
    """raise, skip or ignore; a peer steps anyway, and its losses show it."""
