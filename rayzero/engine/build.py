"""From a module to flats: param groups, dtypes, units, layouts and memory."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayzero.dist.dtypes import BY_NAME, NAMES
from rayzero.engine.flats import Flat, to_host
from rayzero.engine.options import PrecisionOptions, ZeroOptions
from rayzero.engine.partition import find_units, own_parameters, unit_of
from rayzero.engine.shelf import AnyShelf, ReadAhead, StagedFile
from rayzero.engine.stage import Called
from rayzero.errors import ConfigError
from rayzero.layout.dtypes import dtypes_of
from rayzero.layout.plan import plan_buckets, plan_units
from rayzero.layout.spec import FlatLayout, ParamSpec, TpShard
from rayzero.records import Uses, Where

NamedParameters = Iterable[tuple[str, nn.Parameter]]
GroupsFactory = Callable[[NamedParameters], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The user's param groups: their settings in the user's order, and each parameter's group."""

    settings: list[dict[str, Any]]
    index: dict[str, int]


def read_groups(parameters: Mapping[str, nn.Parameter], factory: GroupsFactory | None) -> Groups:
    """Call the user's param_groups; every trained parameter must be in exactly one group."""
    if factory is None:
        return Groups(settings=[{}], index=dict.fromkeys(parameters, 0))
    names = {id(p): n for n, p in parameters.items()}
    settings: list[dict[str, Any]] = []
    index: dict[str, int] = {}
    for number, group in enumerate(factory(list(parameters.items()))):
        members = group["params"]
        for member in [members] if isinstance(members, torch.Tensor) else members:
            parameter = member[1] if isinstance(member, tuple) else member
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    "param_groups returned a tensor that is no parameter of the module"
                )
            if name in index:
                raise ConfigError(f"param_groups put {name!r} in groups {index[name]} and {number}")
            index[name] = number
        settings.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
    for name, parameter in parameters.items():
        if name not in index and parameter.requires_grad:
            raise ConfigError(
                f"param_groups left out {name!r}, which requires a gradient; put it in a group or "
                "set requires_grad=False"
            )
    return Groups(settings=settings or [{}], index=index)


def specs_of(
    parameters: Mapping[str, nn.Parameter],
    groups: Groups,
    *,
    precision: PrecisionOptions,
    units: Sequence[str],
    tensor_parallel: Mapping[str, TpShard],
) -> list[ParamSpec]:
    """Describe each parameter for the layout, in the module's order."""
    return [
        ParamSpec(
            name=name,
            shape=tuple(parameter.shape),
            dtype=_dtype(name, parameter, precision),
            group=groups.index.get(name, 0),
            unit=unit_of(name, units),
            trained=parameter.requires_grad,
            tp=tensor_parallel.get(name),
        )
        for name, parameter in parameters.items()
    ]


def plan(specs: Sequence[ParamSpec], zero: ZeroOptions, *, shards: int) -> tuple[FlatLayout, ...]:
    """Cut parameters into flats as the stage travels: in units at stage 3, in buckets elsewhere."""
    if zero.stage == 3:
        return plan_units(specs, shards=shards, persistence_elements=zero.persistence_elements)
    return plan_buckets(specs, shards=shards, bucket_elements=zero.bucket_elements)


def make_flats(
    layouts: Sequence[FlatLayout],
    parameters: dict[str, nn.Parameter],
    *,
    precision: PrecisionOptions,
    zero: ZeroOptions,
    shard_index: int,
    home: Where,
    shelf: AnyShelf,
    device: torch.device,
) -> list[Flat]:
    """Give each layout its memory and point the parameters at it. home: of the sharded ones."""
    cut = [layout for layout in layouts if zero.stage == 3 and not layout.persistent]
    sharded = {layout.index for layout in cut}
    files = parameter_files(shelf, cut) if home is Where.DISK else {}
    return [
        Flat(
            layout,
            parameters,
            dtypes=dtypes_of(
                layout.dtype,
                reduce=precision.reduce,
                accumulate=precision.accumulate,
                master=precision.master,
            ),
            shard_index=shard_index,
            device=device,
            sharded=layout.index in sharded,
            where=home if layout.index in sharded else Where.DEVICE,
            file=files.get(layout.index),
        )
        for layout in layouts
    ]


def parameter_files(shelf: AnyShelf, layouts: Sequence[FlatLayout]) -> dict[int, StagedFile]:
    """Reserve a file for the shard of each flat; those of one dtype share a staging buffer."""
    dtypes = {layout.dtype for layout in layouts}
    buffers = {
        name: to_host(
            torch.zeros(
                max(f.shard_elements for f in layouts if f.dtype == name), dtype=BY_NAME[name]
            )
        )
        for name in dtypes
    }
    ahead = {name: ReadAhead() for name in dtypes}
    files = {}
    for layout in layouts:
        buffer = buffers[layout.dtype][: layout.shard_elements]
        file = StagedFile(
            shelf=shelf,
            name=f"{layout.index}.parameters",
            buffer=buffer,
            ahead=ahead[layout.dtype],
        )
        shelf.reserve(file.name, buffer.numel() * buffer.itemsize)
        files[layout.index] = file
    return files


def stage_units(module: nn.Module, zero: ZeroOptions) -> list[str]:
    """Name the units of stage 3; elsewhere the whole module is one."""
    return find_units(module, zero.units) if zero.stage == 3 else [""]


def count_uses(
    module: nn.Module, units: Sequence[str], flats: Sequence[Flat], called: Mapping[str, Called]
) -> dict[str, Uses]:
    """Count the unit modules that gather each unit's parameters: more than one where they are tied.

    A module inside another that uses them too finds them whole. Parameters that stay whole are no
    unit's. Units stand in the module's order, so what is around comes first. A tied holder that is
    never called gathers nothing: once forwards have told which are called, only those count. In
    backward a use from which no gradient goes on, such as an embedding's, leaves the unit whole for
    the use before it.
    """
    units_of = {id(m.parameter): f.layout.unit for f in flats if f.sharded for m in f.members}
    users: dict[str, list[str]] = {}
    for unit in [unit for unit in units if unit in called or not called]:
        part = module.get_submodule(unit)
        own = [id(p) for p in own_parameters(part, unit, units)]
        for owner in {units_of[key] for key in own if key in units_of}:
            around = users.setdefault(owner, [])
            if not any(not user or unit.startswith(f"{user}.") for user in around):
                around.append(unit)
    return {
        owner: Uses(len(names), _backward_gathers([c for n, c in called.items() if n in names]))
        if called
        else Uses(len(names), len(names))
        for owner, names in users.items()
    }


def _backward_gathers(users: Sequence[Called]) -> int:
    """Count the gathers of one backward; users: in the order of forward."""
    gathers, is_whole = 0, False
    for user in reversed(users):
        if user.is_reached:
            gathers += not is_whole
            is_whole = not user.goes_on
    return gathers


def _dtype(name: str, parameter: nn.Parameter, precision: PrecisionOptions) -> str:
    if parameter.dtype not in NAMES:
        raise ConfigError(
            f"parameter {name!r} has dtype {parameter.dtype}; allowed: {', '.join(NAMES.values())}"
        )
    if any(fnmatch.fnmatch(name, pattern) for pattern in precision.keep_fp32):
        return "fp32"
    own = NAMES[parameter.dtype]
    if precision.params is None or own == "fp64":
        return own
    return precision.params
