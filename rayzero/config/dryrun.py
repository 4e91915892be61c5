"""Dry run group: which rank of which world to play, without values and without machines."""

from dataclasses import dataclass

from rayzero.config.checks import at_least, require


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunConfig:
    """The verb dryrun alone reads these."""

    world: int = 4
    """Ranks of the world."""
    rank: int = 0
    """The rank to play."""
    trace: bool = True
    """Follow every tensor through one step: the peak, where it falls, and a picture."""

    steady: bool = True
    """Play a second step, in steady state, for its transfers; without it only what is held."""

    def __post_init__(self) -> None:
        require(
            self.steady or not self.trace,
            "dryrun.trace=true follows the step in steady state, found dryrun.steady=false; "
            "set dryrun.trace=false too",
        )
        at_least("dryrun.world", self.world, 1)
        require(
            0 <= self.rank < self.world,
            f"dryrun.rank={self.rank} is outside dryrun.world={self.world}; "
            f"allowed: 0 to {self.world - 1}",
        )
