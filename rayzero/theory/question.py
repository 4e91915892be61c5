"""What theory is asked about: one rank of one cell, as layouts and numbers without torch."""

from dataclasses import dataclass, field, replace

from rayzero.config.cell import CellConfig
from rayzero.config.optimizer import OptimizerConfig, OptimizerKind
from rayzero.config.precision import PrecisionConfig
from rayzero.config.zero import OffloadConfig, Place
from rayzero.layout.dtypes import FlatDtypes, dtypes_of
from rayzero.layout.plan import offloaded, plan_buckets, plan_units
from rayzero.layout.spec import FlatLayout, ParamSpec, TpShard
from rayzero.records import Carrier, Where
from rayzero.theory.shapes import ModelShape, shape_of

PLACES = {Place.NONE: Where.DEVICE, Place.HOST: Where.HOST, Place.DISK: Where.DISK}
COUNTER_BYTES = 4
"""torch's optimizers keep the number of steps as one fp32 scalar per tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerShape:
    """What an optimizer keeps per tensor: moments as long as it, and scalars."""

    moments: int
    counters: int


def optimizer_shape(config: OptimizerConfig) -> OptimizerShape:
    """AdamW and Adam keep two moments and a step count, SGD one moment with momentum, else none."""
    if config.kind is OptimizerKind.SGD:
        return OptimizerShape(moments=int(config.momentum > 0.0), counters=0)
    return OptimizerShape(moments=2, counters=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One rank: its flats, and how the engine treats them.

    carrier: how gradients travel, which decides the scratch that they are received into.
    uses: how many modules use each unit in one forward; a unit that is left out has one.
    """

    stage: int
    layouts: tuple[FlatLayout, ...]
    shard_index: int
    tp_index: int = 0
    tp: int = 1
    replicate_index: int = 0
    replicate: int = 1
    precision: PrecisionConfig
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    optimizer: OptimizerShape = OptimizerShape(moments=2, counters=1)
    overlap: bool = True
    carrier: Carrier = Carrier.PAIRWISE
    buffers_bytes: int = 0
    uses: tuple[tuple[str, int], ...] = ()

    @property
    def data_axis(self) -> str:
        """The name of that axis in the ledger."""
        return "data" if self.stage == 0 and self.replicate > 1 else "shard"

    def is_sharded(self, flat: FlatLayout) -> bool:
        """Whether a flat's parameters are sharded between uses."""
        return self.stage == 3 and not flat.persistent

    @property
    def shards(self) -> int:
        """Ranks on the axis that flats are cut over: shard; at stage 0 all data ranks."""
        return self.layouts[0].shards if self.layouts else 1

    @property
    def trained(self) -> tuple[FlatLayout, ...]:
        """Flats with gradients."""
        return tuple(flat for flat in self.layouts if flat.trained)

    def dtypes(self, flat: FlatLayout) -> FlatDtypes:
        """Resolve a flat's dtypes."""
        return dtypes_of(
            flat.dtype,
            reduce=self.precision.reduce.value,
            accumulate=self.precision.accumulate.value,
            master=self.precision.master.value,
        )

    def where(self, flat: FlatLayout) -> Where:
        """Where the optimizer's states of a flat live."""
        place = self.offload.optimizer
        away = offloaded(self.trained, place.value, self.offload.fraction)
        return PLACES[place] if flat.index in away else Where.DEVICE

    def home(self, flat: FlatLayout) -> Where:
        """Where a flat's parameters live between uses."""
        return PLACES[self.offload.params] if self.is_sharded(flat) else Where.DEVICE

    def has_copy(self, flat: FlatLayout) -> bool:
        """Whether the optimizer updates a copy of the flat's parameters."""
        return self.dtypes(flat).has_master or self.where(flat) is not self.home(flat)

    def uses_of(self, unit: str) -> int:
        """How many modules use a unit in one forward."""
        return dict(self.uses).get(unit, 1)


def question_of(
    config: CellConfig,
    *,
    world: int,
    rank: int,
    carrier: Carrier,
    buffers_bytes: int = 0,
) -> Question:
    """Ask about one rank of a cell that trains our transformer."""
    grid = config.grid(world)
    shape = shape_of(config.model)
    tp_index, data_index = rank % grid.tp, rank // grid.tp
    shards = grid.dp if config.zero.stage == 0 else grid.shard
    specs = local_specs(shape, config, tp=grid.tp, tp_index=tp_index)
    if config.zero.stage == 3:
        small = config.zero.persistence_elements
        layouts = plan_units(specs, shards=shards, persistence_elements=small)
    else:
        layouts = plan_buckets(specs, shards=shards, bucket_elements=config.zero.bucket_elements)
    return Question(
        stage=config.zero.stage,
        layouts=layouts,
        shard_index=data_index % shards,
        tp_index=tp_index,
        tp=grid.tp,
        replicate_index=data_index // grid.shard,
        replicate=grid.replicate,
        precision=config.precision,
        offload=config.offload,
        optimizer=optimizer_shape(config.optimizer),
        overlap=config.zero.overlap,
        carrier=carrier,
        buffers_bytes=buffers_bytes,
        uses=(("tokens", 2),) if config.model.tied_output else (),
    )


def local_specs(
    shape: ModelShape, config: CellConfig, *, tp: int, tp_index: int
) -> list[ParamSpec]:
    """Describe the parameters that one tp rank holds; matrices form group 0, vectors group 1."""
    specs = []
    for param in shape.params:
        spec = ParamSpec(
            name=param.name,
            shape=param.local_shape(tp),
            dtype=config.precision.params.value,
            group=0 if len(param.shape) > 1 else 1,
            unit=param.unit or param.module,
        )
        if param.is_cut(tp):
            assert param.tp_dim is not None
            size = param.shape[param.tp_dim]
            whole = size if size % tp else None
            shard = TpShard(dim=param.tp_dim, index=tp_index, count=tp, whole=whole)
            spec = replace(spec, tp=shard)
        specs.append(spec)
    return specs
