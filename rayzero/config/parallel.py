"""Parallel group: how ranks are laid out over the axes replicate, shard and tp, and tp's plan."""

from dataclasses import dataclass, field
from enum import Enum

from rayzero.config.checks import at_least, divisors, fit


class Style(Enum):
    """What tensor parallelism does with one module."""

    COLUMN = "column"
    """Linear: each rank computes a block of the outputs. Any other module: it works on such blocks,
    so its weights sum their gradients, and its random numbers are the rank's own."""
    ROW = "row"
    """Linear: each rank has a block of the inputs; the outputs are summed."""
    VOCAB = "vocab"
    """Each rank holds a block of the vocabulary. Embedding: the outputs are summed. Linear: column,
    its logits stay split. Cross-entropy: takes split logits."""
    SEQUENCE = "sequence"
    """Between the split parts: replicated, but with parallel.sequence each rank has its own tokens
    here. Parameters sum their gradients; an embedding's output is cut; masks are the rank's own."""
    REPLICATE = "replicate"
    """Every rank holds and computes all of it; so does what no pattern names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of the axes a user sets; shard is what remains of the ranks."""

    tp: int = 1
    """Ranks that split every layer (tensor parallelism)."""
    replicate: int = 1
    """Groups that hold the same shards (hybrid sharding)."""
    sequence: bool = False
    """Between the split parts each tp rank has its own tokens: less activation memory."""

    plan: dict[str, Style] = field(default_factory=dict)
    """For a model.factory: patterns of module names to styles, the first that matches counts. Empty
    takes the plan that the model ships."""
    heads: dict[str, int] = field(default_factory=dict)
    """With plan: patterns of the linears whose outputs are so many heads; no head is ever cut."""

    def __post_init__(self) -> None:
        at_least("parallel.tp", self.tp, 1)
        for pattern, number in self.heads.items():
            at_least(f"parallel.heads[{pattern}]", number, 1)
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
