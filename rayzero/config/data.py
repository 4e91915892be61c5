"""Data group: what is learnt and in which batches."""

from dataclasses import dataclass, field
from enum import Enum

from rayzero.config.checks import at_least, divisors, fit, require
from rayzero.errors import ConfigError


class DataKind(Enum):
    """text: bytes of files. synthetic: random tokens. factory: a user's own."""

    TEXT = "text"
    SYNTHETIC = "synthetic"
    FACTORY = "factory"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The corpus and the shape of a batch. All cells of a sweep see the same global batches."""

    kind: DataKind = DataKind.TEXT
    """text, synthetic or factory."""
    path: str | None = None
    """Folder or glob of the text; null is the running Python's standard library sources."""
    global_batch: int = 16
    """Sequences per optimizer step, over all ranks."""
    micro_batch: int | None = None
    """Sequences per rank and backward; null is global_batch / dp (no accumulation)."""
    seq_len: int = 128
    """Tokens per sequence."""
    seed: int = 0
    """Which sequences; a batch is a function of (seed, step, position in the global batch)."""
    held_out: float = 0.05
    """Share of the corpus kept for the validation loss."""
    validation_sequences: int = 64
    """Held-out sequences in one validation loss."""
    shuffle_targets: bool = False
    """Give every position a random target of the same text: a control that cannot be learnt."""
    factory: str | None = None
    """A user's data, package.module:function; called with factory_args, see docs/your_model.md."""
    factory_args: dict[str, object] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    def __post_init__(self) -> None:
        at_least("data.global_batch", self.global_batch, 1)
        at_least("data.seq_len", self.seq_len, 1)
        at_least("data.validation_sequences", self.validation_sequences, 0)
        if self.micro_batch is not None:
            at_least("data.micro_batch", self.micro_batch, 1)
        require(
            0.0 < self.held_out < 1.0,
            f"data.held_out={self.held_out} is outside 0 to 1 (exclusive)",
        )
        if (self.kind is DataKind.FACTORY) != (self.factory is not None):
            raise ConfigError(
                f"data.kind={self.kind.value} and data.factory={self.factory!r} do not fit: "
                "set data.kind=factory together with data.factory=package.module:function"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How a global batch is cut for one cell: global = micro x accumulation x dp."""

    global_batch: int
    micro_batch: int
    accumulation: int
    dp: int


def batching_of(data: DataConfig, dp: int) -> Batching:
    """Cut the global batch over `dp` data ranks; CombinationError where it does not divide."""
    total = data.global_batch
    fit(
        total % dp == 0,
        f"data.global_batch={total} is not divided by the {dp} data ranks; "
        f"the next that is: {-(-total // dp) * dp}",
    )
    micro = data.micro_batch or total // dp
    per_rank = total // dp
    allowed = ", ".join(map(str, divisors(per_rank)))
    fit(
        per_rank % micro == 0,
        f"data.micro_batch={micro} does not divide the {per_rank} sequences of each data rank "
        f"(data.global_batch={total} / {dp} data ranks); allowed here: {allowed}",
    )
    return Batching(global_batch=total, micro_batch=micro, accumulation=per_rank // micro, dp=dp)
