"""Bench group: which engines race, on what, how often."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayzero.config.checks import at_least, require
from rayzero.config.engine import EngineName
from rayzero.config.precision import Dtype, PrecisionConfig
from rayzero.errors import ConfigError

COMPUTE_ONLY = "compute_only"
PRECISIONS: Mapping[str, PrecisionConfig] = {
    "fp32": PrecisionConfig(),
    "bf16": PrecisionConfig(name="bf16", params=Dtype.BF16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Sequences per rank and backward, and tokens per sequence."""

    name: str
    micro_batch: int
    seq_len: int


REGIMES: Mapping[str, Regime] = {
    regime.name: regime
    for regime in (
        Regime(name="communication_heavy", micro_batch=1, seq_len=64),
        Regime(name="compute_heavy", micro_batch=2, seq_len=256),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An engine at a stage; engine is None for compute only, which sends nothing."""

    engine: EngineName | None
    stage: int

    @property
    def name(self) -> str:
        """How tables call the engine."""
        return COMPUTE_ONLY if self.engine is None else self.engine.value

    @property
    def is_peer(self) -> bool:
        """Whether it is somebody else's engine."""
        return self.engine is not None and self.engine.is_peer


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The verb bench alone reads these; run.num_steps and run.warmup_steps are those of a round."""

    engines: list[str] = field(
        default_factory=lambda: [
            "compute_only:0",
            "rayzero:1",
            "rayzero:2",
            "rayzero:3",
            "ddp:0",
            "zero_redundancy:1",
            "fsdp2:2",
            "fsdp2:3",
            "deepspeed:1",
            "deepspeed:2",
            "deepspeed:3",
        ]
    )
    """ENGINE:STAGE; compute_only:0 is the limit: no communication, a rank's share of the update."""
    regimes: list[str] = field(default_factory=lambda: list(REGIMES))
    """communication_heavy (micro-batch 1 x 64 tokens), compute_heavy (2 x 256)."""
    precisions: list[str] = field(default_factory=lambda: list(PRECISIONS))
    """fp32, bf16 (with fp32 master where the engine keeps one)."""
    accumulations: list[int] = field(default_factory=lambda: [1, 4])
    """Micro-batches per step."""
    rounds: int = 5
    """How often each engine is measured, in turn with the others."""
    fresh: bool = True
    """Start new rank processes for each measurement; else engines follow each other in one set."""
    quick: bool = False
    """One round on the tiny model, of the first regime, precision and accumulation, not fresh."""

    def __post_init__(self) -> None:
        at_least("bench.rounds", self.rounds, 1)
        for accumulation in self.accumulations:
            at_least("bench.accumulations", accumulation, 1)
        for key, found, known in (
            ("regimes", self.regimes, REGIMES),
            ("precisions", self.precisions, PRECISIONS),
        ):
            for name in found:
                require(
                    name in known,
                    f"bench.{key} names {name!r}, which is unknown; allowed: {', '.join(known)}",
                )
        for key in ("engines", "regimes", "precisions", "accumulations"):
            require(bool(getattr(self, key)), f"bench.{key} is empty; name at least one")
        for text in self.engines:
            _contender(text)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """Read bench.engines."""
        return tuple(_contender(text) for text in self.engines)


def _contender(text: str) -> Contender:
    name, _, stage = text.partition(":")
    names = [COMPUTE_ONLY, *(engine.value for engine in EngineName)]
    if name not in names or stage not in ("0", "1", "2", "3"):
        raise ConfigError(
            f"bench.engines names {text!r}; allowed: ENGINE:STAGE with ENGINE out of "
            f"{', '.join(names)} and STAGE 0 to 3, such as fsdp2:3"
        )
    engine = None if name == COMPUTE_ONLY else EngineName(name)
    return Contender(engine=engine, stage=int(stage))
