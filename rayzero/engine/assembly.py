"""Put an engine's parts together: flats over the module, a stage, an optimizer, starting values."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.dist.fake import is_without_values
from rayzero.engine import build
from rayzero.engine.arrivals import Arrivals
from rayzero.engine.flats import Flat
from rayzero.engine.optimizer import PLACES, FlatOptimizer, OptimizerFactory
from rayzero.engine.options import OffloadOptions, PrecisionOptions, ZeroOptions
from rayzero.engine.replicated import Replicated
from rayzero.engine.shelf import AnyShelf, Shelf, SizesShelf
from rayzero.engine.stage import Called, Stage, StageParts, data_axis
from rayzero.engine.values import Initializer, Original, Values, off_meta, settle_buffers
from rayzero.engine.zero1 import Zero1
from rayzero.engine.zero2 import Zero2
from rayzero.engine.zero3 import Zero3
from rayzero.errors import ConfigError
from rayzero.layout.plan import offloaded
from rayzero.layout.spec import FlatLayout, Span, TpShard

STAGES = (Replicated, Zero1, Zero2, Zero3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the engine's user chose; see ZeroEngine for each."""

    optimizer: OptimizerFactory
    param_groups: build.GroupsFactory | None
    zero: ZeroOptions
    precision: PrecisionOptions
    tensor_parallel: Mapping[str, TpShard]
    offload: OffloadOptions
    initialize: Initializer | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The parts of one engine."""

    module: nn.Module
    comm: Communicator
    device: torch.device
    flats: list[Flat]
    trained: list[Flat]
    stage: Stage
    arrivals: Arrivals
    optimizer: FlatOptimizer
    shelf: AnyShelf
    """The files of what is offloaded to disk."""
    units: Sequence[str]
    """Names of the modules that stage 3 gathers as one."""
    called: dict[str, Called]
    """Those that have run, in the order of their first calls."""
    staging: list[torch.Tensor] = field(default_factory=list)
    """The host copy that a save under way writes from."""

    @property
    def frozen(self) -> list[Flat]:
        """Flats without gradients."""
        return [flat for flat in self.flats if not flat.layout.trained]


def assemble(module: nn.Module, comm: Communicator, choices: Choices) -> Assembly:
    """Take the module over: its parameters become views into flats, with rank 0's values.

    Where that fails, on a full disk for instance, the module is left as it was.
    """
    _check_offload(choices)
    with contextlib.ExitStack() as undo:
        original = Original(module)
        undo.callback(original.give_back)
        assembly = _assemble(original, comm, choices, undo)
        undo.pop_all()
    return assembly


def _assemble(
    original: Original, comm: Communicator, choices: Choices, undo: contextlib.ExitStack
) -> Assembly:
    module = original.module
    shelf = _shelf(choices.offload)
    undo.callback(shelf.close)
    device = _device(comm.device_type)
    off_meta(module, device)
    parameters = dict(module.named_parameters())
    groups = build.read_groups(parameters, choices.param_groups)
    zero = choices.zero
    units = build.stage_units(module, zero)
    values = Values(original, comm=comm, initialize=choices.initialize, seed=choices.seed)
    axis = data_axis(zero.stage, comm)
    flats = build.make_flats(
        _layouts(parameters, groups, units, choices, comm.size(axis)),
        parameters,
        precision=choices.precision,
        zero=zero,
        shard_index=comm.rank(axis),
        home=PLACES[choices.offload.params],
        shelf=shelf,
        device=device,
    )
    trained = [flat for flat in flats if flat.layout.trained]
    arrivals = Arrivals(trained, by_count=zero.stage < 3)
    undo.callback(arrivals.close)
    parts = StageParts(
        module=module,
        flats=flats,
        trained=trained,
        comm=comm,
        zero=zero,
        units=units,
        device=device,
        called={},
        in_backward=lambda: arrivals.is_open,
        hand_out=arrivals.hand_out,
        is_away=_is_away(trained, choices.offload),
    )
    stage = STAGES[zero.stage](parts)
    undo.callback(stage.close)
    assembly = Assembly(
        module=module,
        comm=comm,
        device=device,
        flats=flats,
        trained=trained,
        stage=stage,
        arrivals=arrivals,
        optimizer=FlatOptimizer(
            choices.optimizer, groups.settings, trained, stage.part, choices.offload, shelf
        ),
        shelf=shelf,
        units=units,
        called=parts.called,
    )
    _start_values(assembly, values, axis)
    settle_buffers(module, comm, device)
    return assembly


def _layouts(
    parameters: Mapping[str, nn.Parameter],
    groups: build.Groups,
    units: Sequence[str],
    choices: Choices,
    shards: int,
) -> tuple[FlatLayout, ...]:
    specs = build.specs_of(
        parameters,
        groups,
        precision=choices.precision,
        units=units,
        tensor_parallel=choices.tensor_parallel,
    )
    return build.plan(specs, choices.zero, shards=shards)


def _check_offload(choices: Choices) -> None:
    if choices.offload.params != "none" and choices.zero.stage != 3:
        raise ConfigError(
            f"offload.params={choices.offload.params} needs zero.stage=3, found "
            f"{choices.zero.stage}: only stage 3 shards parameters"
        )


def _shelf(offload: OffloadOptions) -> AnyShelf:
    """Make the folder for files; there is none where tensors have no values, or all stay."""
    if "disk" not in (offload.optimizer, offload.params) or is_without_values(torch.empty(0)):
        return SizesShelf()
    assert offload.folder is not None, "OffloadOptions asks for a folder"
    return Shelf(offload.folder)


def _is_away(trained: Sequence[Flat], offload: OffloadOptions) -> Callable[[Flat], bool]:
    away = offloaded([flat.layout for flat in trained], offload.optimizer, offload.fraction)
    return lambda flat: flat.layout.index in away


def _start_values(parts: Assembly, values: Values, axis: str) -> None:
    """Write starting values into parameters and masters, drawing no more than this rank holds."""
    with torch.no_grad():
        for flat in parts.flats:
            part = parts.stage.part(flat) if flat.layout.trained else flat.shard
            is_shard = part.numel() == flat.layout.shard_elements
            whole = Span(start=0, stop=flat.layout.padded)
            span = flat.layout.shard(flat.shard_index) if is_shard else whole
            drawn = values.of_span(flat, span)
            part.copy_(drawn)
            flat.store()
            if flat.layout.trained and parts.optimizer.has_copy(flat):
                parts.optimizer.write_master(flat, drawn)
            if is_shard and not flat.sharded:
                parts.comm.all_gather(flat.whole, axis=axis, unit=flat.layout.name).wait()


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
