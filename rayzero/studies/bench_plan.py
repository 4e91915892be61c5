"""What bench runs: settings that all engines share, and the cell of each engine in them."""

from dataclasses import dataclass, replace

from rayzero.config.bench import PRECISIONS, REGIMES, BenchConfig, Contender, Regime
from rayzero.config.cell import CellConfig
from rayzero.config.engine import EngineName
from rayzero.config.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is asked of all engines alike."""

    regime: Regime
    precision: str
    accumulation: int

    @property
    def name(self) -> str:
        """How lines, runs and files call it."""
        return f"{self.regime.name}_{self.precision}_a{self.accumulation}"


def settings_of(bench: BenchConfig) -> list[Setting]:
    """List all combinations of the axes."""
    return [
        Setting(regime=REGIMES[regime], precision=precision, accumulation=accumulation)
        for precision in bench.precisions
        for regime in bench.regimes
        for accumulation in bench.accumulations
    ]


def cell_of(base: CellConfig, setting: Setting, contender: Contender, *, world: int) -> CellConfig:
    """Return an engine's cell; raise CombinationError where the engine is no such stage.

    A step of several micro-batches is long: fewer are timed, but two always warm up.
    """
    regime = setting.regime
    num_steps = -(-base.run.num_steps // setting.accumulation)
    return replace(
        base,
        engine=replace(base.engine, name=contender.engine or EngineName.DDP),
        zero=replace(base.zero, stage=contender.stage),
        precision=PRECISIONS[setting.precision],
        data=replace(
            base.data,
            micro_batch=regime.micro_batch,
            global_batch=regime.micro_batch * setting.accumulation * world,
            seq_len=regime.seq_len,
        ),
        run=replace(base.run, num_steps=num_steps, repeats=1, probe=False, validate=False),
    )


def quick(base: CellConfig) -> CellConfig:
    """Shrink the programme to what shows that it runs: seconds per engine."""
    bench = base.bench
    return replace(
        base,
        model=ModelConfig(),
        run=replace(base.run, num_steps=1, warmup_steps=1),
        bench=replace(
            bench,
            rounds=1,
            fresh=False,
            regimes=bench.regimes[:1],
            precisions=bench.precisions[:1],
            accumulations=bench.accumulations[:1],
        ),
    )


def in_turn(contenders: tuple[Contender, ...], round_number: int) -> tuple[Contender, ...]:
    """Order the engines of a round: every other one backwards, so that none is always first."""
    return contenders if round_number % 2 == 0 else contenders[::-1]
