"""What theory is asked about: one rank of one cell, as layouts and numbers without torch."""

import functools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rayzero.config.cell import CellConfig
from rayzero.config.model import ModelConfig
from rayzero.config.optimizer import OptimizerConfig, OptimizerKind
from rayzero.config.parallel import Grid
from rayzero.config.precision import PrecisionConfig
from rayzero.config.zero import OffloadConfig, Place
from rayzero.layout.dtypes import FlatDtypes, dtypes_of
from rayzero.layout.plan import offloaded, plan_buckets, plan_units
from rayzero.layout.spec import FlatLayout, ParamSpec, TpShard
from rayzero.records import Carrier, Uses, Where
from rayzero.theory.shapes import ModelShape, ParamShape, shape_of

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


@dataclass(frozen=True, kw_only=True)
class Question:
    """One rank: its flats, and how the engine treats them.

    counts: how many flats, all of one dtype, each layout stands for; one each where left out.
    carrier: how gradients travel, which decides the scratch that they are received into.
    uses: how often each unit is gathered, where that is not once for each pass.
    """

    stage: int
    layouts: tuple[FlatLayout, ...]
    counts: tuple[int, ...] = ()
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
    uses: tuple[tuple[str, Uses], ...] = ()

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

    @functools.cached_property
    def trained(self) -> tuple[FlatLayout, ...]:
        """Flats with gradients."""
        return tuple(flat for flat in self.layouts if flat.trained)

    @functools.cached_property
    def offloaded(self) -> frozenset[int]:
        """Indices of the flats whose optimizer states leave the device."""
        offload = self.offload
        return frozenset(offloaded(self.trained, offload.optimizer.value, offload.fraction))

    def count(self, flat: FlatLayout) -> int:
        """How many flats this one stands for."""
        return self.counts[flat.index] if self.counts else 1

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
        return PLACES[self.offload.optimizer] if flat.index in self.offloaded else Where.DEVICE

    def home(self, flat: FlatLayout) -> Where:
        """Where a flat's parameters live between uses."""
        return PLACES[self.offload.params] if self.is_sharded(flat) else Where.DEVICE

    def has_copy(self, flat: FlatLayout) -> bool:
        """Whether the optimizer updates a copy of the flat's parameters."""
        return self.dtypes(flat).has_master or self.where(flat) is not self.home(flat)

    def uses_of(self, unit: str) -> Uses:
        """How often a unit is gathered."""
        return dict(self.uses).get(unit, Uses())


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
    layouts = _cut_of(config).layouts(
        config.precision.params.value, shards=_shards(config, grid), tp_index=rank % grid.tp
    )
    question = _ask(config, grid, layouts, rank=rank, carrier=carrier)
    return replace(question, buffers_bytes=buffers_bytes)


def counted_question_of(config: CellConfig, *, world: int, rank: int, carrier: Carrier) -> Question:
    """Ask for sums over flats: one stands for all of its size and use, so that this is fast.

    Where only some flats are offloaded it matters which, and each stands for itself.
    """
    if config.offload.fraction < 1.0:
        return question_of(config, world=world, rank=rank, carrier=carrier)
    grid = config.grid(world)
    cut, dtype = _cut_of(config), config.precision.params.value
    layouts = _samples(cut, dtype, shards=_shards(config, grid))
    counts = tuple(count for _, count in _alike(cut))
    return _ask(config, grid, layouts, counts, rank=rank, carrier=carrier)


class Cut(NamedTuple):
    """What decides the flats of our transformer, but for their dtype and shards.

    elements: by units the parameters up to which they stay whole, else the length of a bucket.
    """

    model: ModelConfig
    tp: int
    by_units: bool
    elements: int | None

    def layouts(self, dtype: str, *, shards: int, tp_index: int) -> tuple[FlatLayout, ...]:
        """Lay all flats out."""
        specs = local_specs(shape_of(self.model), dtype, tp=self.tp, tp_index=tp_index)
        if self.by_units:
            return plan_units(specs, shards=shards, persistence_elements=self.elements or 0)
        return plan_buckets(specs, shards=shards, bucket_elements=self.elements)


def _cut_of(config: CellConfig) -> Cut:
    by_units, zero = config.zero.stage == 3, config.zero
    elements = zero.persistence_elements if by_units else zero.bucket_elements
    return Cut(config.model, config.parallel.tp, by_units, elements)


@functools.lru_cache(maxsize=1024)
def _alike(cut: Cut) -> tuple[tuple[FlatLayout, int], ...]:
    """Return one flat of each size and use, and how many there are."""
    found: dict[tuple[str, int, bool], list[FlatLayout]] = {}
    for flat in cut.layouts("fp32", shards=1, tp_index=0):
        unit = flat.unit.partition(".")[0]
        found.setdefault((unit, flat.numel, flat.persistent), []).append(flat)
    return tuple((flats[0], len(flats)) for flats in found.values())


@functools.lru_cache(maxsize=4096)
def _samples(cut: Cut, dtype: str, *, shards: int) -> tuple[FlatLayout, ...]:
    return tuple(
        replace(flat, index=index, dtype=dtype, shards=shards)
        for index, (flat, _) in enumerate(_alike(cut))
    )


def _shards(config: CellConfig, grid: Grid) -> int:
    return grid.dp if config.zero.stage == 0 else grid.shard


def _ask(
    config: CellConfig,
    grid: Grid,
    layouts: tuple[FlatLayout, ...],
    counts: tuple[int, ...] = (),
    *,
    rank: int,
    carrier: Carrier,
) -> Question:
    data_index = rank // grid.tp
    return Question(
        stage=config.zero.stage,
        layouts=layouts,
        counts=counts,
        shard_index=data_index % _shards(config, grid),
        tp_index=rank % grid.tp,
        tp=grid.tp,
        replicate_index=data_index // grid.shard,
        replicate=grid.replicate,
        precision=config.precision,
        offload=config.offload,
        optimizer=optimizer_shape(config.optimizer),
        overlap=config.zero.overlap,
        carrier=carrier,
        uses=(("tokens", Uses(2, 2)),) if config.model.tied_output else (),
    )


def local_specs(shape: ModelShape, dtype: str, *, tp: int, tp_index: int) -> list[ParamSpec]:
    """Describe the parameters that one tp rank holds; matrices form group 0, vectors group 1."""
    return [
        ParamSpec(
            name=param.name,
            shape=param.local_shape(tp),
            dtype=dtype,
            group=0 if len(param.shape) > 1 else 1,
            unit=param.unit or param.module,
            tp=_tp_shard(param, tp, tp_index) if param.is_cut(tp) else None,
        )
        for param in shape.params
    ]


def _tp_shard(param: ParamShape, tp: int, index: int) -> TpShard:
    assert param.tp_dim is not None
    size = param.shape[param.tp_dim]
    return TpShard(dim=param.tp_dim, index=index, count=tp, whole=size if size % tp else None)
