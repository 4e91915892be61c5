"""One cell of a sweep: all groups together, with the checks that need more than one of them."""

from dataclasses import dataclass, field

from rayzero.config.bench import BenchConfig
from rayzero.config.checks import divisors, fit
from rayzero.config.claims import ClaimsConfig
from rayzero.config.cluster import ClusterConfig
from rayzero.config.data import Batching, DataConfig, batching_of
from rayzero.config.dryrun import DryRunConfig
from rayzero.config.engine import EngineConfig, EngineName
from rayzero.config.model import ModelConfig, check_kv_heads
from rayzero.config.optimizer import OptimizerConfig
from rayzero.config.parallel import Grid, ParallelConfig, grid_of
from rayzero.config.peers import check_peer, check_peer_precision
from rayzero.config.precision import PrecisionConfig
from rayzero.config.run import RESTORE_WORDS, ExperimentConfig, RunConfig, TrackingConfig
from rayzero.config.tables import TablesConfig
from rayzero.config.zero import OffloadConfig, Place, ZeroConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CellGroups:
    """All groups of a cell, each valid by itself."""

    model: ModelConfig = field(default_factory=ModelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    dryrun: DryRunConfig = field(default_factory=DryRunConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    claims: ClaimsConfig = field(default_factory=ClaimsConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellConfig(CellGroups):
    """Groups that also fit together: everything one cell needs; equal configs ask the same."""

    def __post_init__(self) -> None:
        if self.model.factory is None:
            self._check_transformer()
        else:
            fit(
                not self.parallel.sequence,
                "parallel.sequence=true is for rayzero's own transformer: other models take the "
                "tokens they see for the whole sequence; set parallel.sequence=false",
            )
        fit(
            self.offload.params is Place.NONE or self.zero.stage == 3,
            f"offload.params={self.offload.params.value} needs stage=3, "
            f"found stage={self.zero.stage}: only stage 3 shards parameters",
        )
        saves = self.run.checkpoint_folder is not None or self.run.restore not in RESTORE_WORDS
        fit(
            not saves or self.engine.name is EngineName.RAYZERO,
            f"run.checkpoint_folder and run.restore=PATH need engine=rayzero, found "
            f"engine={self.engine.name.value}: peers keep no checkpoints here",
        )
        check_peer(
            self.engine.name,
            zero=self.zero,
            parallel=self.parallel,
            offload=self.offload,
            on_nonfinite=self.engine.on_nonfinite,
        )
        check_peer_precision(self.engine.name, self.precision)

    def _check_transformer(self) -> None:
        tp, model = self.parallel.tp, self.model
        for key in ("plan", "heads"):
            fit(
                not getattr(self.parallel, key),
                f"parallel.{key} is for a model.factory; rayzero's own transformer has its plan, "
                f"so leave parallel.{key} empty",
            )
        for key, number in (
            ("num_heads", model.num_heads),
            ("ffn_hidden", model.ffn),
        ):
            fit(
                number % tp == 0,
                f"parallel.tp={tp} does not divide model.{key}={number}; "
                f"allowed here: {', '.join(map(str, divisors(number)))}",
            )
        check_kv_heads(model, tp)
        seq_len = self.data.seq_len
        fit(
            not self.parallel.sequence or seq_len % tp == 0,
            f"parallel.sequence=true: parallel.tp={tp} does not divide data.seq_len={seq_len}; "
            f"allowed here: {', '.join(map(str, divisors(seq_len)))}",
        )
        fit(
            self.data.seq_len <= model.max_seq_len,
            f"data.seq_len={self.data.seq_len} is above model.max_seq_len={model.max_seq_len}; "
            "shorten the one or raise the other",
        )

    def grid(self, world: int) -> Grid:
        """Lay out `world` ranks; raise CombinationError where degrees do not divide."""
        return grid_of(self.parallel, world)

    def batching(self, world: int) -> Batching:
        """Cut the global batch for `world` ranks; CombinationError where it does not divide."""
        return batching_of(self.data, self.grid(world).dp)
