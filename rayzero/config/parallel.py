"""Parallel group: how the ranks are laid out over the mesh axes replicate, shard and tp."""

from dataclasses import dataclass

from rayzero.config.checks import at_least, divisors, fit


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of the axes a user sets; shard is what remains of the ranks."""

    tp: int = 1
    """Ranks that split every layer (tensor parallelism)."""
    replicate: int = 1
    """Groups that hold the same shards (hybrid sharding)."""
    sequence: bool = False
    """Between the split parts each tp rank has its own tokens: less activation memory."""

    def __post_init__(self) -> None:
        at_least("parallel.tp", self.tp, 1)
        at_least("parallel.replicate", self.replicate, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The mesh of a cell: ranks per axis. dp = replicate x shard is a number, not an axis."""

    replicate: int
    shard: int
    tp: int

    @property
    def dp(self) -> int:
        """Ranks that see different data."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """All ranks."""
        return self.dp * self.tp


def grid_of(parallel: ParallelConfig, world: int) -> Grid:
    """Lay `world` ranks out; raise CombinationError where the degrees do not divide them."""
    allowed = ", ".join(map(str, divisors(world)))
    fit(
        world % parallel.tp == 0,
        f"parallel.tp={parallel.tp} does not divide the {world} ranks; allowed here: {allowed}",
    )
    data_ranks = world // parallel.tp
    allowed = ", ".join(map(str, divisors(data_ranks)))
    fit(
        data_ranks % parallel.replicate == 0,
        f"parallel.replicate={parallel.replicate} does not divide the {data_ranks} data ranks "
        f"({world} ranks / parallel.tp={parallel.tp}); allowed here: {allowed}",
    )
    return Grid(
        replicate=parallel.replicate, shard=data_ranks // parallel.replicate, tp=parallel.tp
    )
