"""Stage and offload groups: what is sharded, in which pieces it travels, and where it lives."""

from dataclasses import dataclass
from enum import Enum

from rayzero.config.checks import at_least, require


class Place(Enum):
    """Where a kind of bytes lives: with the module (none), in host memory, or in files."""

    NONE = "none"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """ZeRO stage and the sizes of its transfers; these keys become engine.ZeroOptions."""

    stage: int = 0
    """0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters."""
    bucket_elements: int | None = None
    """Gradients are reduced in buckets of this size (stages 0-2); null suits model and device."""
    overlap: bool = True
    """Communicate while the backward (and, at stage 3, the forward) computes."""
    prefetch_elements: int | None = None
    """Stage 3 gathers this many elements ahead of their use; null suits model and device."""
    persistence_elements: int = 0
    """Stage 3 keeps parameters of at most this many elements whole (the small ones)."""
    max_live_elements: int | None = None
    """Stage 3 never holds more gathered elements than this ahead of use; null is no bound."""
    units: list[str] | None = None
    """Stage 3 gathers these modules (by name) as units; null finds repeated blocks."""

    def __post_init__(self) -> None:
        require(
            self.stage in (0, 1, 2, 3), f"zero.stage={self.stage} is unknown; allowed: 0, 1, 2, 3"
        )
        for key in ("bucket_elements", "max_live_elements"):
            value = getattr(self, key)
            if value is not None:
                at_least(f"zero.{key}", value, 1)
        at_least("zero.persistence_elements", self.persistence_elements, 0)
        if self.prefetch_elements is not None:
            at_least("zero.prefetch_elements", self.prefetch_elements, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Which model states leave the device."""

    optimizer: Place = Place.NONE
    """Where master weights, moments and reduced gradients live."""
    params: Place = Place.NONE
    """Where parameter shards live between uses (stage 3)."""
    folder: str | None = None
    """Folder of the files when anything is offloaded to disk."""
    fraction: float = 1.0
    """Share of the optimizer states that is offloaded."""

    def __post_init__(self) -> None:
        require(
            0.0 <= self.fraction <= 1.0,
            f"offload.fraction={self.fraction} is outside 0 to 1",
        )
        on_disk = Place.DISK in (self.optimizer, self.params)
        require(
            not on_disk or self.folder is not None,
            "offload to disk needs offload.folder=PATH, a folder with room for the states",
        )
